"""The private parts of torch that opweave touches, in one place.

Checked with torch 2.11 to 2.15; ``tests/base/test_compat.py`` has a canary for each name.
Nothing else in opweave reads a private name of torch.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch.autograd import forward_ad
from torch.library import Library
from torch.utils import _python_dispatch

# True only while Dynamo traces the calling code. Cheaper than torch.compiler.is_compiling(), and
# enough: every other tracer shows itself through a mode, a tensor type or functorch.
is_dynamo_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling


def trace_instead(function: Callable[..., Any], traced: Callable[..., Any]) -> None:
    """Make Dynamo trace *traced* in place of *function*, which then need not check for Dynamo."""
    cast("Any", function)._torchdynamo_inline = traced


def run_untraced(function: Callable[..., Any]) -> None:
    """Disable Dynamo for *function* and the functions that it calls, unless it is inlined.

    It is not inlined if the call comes after a graph break, or from a function that Dynamo skips.
    """
    eval_frame: Any = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(cast("Any", function).__code__, strategy)


def graph_break(message: str) -> None:
    """Break the graph that Dynamo is tracing, with the reason *message*."""
    torch._dynamo.graph_break(msg=message)


def before_loading_packages(prepare: Callable[[], None]) -> None:
    """Call *prepare* before each AOTInductor package that this process loads.

    A package looks up its ops while it is loaded, and torch does not have a hook for that.
    """
    aoti: Any = torch._C._aoti
    original: Any = aoti.AOTIModelPackageLoader

    class AOTIModelPackageLoader(original):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            prepare()
            super().__init__(*args, **kwargs)

    aoti.AOTIModelPackageLoader = AOTIModelPackageLoader


# How many TorchDispatchModes are active (fake tensors, make_fx, user modes).
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack

# True if a TorchFunctionMode is active, or the tensor overrides __torch_function__.
has_torch_function_unary: Callable[[object], bool] = torch.overrides.has_torch_function_unary
function_mode_enabled: Callable[[], bool] = torch._C._is_torch_function_mode_enabled

# Whether torch.autocast is on for any kind of device.
any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


def no_autocast() -> AbstractContextManager[None]:
    """Disable torch.autocast for all kinds of devices, without recording it in a graph."""
    return cast("AbstractContextManager[None]", torch._C._DisableAutocast())


# The innermost functorch transform (vmap, grad, ...), or None. Its tensors look like plain Tensors.
functorch_interpreter: Callable[[], object] = torch._C._functorch.peek_interpreter_stack


@contextmanager
def no_transforms() -> Iterator[None]:
    """In the block no transform of functorch and no TorchDispatchMode of this thread is active."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with temporarily_clear_interpreter_stack(), cast("Any", _disable_current_modes)():
        yield


def is_in_vmap() -> bool:
    """Whether the innermost functorch transform is vmap."""
    interpreter: Any = functorch_interpreter()
    return interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Vmap


def unwrapped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield *tensor* and, from the innermost transform of functorch on, each that it wraps."""
    functorch: Any = torch._C._functorch
    yield tensor
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
        yield tensor


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether vmap, at any depth of transforms, maps over *tensor*."""
    return any(map(cast("Any", torch._C._functorch).is_batchedtensor, unwrapped(tensor)))


def dispatch_key(name: str) -> int:
    """Return the number of the dispatch key called *name*, such as ``"Tracer"``."""
    return int(cast("Any", torch._C._parse_dispatch_key(name)))


# The graph that torch.jit.trace is recording, or None.
jit_tracing_state: Callable[[], object] = torch._C._get_tracing_state


def include_dispatch_key(key: int) -> AbstractContextManager[None]:
    """Include a dispatch key in this thread, as a mode or a tracer does."""
    guard = torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey(key))
    return cast("AbstractContextManager[None]", guard)


def below_autograd() -> AbstractContextManager[None]:
    """Exclude the autograd keys from dispatch, as an autograd kernel does when it redispatches."""
    return cast("AbstractContextManager[None]", torch._C._AutoDispatchBelowAutograd())


# The module whose ``_current_level`` is not negative while forward-mode derivatives are computed.
FORWARD_AD = forward_ad


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a forward-mode derivative flows through *tensor*."""
    level: int = FORWARD_AD._current_level
    return level >= 0 and cast("Any", forward_ad).unpack_dual(tensor).tangent is not None


# New memory of the CPU for these sizes, strides and dtype, past the dispatcher, where no mode sees
# it: a third of the time of torch.empty. Inductor's code allocates so.
empty_strided_cpu: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = cast(
    "Any", torch._C._dynamo.guards
)._empty_strided_cpu

# Whether two tensors are views of one storage.
share_storage: Callable[[torch.Tensor, torch.Tensor], bool] = cast("Any", torch._C)._is_alias_of


def decided(condition: bool | torch.SymBool, *, otherwise: bool) -> bool:
    """Return *condition*, or *otherwise* if it depends on a data-dependent size."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental import symbolic_shapes

    guard = symbolic_shapes.guard_or_true if otherwise else symbolic_shapes.guard_or_false
    return guard(condition)


def is_certain(condition: bool | torch.SymBool) -> bool:
    """Whether *condition* holds for all sizes that the graph is compiled for; adds no guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental import symbolic_shapes

    return symbolic_shapes.statically_known_true(condition)


def size_hint(size: int | torch.SymInt) -> int | None:
    """Return a size, or the one that a symbolic size was traced with; None if it has none."""
    return size if isinstance(size, int) else cast("int | None", size.node.hint)


# The first dimension of a tensor, or 0 without dimensions; Tensor.__len__ and shape[0] are slower.
tensor_length: Callable[[torch.Tensor], int] = getattr(torch._C.TensorBase, "__len__")  # noqa: B009

# Whether a tensor consists of other tensors, such as a nested or a distributed one.
is_wrapper: Callable[[object], bool] = _python_dispatch.is_traceable_wrapper_subclass


def size_bounds(size: int | torch.SymInt | None) -> tuple[float, float] | None:
    """Return the least and the largest value of a size, or None if the size is None.

    No guard is added on a symbolic size.
    """
    if size is None or isinstance(size, int):
        return None if size is None else (size, size)
    node: Any = size.node
    known = node.shape_env.bound_sympy(node.expr)
    most = int(known.upper) if known.upper.is_Integer else math.inf
    return int(known.lower) if known.lower.is_Integer else 0, most


def depends_on_data(error: Exception) -> bool:
    """Whether *error* reports a condition on a data-dependent size."""
    module: Any = sys.modules.get("torch.fx.experimental.symbolic_shapes")  # long to import
    return module is not None and isinstance(error, module.GuardOnDataDependentSymNode)


def has_onednn() -> bool:
    """Whether torch is built with oneDNN."""
    return bool(cast("Any", torch.backends.mkldnn).is_available())


def multiplies_float16() -> bool:
    """Whether torch multiplies float16 matrices on this CPU without widening them."""
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def has_avx512() -> bool:
    """Whether this CPU has the x86-64-v4 instructions."""
    return bool(cast("Any", torch.cpu)._is_avx512_supported())


def has_avx512_bf16() -> bool:
    """Whether this CPU multiplies pairs of bfloat16, which oneDNN uses."""
    return bool(cast("Any", torch.cpu)._is_avx512_bf16_supported())


def has_amx() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 (Intel's AMX), which oneDNN uses."""
    return has_onednn() and bool(cast("Any", torch.cpu)._is_amx_tile_supported())


def has_vnni() -> bool:
    """Whether oneDNN multiplies int8 matrices with instructions for it (Intel's VNNI)."""
    return has_onednn() and bool(cast("Any", torch.cpu)._is_vnni_supported())


def is_x86() -> bool:
    """Whether this CPU has the x86-64 architecture."""
    return platform.machine().lower() in {"x86_64", "amd64"}


def forget_failed_groups() -> None:
    """Reset torch's counter of process groups after a failed attempt to join one.

    The number is part of the keys by which the ranks find each other, and only
    :func:`torch.distributed.destroy_process_group` resets it. Without the reset, the next attempt
    would use other keys than the other ranks.
    """
    from torch.distributed import distributed_c10d

    if not torch.distributed.is_initialized():
        distributed_c10d._world.group_count = 0


def all_reduce_sum(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Sum *tensor* over the ranks of the process group called *group*, functionally."""
    collectives: Any = torch.ops._c10d_functional
    total: torch.Tensor = collectives.wait_tensor(collectives.all_reduce(tensor, "sum", group))
    return total


def all_gather(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Concatenate *tensor* of each of the *size* ranks of *group* along dim 0, functionally."""
    collectives: Any = torch.ops._c10d_functional
    gathered: torch.Tensor = collectives.wait_tensor(
        collectives.all_gather_into_tensor(tensor, size, group)
    )
    return gathered


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` by oneDNN, with which torch must be built; no gradient."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def multiply_int8(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``x @ y`` in int32, for int8 matrices."""
    # oneDNN returns wrong sums for rows or columns that are expanded.
    x, y = (t.contiguous() if 0 in t.stride() else t for t in (x, y))
    return torch._int_mm(x, y)


# Reads a schema; raises RuntimeError if torch cannot.
parse_schema: Callable[[str], Any] = torch._C.parse_schema

# The types of torch.ops.<namespace>.<op>, its overloads, and control flow nodes.
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator


def is_taken_in_torch_ops(name: str) -> bool:
    """Whether ``torch.ops.<namespace>.<name>`` is an attribute other than an op."""
    return name == "name" or hasattr(torch._ops._OpNamespace, name)


def namespace_attributes(namespace: str) -> list[str]:
    """Return the attribute names that ``torch.ops.<namespace>`` reserves."""
    return dir(cast("Any", torch._ops._OpNamespace)(namespace))


def is_op_namespace(value: object) -> bool:
    """Whether *value*, an attribute of ``torch.ops``, is a namespace of ops."""
    return isinstance(value, torch._ops._OpNamespace)


def no_torch_function() -> AbstractContextManager[None]:
    """In the block, subclasses and function modes do not see calls of torch."""
    return torch._C.DisableTorchFunction()


def depends_on_values(op: OpOverload) -> Exception:
    """Return the error that a fake implementation raises for a data-dependent result."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    return DataDependentOutputException(op)


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Mark *dim* as dynamic for ``torch.compile``, which fails if it has to specialize it."""
    torch._dynamo.mark_dynamic(tensor, dim)


def maybe_mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Let ``torch.compile`` take any size of *dim*, if nothing it traces needs this one."""
    from torch._dynamo import maybe_mark_dynamic  # takes longer to import than all of opweave

    maybe_mark_dynamic(tensor, dim)


def lookup_backend(name: str) -> Callable[..., Any]:
    """Return the backend of ``torch.compile`` called *name*."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Return *values*, nested in any containers, with every tensor changed by *function*."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, function, values)


def fake_tensor_mode() -> AbstractContextManager[Any]:
    """Return a new mode for fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return cast("AbstractContextManager[Any]", FakeTensorMode())


def new_library(namespace: str) -> Library:
    """Return a library that can add ops to *namespace*."""
    library: Library = cast("Any", Library)(namespace, "FRAGMENT")
    return library


def remove_ops(library: Library) -> None:
    """Undefine every torch op that *library* has defined."""
    cast("Any", library)._destroy()


def register_fake(library: Library, name: str, function: Callable[..., Any]) -> None:
    """Give the torch op *name* of *library* a fake implementation.

    ``Library._register_fake`` would also read source files to record its caller, which took a third
    of opweave's import time.
    """
    untyped: Any = library
    entry = torch._library.simple_registry.singleton.find(f"{untyped.ns}::{name}")
    handle = entry.fake_impl.register(function, "opweave", lib=untyped, allow_override=False)
    untyped._registration_handles.append(handle)
