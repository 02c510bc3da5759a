"""Private names of torch: where they are used, and facts about them that no other test shows."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from opweave.compile import compat

FOLDER = Path(inspect.getfile(compat)).parent


def test_storage_key() -> None:
    with FakeTensorMode():
        fake = torch.empty(4, 4)
        assert compat.storage_key(fake) == compat.storage_key(fake[1:].t())
        assert compat.storage_key(fake) != compat.storage_key(fake.clone())
        assert compat.storage_key(fake.to_sparse()) is None


def test_is_wrapped() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        same = compat.storage_key(x) == compat.storage_key(x[1:]) == compat.storage_key(base)
        seen.append((compat.is_wrapped(x), compat.is_wrapped(base), same))
        return x.sum()

    base = torch.zeros(2, 3)
    torch.vmap(torch.func.grad(look))(base)
    torch.func.grad(look)(base)
    assert seen == [(True, False, True)] * 2


def test_private_names_are_in_compat_only() -> None:
    found = []
    for path in sorted(FOLDER.rglob("*.py")):
        if path.name.endswith("compat.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._"):
                found.append(f"{path.name}:{node.lineno} {node.module}")
    assert not found


def test_keep_mutation_order() -> None:
    from torch._inductor.scheduler import SchedulerNode

    compat.correct_mutations()
    corrected = SchedulerNode._compute_attrs
    compat.correct_mutations()
    assert SchedulerNode._compute_attrs is corrected, "corrected once"
    for name in ("mutation_renames", "set_read_writes"):
        assert name in inspect.getsource(SchedulerNode.__mro__[1]), name
