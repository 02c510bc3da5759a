"""Fixtures of the tests of the compile pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def compiled(
    function: Callable[..., Any], *, dynamic: bool | None = None, **options: Any
) -> Callable[..., Any]:
    """Compile *function* as one graph, by default without code generation."""
    options = {"codegen": False, **options}
    run: Any = torch.compile(
        function, backend="opweave", fullgraph=True, dynamic=dynamic, options=options
    )
    return run


def all_native() -> dict[str, str]:
    """Priorities that choose native for every op."""
    return dict.fromkeys(ir.current_registry().ops, "native")
