"""Writing into the paged cache by the native module, in place.

A slot outside of the cache is a RuntimeError, and nothing has been changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.ops.kv_cache import reshape_and_cache as op
from opweave.ir.traits import ALIAS_SAFE, BATCH_INVARIANT
from opweave.kernels.opweave_c.arguments import FLOATS, has_whole_blocks
from opweave.kernels.opweave_c.doors import implements, native_op

_write = native_op("reshape_and_cache")


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
    _, heads, _, size = cache.shape
    return x.shape[1:] == (heads, size) and has_whole_blocks(cache)


@implements(
    op,
    rules.cpu("key", "value", "key_cache", "value_cache", "slot_mapping")
    & rules.dtype("key", *FLOATS)
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
    traits={ALIAS_SAFE, BATCH_INVARIANT},
)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Write *key* and *value* into their slots of the caches, in place."""
    try:
        _write(key, value, key_cache, value_cache, slot_mapping)
    except RuntimeError:
        pass  # a cache overlaps something, or else the next call says what is wrong
    else:
        return key_cache, value_cache
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    _write(key, value, key_cache, value_cache, slot_mapping)
    return key_cache, value_cache
