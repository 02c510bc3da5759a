"""Call paths to the native ops, argument rules and outputs that implementations share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from opweave import native, plain_call, torch_compat
from opweave.ir import IrOp, rules
from opweave.ir.priority import Tunable
from opweave.ir.rules import BATCH_INVARIANT, Predicate, Rule
from opweave.kernels.arguments import FLOATS, one_element
from opweave.native import loader
from opweave.native.calls import Function

# Allocate outputs with the strides that native returns.


_empty_like = torch.empty_like
_empty_strided_cpu = torch_compat.empty_strided_cpu
_kernels_are_traced = plain_call.kernels_are_traced


def new_rows(x: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty contiguous tensor of shape ``(*x.shape[:-1], width)``.

    The dtype is that of *x* by default. *x* must be on the CPU, unless a tracer is active.
    """
    if x.ndim == 2 and not _kernels_are_traced():  # the fast path for the common case
        return _empty_strided_cpu((x.shape[0], width), (width or 1, 1), dtype or x.dtype)
    return _by_dispatcher(x, width, dtype)


def _by_dispatcher(x: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], width), dtype=dtype)


torch_compat.trace_instead(new_rows, _by_dispatcher)


def half_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of shape ``(..., d)`` for *x* of shape ``(..., 2 * d)``."""
    width = x.shape[-1] // 2
    return (
        new_rows(x, width, dtype) if x.is_contiguous() else _empty_like(x[..., :width], dtype=dtype)
    )


def row_scales(x: Tensor) -> Tensor:
    """Return an empty float32 tensor ``(..., 1)`` for one scale per row of *x*."""
    return new_rows(x, 1, torch.float32)


# Argument rules shared by several implementations.


MAX_DIMS = 8  # the kernels' limit
HAS_DIMS = rules.ndim("x", *range(1, MAX_DIMS + 1))
SCALE = (
    rules.cpu("scale")
    & rules.dtype("scale", torch.float32)
    & rules.contiguous("scale")
    & rules.ndim("scale", *range(MAX_DIMS + 1))
)
INPUT = rules.cpu("x") & rules.dtype("x", *FLOATS) & HAS_DIMS
ROWS = INPUT & rules.unit_stride("x")


def one_float32(name: str) -> Rule:
    """Require that *name* is one float32 in host memory, or None if it is optional."""
    dims = rules.ndim(name, *range(MAX_DIMS + 1))
    return rules.cpu(name) & rules.dtype(name, torch.float32) & dims & one_element(name)


def in_memory_order(x: Tensor) -> bool:
    """Return whether the strides decrease from left to right, without overlap."""
    return x.is_contiguous() or _is_nested(x.shape, x.stride())


def _is_nested(shape: Sequence[int], strides: Sequence[int]) -> bool:
    reach = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride < reach:
                return False
            reach = stride * size
    return True


# Call paths to the native ops, and the registration of implementations that use them.


STATUS = native.status()

native_op = partial(loader.native_op, in_kernel=True)
"""Return a function that calls a native op by the fastest path."""


def implements(
    op: IrOp,
    supports_args: Predicate,
    *,
    inplace: bool = False,
    functional: Function | None = None,
    traits: Iterable[str] = (BATCH_INVARIANT,),
    tunable: Tunable | None = None,
    provider: str = "opweave_c",
    needs: Sequence[str] = (),
) -> Callable[[Function], Function]:
    """Register the decorated function as *provider*'s implementation of *op*.

    Args:
        needs: native ops that a module built from older sources may lack.
    """
    lacking = [name for name in needs if not loader.has_native_op(name)]
    reason = STATUS.reason_missing
    if reason is None and lacking:
        reason = f"the native module was built from older sources, without {', '.join(lacking)}"
    return op.register_impl(
        provider,
        supported=reason is None,
        unsupported_reason=reason,
        supports_args=supports_args,
        inplace=inplace,
        functional=functional,
        traits=traits,
        tunable=tunable,
    )
