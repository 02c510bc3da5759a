"""An engine's compilation config: what is compiled, with what, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opweave.config import (
    CompilationConfig,
    EngineConfig,
    compilation_config,
    current_compilation_config,
)
from opweave.engine import LLM, SamplingParams
from opweave.engine.compilation import compiled_forward
from opweave.engine.errors import InvalidArgumentError
from opweave.engine.loader import load_model
from opweave.layers.errors import UnusedOpWarning

Checkpoints = Callable[[str], tuple[Path, Any]]
SHORT = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(["a", "some more"], SHORT)]


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        (1, "aot_eager"),
        (3, "eager"),
        pytest.param(2, "aot_eager", marks=pytest.mark.slow),
        pytest.param(1, "inductor", marks=pytest.mark.slow),
        pytest.param(3, "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_models_write_the_same(mode: int, backend: str, checkpoint: Checkpoints) -> None:
    path = checkpoint("llama")[0]
    expected = tokens(LLM(path))
    config = EngineConfig(compilation_config={"mode": mode, "backend": backend})
    assert tokens(LLM(path, config=config)) == expected


@pytest.mark.parametrize(
    ("mode", "backend", "used", "whole"),
    [
        (1, "inductor", "inductor", False),
        (2, "inductor", "inductor", True),
        (3, "inductor", "opweave", True),
        (3, "opweave", "opweave", True),
        (3, "aot_eager", "aot_eager", True),
        (0, "inductor", None, None),
        (3, "eager", None, None),
    ],
)
def test_what_each_mode_compiles_with(
    mode: int, backend: str, used: str | None, whole: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    def spy(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        given.append(options)
        return model

    monkeypatch.setattr(torch, "compile", spy)
    model = torch.nn.Identity()
    assert compiled_forward(model, CompilationConfig(backend, mode)) is model
    expected = {"backend": used, "dynamic": True, "fullgraph": whole}
    assert given == ([expected] if used else [])


def test_an_unknown_backend_is_refused_before_the_model_loads() -> None:
    config = EngineConfig(compilation_config={"mode": 1, "backend": "inducto"})
    with pytest.raises(InvalidArgumentError, match=r"'inducto'.* Did you mean 'inductor'"):
        LLM("no/such/model", config=config)


def test_the_model_is_built_under_the_config(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[CompilationConfig] = []

    def spy(*arguments: Any, **options: Any) -> Any:
        seen.append(current_compilation_config())
        return load_model(*arguments, **options)

    monkeypatch.setattr("opweave.engine.worker.load_model", spy)
    path, typed = checkpoint("llama")[0], CompilationConfig(custom_ops=["none"])
    LLM(path, config=EngineConfig(compilation_config=typed))
    with compilation_config(typed):
        LLM(path)
    assert seen == [typed, typed]


def test_names_without_effect_are_warned_of_where_the_engine_is_made(
    checkpoint: Checkpoints,
) -> None:
    config = EngineConfig(compilation_config={"custom_ops": "+no_such_op"})
    with pytest.warns(UnusedOpWarning, match="'no_such_op', which doesn't exist") as caught:
        LLM(checkpoint("llama")[0], config=config)
    assert caught[0].filename == __file__
