"""The seams that the environment chooses; does not need vLLM."""

import pytest

from opweave_vllm import plugin


@pytest.mark.parametrize(
    ("text", "seams"),
    [
        (None, ()),
        ("all", plugin.SEAMS),
        ("none", ()),
        ("", ()),
        ("norms, linear,norms", ("norms", "linear")),
    ],
)
def test_variable_chooses_seams(
    monkeypatch: pytest.MonkeyPatch, text: str | None, seams: tuple[str, ...]
) -> None:
    if text is None:
        monkeypatch.delenv(plugin.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(plugin.VARIABLE, text)
    assert plugin.chosen_seams() == seams


def test_unknown_seam_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "linaer")
    with pytest.raises(plugin.SeamError, match="'linaer' in OPWEAVE_VLLM_SEAMS; use 'all'"):
        plugin.register()
