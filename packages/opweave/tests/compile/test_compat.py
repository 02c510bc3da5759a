"""A canary for each private name of torch that the pipeline touches."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, symbolic_trace

from opweave.compile import compat

FOLDER = Path(inspect.getfile(compat)).parent


def test_fake_mode_of() -> None:
    with FakeTensorMode() as mode:
        fake = torch.empty(2)
    assert compat.fake_mode_of([1, fake]) is mode
    assert compat.fake_mode_of([torch.empty(2)]) is None


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


def test_trace() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x)

    with FakeTensorMode():
        fake = torch.empty(4)
    graph = compat.trace(function, [fake]).graph
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets, graph
    assert torch.ops.aten.silu.default not in targets, "decomposed as Inductor decomposes"
    assert all("val" in node.meta for node in graph.nodes if node.op == "call_function")


def test_no_modes() -> None:
    with FakeTensorMode():
        assert type(torch.empty(1)) is not torch.Tensor
        with compat.no_modes():
            assert type(torch.empty(1)) is torch.Tensor


def test_is_mutable() -> None:
    assert compat.is_mutable(torch.ops.aten.add_.Tensor)
    assert not compat.is_mutable(torch.ops.aten.add.Tensor)
    assert not compat.is_mutable(len)


def test_compile_aot_and_propagate() -> None:
    x = torch.randn(3)
    module = symbolic_trace(lambda x: (x.sin(),))
    compat.propagate_fakes(module, [x])
    seen: list[GraphModule] = []
    run = compat.compile_aot(module, [x], seen.append)
    (found,) = run(x)
    assert torch.equal(found, x.sin())
    assert len(seen) == 1


def test_inductor_names() -> None:
    assert {"joint_custom_pre_pass", "post_grad_custom_post_pass"} <= compat.inductor_option_names()
    assert compat.configured_passes("joint_custom_pre_pass") == []
    assert compat.mode_options(None) == {}
    assert compat.mode_options("max-autotune")
    assert compat.cache_directory()
    with pytest.raises(AttributeError):
        compat.configured_passes("no_such_hook")


def test_replace_compile_fx() -> None:
    from torch._inductor import compile_fx as module

    before = module.compile_fx
    undo = compat.replace_compile_fx(lambda original: original)
    undo()
    assert module.compile_fx is before
    assert compat.is_inside() is False


def test_sort_topologically() -> None:
    graph = symbolic_trace(lambda x: x.sin() + 1).graph
    compat.sort_topologically(graph)
    graph.lint()


def test_private_names_are_in_compat_only() -> None:
    found = []
    for path in sorted(FOLDER.rglob("*.py")):
        if path.name.endswith("compat.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._"):
                found.append(f"{path.name}:{node.lineno} {node.module}")
    assert not found


def test_compiles_ahead_of_time() -> None:
    assert not compat.compiles_ahead_of_time()
    with torch._functorch.config.patch(bypass_autograd_cache_key=True):
        assert compat.compiles_ahead_of_time()


def test_keep_mutation_order() -> None:
    from torch._inductor.scheduler import SchedulerNode

    compat.correct_mutations()
    corrected = SchedulerNode._compute_attrs
    compat.correct_mutations()
    assert SchedulerNode._compute_attrs is corrected, "corrected once"
    for name in ("mutation_renames", "set_read_writes"):
        assert name in inspect.getsource(SchedulerNode.__mro__[1]), name
