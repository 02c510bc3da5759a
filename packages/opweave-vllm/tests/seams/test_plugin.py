"""The seams that the environment chooses; does not need vLLM."""

import pytest

from opweave.platforms.builtin import CpuPlatform
from opweave_vllm import plugin


@pytest.mark.parametrize(
    ("text", "seams"),
    [
        ("all", plugin.SEAMS),
        ("none", ()),
        ("", ()),
        ("norms, linear,norms", ("norms", "linear")),
    ],
)
def test_variable_chooses_seams(
    monkeypatch: pytest.MonkeyPatch, text: str, seams: tuple[str, ...]
) -> None:
    monkeypatch.setenv(plugin.VARIABLE, text)
    assert plugin.chosen_seams() == (seams, False)


@pytest.mark.parametrize("bf16", [True, False])
def test_default_depends_on_bf16_instructions(monkeypatch: pytest.MonkeyPatch, bf16: bool) -> None:
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    found = {"avx512_bf16"} if bf16 else {"avx2"}
    monkeypatch.setattr("opweave.platforms.probes.cpu_features", lambda: frozenset(found))
    assert CpuPlatform().capabilities.bf16 is bf16
    assert plugin.chosen_seams() == (() if bf16 else ("linear", "attention"), True)


def test_unknown_seam_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "linaer")
    with pytest.raises(plugin.SeamError, match="'linaer' in OPWEAVE_VLLM_SEAMS; use 'all'"):
        plugin.register()
