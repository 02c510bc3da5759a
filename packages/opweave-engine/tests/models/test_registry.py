"""Models of other packages: registered by class or reference, found by architecture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from opweave.registration import Owner, owned_by
from opweave_engine.models import (
    CheckpointModel,
    DuplicateModelError,
    InvalidModelError,
    LlamaForCausalLM,
    UnsupportedModelError,
    build_model,
    model_class,
    register_model,
    registry,
    supported_architectures,
)

ACME, OTHER = Owner("acme", "acme-device", "0.1.0"), Owner("other", "other-models", "2.0")


class Doubling(CheckpointModel):
    """A model of one number."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.factor = dtype, torch.nn.Parameter(torch.ones(1, dtype=dtype))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(dtype)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return input_ids * self.factor * 2


@pytest.fixture(autouse=True)
def _no_model_stays() -> Iterator[None]:
    before = dict(registry._models)
    yield
    registry._models.clear()
    registry._models.update(before)


def config(architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture]}


@pytest.mark.parametrize("model", [Doubling, f"{__name__}:Doubling", f"{__name__}.Doubling"])
def test_a_model_by_class_or_reference(model: str | type[CheckpointModel]) -> None:
    register_model("DoublingForCausalLM", model)
    assert "DoublingForCausalLM" in supported_architectures()
    built = build_model(config("DoublingForCausalLM"), dtype=torch.float16)
    assert isinstance(built, Doubling)
    assert built.dtype == torch.float16


def test_a_reference_is_imported_at_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_model.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    register_model("LateModel", "late_model:Late")
    assert "LateModel" in supported_architectures()
    with pytest.raises(RuntimeError, match="imported"):
        model_class(config("LateModel"))


def test_two_models_of_one_architecture_are_named_with_their_owners() -> None:
    with owned_by(ACME):
        register_model("NewModel", f"{__name__}:Doubling")
        register_model("NewModel", f"{__name__}:Doubling")  # a plugin may be loaded twice
    with owned_by(OTHER), pytest.raises(DuplicateModelError) as error:
        register_model("NewModel", "other.models:New")
    assert f"{__name__}:Doubling of acme (acme-device 0.1.0)" in str(error.value)
    assert "other.models:New of other (other-models 2.0)" in str(error.value)
    assert model_class(config("NewModel")) is Doubling


def test_models_of_opweave_cannot_be_registered_again() -> None:
    with pytest.raises(
        DuplicateModelError, match=r"opweave_engine\.models\.llama:LlamaForCausalLM; so"
    ):
        register_model("LlamaForCausalLM", Doubling)
    assert model_class(config("Qwen3ForCausalLM")) is LlamaForCausalLM


@pytest.mark.parametrize(("model", "message"), [
    ("no.such.package:Model", "there is no module 'no'"),
    (f"{__name__}:Missing", "has no 'Missing'"),
    (f"{__name__}:ACME", "must be a class that derives from opweave_engine.models.CheckpointModel"),
    ("Model", "is not a qualified name"),
])  # fmt: skip
def test_references_that_lead_nowhere(model: str, message: str) -> None:
    with owned_by(ACME):
        register_model("LostModel", model)
    with pytest.raises(InvalidModelError, match=message) as error:
        model_class(config("LostModel"))
    assert f"the model of LostModel, {model} of acme" in str(error.value)


@pytest.mark.parametrize("model", [torch.nn.Linear, 3, Doubling(torch.float32)])
def test_what_is_no_model_is_refused_at_once(model: Any) -> None:
    with pytest.raises(InvalidModelError, match="must be a class that derives from"):
        register_model("NoModel", model)
    with pytest.raises(
        UnsupportedModelError, match=r"'NoModel'.*Supported: BertForMaskedLM, BertModel, Deepseek"
    ):
        model_class(config("NoModel"))
