"""Fixtures of the tests of the compile pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opweave import ir


@pytest.fixture(autouse=True)
def compiled_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No gradients, nothing compiled earlier, and caches of the test's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


def all_native() -> dict[str, str]:
    """Priorities that choose native for every op."""
    return dict.fromkeys(ir.current_registry().ops, "native")


def amounts(few: int, many: int, parts: int = 4) -> list[Any]:
    """How many random programs a test draws: a few, or many in parts that take a minute or two."""
    share = many // parts
    marks = pytest.mark.slow, pytest.mark.timeout(1800)  # on a busy machine
    slow = [
        pytest.param(share, marks=marks, id=f"{share} of {many}, part {part}")
        for part in range(parts)
    ]
    return [few, *slow]
