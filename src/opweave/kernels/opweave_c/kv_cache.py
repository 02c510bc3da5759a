"""Writing into the paged cache by the native module, in place.

A slot outside of the cache is a RuntimeError, and nothing has been changed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opweave.ir import rules
from opweave.ir.ops.kv_cache import reshape_and_cache as op
from opweave.kernels.opweave_c.doors import STATUS, direct, dispatched

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_write = direct("reshape_and_cache")
_write_op = dispatched("reshape_and_cache")


def _fits(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> bool:
    return (
        key_cache is not value_cache
        and key_cache.shape[:3] == value_cache.shape[:3]
        and _holds(key_cache, key)
        and _holds(value_cache, value)
        and key.shape[0] == slot_mapping.shape[0] == value.shape[0]
    )


def _holds(cache: Tensor, x: Tensor) -> bool:
    """Whether the blocks of *cache* are contiguous and take the tokens of *x*."""
    _, heads, block_size, size = cache.shape
    fits = x.shape[1] == heads and x.shape[2] == size
    inner = (block_size * size, size, 1)
    return fits and (cache.is_contiguous() or cache.stride()[1:] == inner)


@op.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=rules.cpu("key", "value", "key_cache", "value_cache", "slot_mapping")
    & rules.dtype("key", *_FLOATS)
    & rules.same_dtype("key", "value", "key_cache", "value_cache")
    & rules.dtype("slot_mapping", torch.int64)
    & rules.ndim("key", 3)
    & rules.ndim("value", 3)
    & rules.ndim("key_cache", 4)
    & rules.ndim("value_cache", 4)
    & rules.ndim("slot_mapping", 1)
    & rules.contiguous("slot_mapping")
    & rules.unit_stride("key", "value")
    & rules.custom(_fits, "tokens and caches do not fit, or blocks are not contiguous"),
    inplace=True,
    traits={"alias_safe", "batch_invariant"},
)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Write *key* and *value* into their slots of the caches, in place."""
    if is_dynamo_compiling():
        _write_op(key, value, key_cache, value_cache, slot_mapping)
        return key_cache, value_cache
    try:
        _write(key, value, key_cache, value_cache, slot_mapping)
    except TypeError:
        _write_op(key, value, key_cache, value_cache, slot_mapping)
    return key_cache, value_cache
