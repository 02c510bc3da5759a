"""Write keys and values into the paged cache, in-place.

A slot out of range raises RuntimeError before anything is written.
"""

from __future__ import annotations

from torch import Tensor

from opweave.ir import rules
from opweave.ir.memory import clone_in_layout
from opweave.ir.ops.kv_cache import reshape_and_cache as op
from opweave.ir.traits import ALIAS_SAFE, BATCH_INVARIANT
from opweave.kernels.opweave_c.call_paths import implements, native_op
from opweave.kernels.paged import WRITES

_write = native_op("reshape_and_cache")


@implements(
    op,
    rules.cpu("key", "value", "key_cache", "value_cache", "slot_mapping") & WRITES,
    inplace=True,
    traits={ALIAS_SAFE, BATCH_INVARIANT},
)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Write *key* and *value* into their slots of the caches, in-place."""
    try:
        _write(key, value, key_cache, value_cache, slot_mapping)
    except RuntimeError:
        pass  # a cache overlaps something, or the arguments are invalid and the next call raises
    else:
        return key_cache, value_cache
    key_cache, value_cache = clone_in_layout(key_cache), clone_in_layout(value_cache)
    _write(key, value, key_cache, value_cache, slot_mapping)
    return key_cache, value_cache
