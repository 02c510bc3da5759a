"""Both call paths run the same checks and give the same messages; neither leaks."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from opweave import _custom_ops, native
from opweave.ir.ops.activation import silu_and_mul

from .oracle import CALL_PATHS, call_path

f32 = torch.float32


def ones(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "expected 4 positional arguments, found 0: rms_norm(Tensor(a!) out"),
        ((ones(8), ones(8), None), "expected 4 positional arguments, found 3"),
        ((ones(8), None, None, 1e-6), "x must be exactly a torch.Tensor or torch.nn.Parameter, f"),
        ((ones(8), [1.0], None, 1e-6), "found list"),
        ((ones(8), ones(8), 1.0, 1e-6), "torch.nn.Parameter, or None, found float"),
        ((ones(8), ones(8), None, "1"), "epsilon must be a float or an int, found str"),
        ((ones(8), ones(8), None, True), "epsilon must be a float or an int, found bool"),
        ((ones(8), ones(8).as_subclass(Subclass), None, 1.0), "found Subclass"),
        ((ones(8), torch.ones(8, device="meta"), None, 1.0), "x must be a plain strided tensor"),
        ((ones(8), ones(2, 2).to_sparse(), None, 1.0), "x must be a plain strided tensor"),
    ],
)
def test_direct_call_refuses_other_types(
    module: ModuleType, arguments: tuple[Any, ...], expected: str
) -> None:
    with pytest.raises(TypeError) as error:
        module.rms_norm(*arguments)
    assert str(error.value).startswith("rms_norm: ")
    assert expected in str(error.value)


UNUSUAL = {
    "mkldnn": lambda: ones(8).to_mkldnn(),
    "sparse": lambda: ones(8).to_sparse(),
    "compressed": lambda: ones(4, 8).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([ones(8), ones(4)]),
    "quantized": lambda: torch.quantize_per_tensor(ones(8), 1.0, 0, torch.qint8),
    "functional": lambda: torch._to_functional_tensor(ones(8)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_only_dense_memory_is_read(
    module: ModuleType, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    unusual = UNUSUAL[kind]()
    assert type(unusual) is Tensor
    with pytest.raises(TypeError, match="x must be a plain strided tensor"):
        module.rms_norm(ones(8), unusual, None, 1e-6)
    assert capfd.readouterr() == ("", "")


def negated() -> Tensor:
    """Minus one, twice, in memory that holds one."""
    return torch.full((2, 1), 1 + 1j).conj().imag


def test_a_negated_view_is_not_read_as_it_lies_in_memory(module: ModuleType) -> None:
    for x in (negated(), torch._neg_view(ones(2, 1))):
        assert x.is_neg()
        for arguments in ((ones(2, 1), x), (x, ones(2, 1))):
            with pytest.raises(TypeError, match="must be a plain strided tensor"):
                module.rms_norm(*arguments, None, 0.0)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                out = torch.empty(2, 1)
                _custom_ops.rms_norm(out, x, None, 0.0)
                assert torch.equal(out, -ones(2, 1))


def test_other_threads_run_while_a_large_weight_is_read(module: ModuleType) -> None:
    x, weight, out = ones(1, 4096), ones(8192, 4096), torch.empty(1, 8192)
    turns, is_over = 0, False

    def count() -> None:
        nonlocal turns
        while not is_over:
            turns += 1
            time.sleep(0)

    interval, thread = sys.getswitchinterval(), threading.Thread(target=count)
    thread.start()
    try:
        sys.setswitchinterval(1000)  # this thread keeps the lock of Python until it releases it
        time.sleep(0.01)  # a thread that waits by the interval before has had its turn
        # A busy machine may have no processor for the other thread as long as one call lasts.
        end = time.monotonic() + 10
        ran = False
        while not ran and time.monotonic() < end:
            before = turns
            module.linear(out, x, weight, None)
            ran = turns > before
    finally:
        sys.setswitchinterval(interval)
        is_over = True
        thread.join()
    assert ran


def test_no_tensor_at_all(module: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"^rms_norm: x must be a tensor, found None"):
        torch.ops.opweave_c.rms_norm(ones(8), None, None, 1e-6)


def test_numbers_that_are_too_large(module: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"^rms_norm: epsilon must be a float, or an int that a fl"):
        module.rms_norm(ones(8), ones(8), None, 10**400)


def test_no_elements_have_no_order(module: ModuleType) -> None:
    x = ones(6, 8).t()[:0]
    assert x.stride() == (1, 8)
    for name in CALL_PATHS:
        call_path(module, name, "rms_norm")(x, x, None, 1e-6)
    with torch.no_grad():
        assert silu_and_mul(x).shape == (0, 3)


@pytest.mark.parametrize("name", CALL_PATHS)
def test_a_lazy_copy_does_not_change_its_source(module: ModuleType, name: str) -> None:
    source = 2 * ones(2, 8)
    copy = torch._lazy_clone(source)
    call_path(module, name, "rms_norm")(copy, copy, None, 0.0)
    assert torch.equal(source, 2 * ones(2, 8))
    assert torch.equal(copy, ones(2, 8))


def test_direct_call_takes_no_keywords(module: ModuleType) -> None:
    with pytest.raises(TypeError):
        module.rms_norm(ones(8), ones(8), None, epsilon=1e-6)


@pytest.mark.parametrize("name", CALL_PATHS)
def test_int_for_float_and_parameter_for_tensor(module: ModuleType, name: str) -> None:
    out, weight = torch.empty(8), torch.nn.Parameter(2 * ones(8))
    call_path(module, name, "rms_norm")(out, ones(8), weight, 3)
    assert torch.equal(out, ones(8))


def owner_count(tensor: Any) -> int:
    """How many C++ references the tensor has."""
    count: int = tensor._use_count()
    return count


@pytest.mark.parametrize("name", CALL_PATHS)
def test_no_reference_is_kept(module: ModuleType, name: str) -> None:
    run = call_path(module, name, "rms_norm")
    x, out, weight = ones(4, 8), ones(4, 8), ones(8)
    while gc.collect():  # what earlier tests left refers to None too
        pass
    owners = [owner_count(t) for t in (x, out, weight)]
    counts = [sys.getrefcount(t) for t in (x, out, weight)]
    nones = sys.getrefcount(None)
    for _ in range(2000):
        run(out, x, weight, 1e-6)
        run(out, x, None, 1e-6)
        with pytest.raises(RuntimeError):
            run(out, x, out, 1e-6)
    while gc.collect():
        pass
    assert [owner_count(t) for t in (x, out, weight)] == owners
    assert [sys.getrefcount(t) for t in (x, out, weight)] == counts
    assert abs(sys.getrefcount(None) - nones) < 2000  # calls of each kind: less than one for each


def test_vmap_does_not_reach_the_direct_call_silently(module: ModuleType) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        torch.func.vmap(lambda x: module.rms_norm(x, x, None, 1e-6))(ones(3, 8))


def test_wrappers_take_every_kind_of_tensor(module: ModuleType) -> None:
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            out = torch.empty(2, 8)
            _custom_ops.rms_norm(out, ones(2, 8), None, 0.0)
            assert torch.equal(out, ones(2, 8))
            x, residual = ones(2, 8), ones(2, 8)
            _custom_ops.fused_add_rms_norm(x, residual, None, 0.0)
            assert torch.equal(x, ones(2, 8))
            assert torch.equal(residual, 2 * ones(2, 8))
    meta = torch.ones(2, 8, device="meta")
    _custom_ops.rms_norm(meta, meta, None, 1e-6)
    _custom_ops.fused_add_rms_norm(meta, meta.clone(), None, 1e-6)
    with pytest.raises(RuntimeError, match="out must have the shape"):
        _custom_ops.rms_norm(ones(3), ones(4), None, 1e-6)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("there", range(3))
def test_tensors_on_meta_among_others(module: ModuleType, grad: bool, there: int) -> None:
    tensors = [torch.full((4,), 7.0), ones(4), ones(4)]
    tensors[there] = tensors[there].to("meta")
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"^rms_norm: the tensors"):
        _custom_ops.rms_norm(*tensors, 1e-6)


@torch.enable_grad()
def test_autograd_loses_nothing_unseen(module: ModuleType) -> None:
    leaf = ones(1, 4).requires_grad_()
    for written in (leaf, leaf * 1):
        with pytest.raises(RuntimeError, match=r"^fused_add_rms_norm: x requires grad"):
            _custom_ops.fused_add_rms_norm(written, ones(1, 4), None, 1e-6)
    with torch.no_grad():
        _custom_ops.fused_add_rms_norm(leaf, ones(1, 4), None, 1e-6)
    for arguments in ((leaf, None), (ones(1, 4), ones(4).requires_grad_())):
        with pytest.raises(RuntimeError, match=r"^rms_norm: (x|weight) requires grad"):
            _custom_ops.rms_norm(ones(1, 4), *arguments, 1e-6)

    factor = ones(1, 4)
    product = (leaf * factor).sum()
    _custom_ops.rms_norm(factor, ones(1, 4), None, 1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


class _Seeing(TorchFunctionMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls.append(str(function))
        return function(*args, **(kwargs or {}))


def checkpointed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    everything = partial(create_selective_checkpoint_contexts, [])
    result: Tensor = checkpoint(function, x, use_reentrant=False, context_fn=everything)
    return result


def counted(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return function(x)


def seen(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with _Seeing():
        return function(x)


def linearized(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    result: Tensor = torch.func.linearize(function, x.detach())[0]
    return result


def traced(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    result: Tensor = torch.jit.trace(function, (x,))(x)
    return result


@torch.enable_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("observer", [counted, seen, checkpointed, linearized, traced])
def test_who_watches_calls_does_not_hide_them_from_autograd(
    module: ModuleType, observer: Callable[..., Tensor]
) -> None:
    with pytest.raises(RuntimeError, match=r"^rms_norm: .* (requires grad|has a tangent)"):
        observer(lambda x: normalized(x) * x, ones(1, 4).requires_grad_())
    weight = ones(1, 4).requires_grad_()
    factor = ones(1, 4)
    product = (weight * factor).sum()
    if observer in (counted, seen):
        observer(lambda out: _custom_ops.rms_norm(out, ones(1, 4), None, 1e-6), factor)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.parametrize("grad", [False, True])
def test_a_function_mode_sees_the_op_and_nothing_else(module: ModuleType, grad: bool) -> None:
    out, x = ones(1, 4), ones(1, 4)
    with torch.set_grad_enabled(grad), _Seeing() as mode:
        _custom_ops.rms_norm(out, x, None, 0.0)
    assert mode.calls == ["opweave_c.rms_norm.default"]


class _Wrapping(torch.Tensor):
    """Returns everything in a list, numbers and truth as well."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return [super().__torch_function__(function, types, args, kwargs or {})]


@pytest.mark.parametrize("grad", [False, True])
def test_a_subclass_is_asked_nothing(module: ModuleType, grad: bool) -> None:
    out = torch.zeros(1, 4).as_subclass(_Wrapping)
    with torch.set_grad_enabled(grad):
        _custom_ops.rms_norm(out, ones(1, 4), None, 0.0)
    assert torch.equal(out.as_subclass(Tensor), ones(1, 4))


def test_without_a_tensor_the_direct_call_says_what_is_wrong(module: ModuleType) -> None:
    with torch.no_grad(), pytest.raises(TypeError, match=r"^rms_norm: out must be exactly a torch"):
        _custom_ops.rms_norm(None, None, None, 0.0)  # type: ignore[arg-type]


@torch.enable_grad()
def test_a_graph_loses_nothing_unseen(module: ModuleType) -> None:
    def doubled(x: Tensor) -> Tensor:
        out = x * 2
        _custom_ops.rms_norm(out, x, None, 1e-6)
        return out

    compiled = torch.compile(doubled, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"^rms_norm: out requires grad"):
        compiled(ones(1, 4).requires_grad_())
    assert torch.equal(compiled(ones(1, 4)), doubled(ones(1, 4)))


@torch.enable_grad()
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_graph_counts_versions(module: ModuleType, backend: str) -> None:
    def step(x: Tensor, weight: Tensor, needed: bool) -> Tensor:
        y = x * 2
        product = weight * y if needed else weight * (y + 0)
        _custom_ops.rms_norm(y, x, None, 0.0)
        return product + y

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    x, weight = torch.full((1, 4), 3.0), ones(1, 4).requires_grad_()
    for call in (step, compiled):
        out = call(x, weight, False)
        (gradient,) = torch.autograd.grad(out.sum(), weight)
        assert (out.tolist(), gradient.tolist()) == ([[7.0] * 4], [[6.0] * 4])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            call(x, weight, True).sum().backward()


@pytest.mark.parametrize("grad", [False, True])
def test_a_lazy_view_is_not_written(module: ModuleType, grad: bool) -> None:
    views = (torch._neg_view(ones(2, 4)), torch.ones(2, 4, dtype=torch.complex64).conj().imag)
    for out, mode in itertools.product(views, (nullcontext(), FlopCounterMode(display=False))):
        with (
            torch.set_grad_enabled(grad),
            mode,
            pytest.raises(
                RuntimeError, match=r"^rms_norm: out is mutated, but is a lazily negated view"
            ),
        ):
            _custom_ops.rms_norm(out, ones(2, 4), None, 1e-6)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("place", range(3))
def test_freed_memory(module: ModuleType, grad: bool, place: int) -> None:
    tensors = [ones(1, 4), ones(1, 4), ones(4)]
    tensors[place].untyped_storage().resize_(0)
    name = ("out", "x", "weight")[place]
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(RuntimeError, match=rf"^rms_norm: {name} has no memory: its storage was f"),
    ):
        _custom_ops.rms_norm(*tensors, 1e-6)


def normalized(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    _custom_ops.rms_norm(out, x, None, 0.0)
    return out + 1


def test_transforms_of_derivatives_are_refused(module: ModuleType) -> None:
    def in_place(x: Tensor) -> Tensor:
        y = x * 1
        _custom_ops.rms_norm(y, y, None, 0.0)
        return y.sum()

    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"^rms_norm: out requires grad"):
        torch.func.grad(in_place)(ones(3))
    for grad in (False, True):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(RuntimeError, match=r"^rms_norm: x has a tangent"),
        ):
            torch.func.jvp(normalized, (ones(3),), (ones(3),))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [False, True])
def test_a_trace_has_the_op(module: ModuleType, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(normalized, 2 * ones(3))
        assert torch.equal(traced(-ones(3)), torch.zeros(3))


def test_status(module: ModuleType) -> None:
    status = native.status()
    assert status.available
    assert status.reason_missing is None
    assert status.fast_call
    assert status.torch_ops
    assert status.isa in status.isa_levels
    assert status.path is not None
    assert status.path.endswith("_C_ops.abi3.so")
