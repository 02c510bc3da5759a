"""``compile_native``: the native method compiled on its own, where the op is disabled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from opweave import platforms
from opweave.config import CompilationConfig, compilation_config
from opweave.layers import CustomOp, InvalidLayerError
from opweave.layers.custom_op import _compiled

pytestmark = pytest.mark.usefixtures("registries")


class Backend(platforms.CpuPlatform):
    """Counts what is compiled, and computes it as it is."""

    simple_compile_backend: Any = "inductor"


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    platform, counter = Backend(), CompileCounter()
    monkeypatch.setattr(platform, "simple_compile_backend", counter)
    monkeypatch.setattr(platforms, "current_platform", platform)
    torch.compiler.reset()
    yield counter
    torch.compiler.reset()
    _compiled.cache_clear()


def make(dims: Any = None, **options: Any) -> Any:
    @CustomOp.register("shift", dynamic_arg_dims=dims)
    class Shift(CustomOp):
        def __init__(self) -> None:
            super().__init__(**options)
            self.by = torch.nn.Parameter(torch.ones(1), requires_grad=False)

        def forward_native(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return x + self.by if bias is None else x + self.by + bias

    return Shift


def under(backend: str, mode: int, custom_ops: str, op: Any) -> Any:
    with compilation_config(CompilationConfig(backend, mode, custom_ops)):
        return op()


@pytest.mark.parametrize(
    ("compile_native", "backend", "mode", "custom_ops", "compiles"),
    [
        (True, "inductor", 3, "none", True),
        (True, "inductor", 1, "all,-shift", True),
        (False, "inductor", 3, "none", False),
        (True, "inductor", 3, "all", False),
        (True, "inductor", 0, "none", False),
        (True, "eager", 3, "none", False),
    ],
)
def test_when_it_compiles(
    compile_native: bool,
    backend: str,
    mode: int,
    custom_ops: str,
    compiles: bool,
    counter: CompileCounter,
) -> None:
    op = under(backend, mode, custom_ops, make(compile_native=compile_native))
    assert torch.equal(op(torch.ones(4)), torch.full((4,), 2.0))
    assert counter.frame_count == int(compiles)


def test_no_size_is_compiled_twice(counter: CompileCounter) -> None:
    op = under("inductor", 3, "none", make(compile_native=True))
    for size in (3, 5, 8):
        op(torch.ones(size, size + 1))
    assert counter.frame_count == 1


def test_a_copy_computes_with_its_own_parameters(counter: CompileCounter) -> None:
    first = under("inductor", 3, "none", make(compile_native=True))
    second = copy.deepcopy(first)
    second.by.fill_(5.0)
    assert first(torch.zeros(3)).tolist() == [1.0] * 3
    assert second(torch.zeros(3)).tolist() == [5.0] * 3
    assert counter.frame_count == 1


@pytest.mark.parametrize("dims", [{"x": 0, "bias": 0}, {"x": [0], "bias": -2}, {"x": -2}])
def test_named_dimensions_vary_and_the_others_do_not(dims: Any, counter: CompileCounter) -> None:
    op = under("inductor", 3, "none", make(dims, compile_native=True))
    for size in (3, 5, 8):
        x = torch.ones(size, 4)
        assert torch.equal(op(x), x + 1)
    assert counter.frame_count == 1
    op(torch.ones(3, 6))  # a size that was taken for fixed
    assert counter.frame_count == 2


def test_dimensions_of_keywords(counter: CompileCounter) -> None:
    op = under("inductor", 3, "none", make({"x": 0, "bias": 0}, compile_native=True))
    for size in (3, 5, 8):
        x = torch.ones(size, 4)
        assert torch.equal(op(bias=x, x=x), x + 2)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dims", [None, {"x": 0}])
def test_inside_a_larger_graph(dims: Any, counter: CompileCounter) -> None:
    op = under("inductor", 3, "none", make(dims, compile_native=True))
    outer = CompileCounter()
    run = torch.compile(lambda x: op(x) * 2, backend=outer, fullgraph=True, dynamic=True)
    for size in (3, 5):
        assert torch.equal(run(torch.ones(size, 4)), torch.full((size, 4), 4.0))
    assert (outer.frame_count, counter.frame_count) == (1, 0)


def test_dimensions_name_arguments(counter: CompileCounter) -> None:
    with pytest.raises(InvalidLayerError, match=r"names 'y', which .* It takes x, bias"):
        under("inductor", 3, "none", make({"y": 0}, compile_native=True))
