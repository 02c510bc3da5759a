"""Write keys and values into the paged cache, in-place.

A slot out of range is skipped; with ``TRITON_DEBUG=1``, a device assert fails.
"""

from __future__ import annotations

from torch import Tensor

from opweave.adapters.opaque import mutating, undispatched
from opweave.ir.ops.kv_cache import reshape_and_cache as op
from opweave.kernels.paged import WRITES
from opweave.kernels.triton.arguments import on_device
from opweave.kernels.triton.launch import Kernels, launch
from opweave.kernels.triton.registration import NAMESPACE, block_of, implements

_kernels = Kernels("kv_cache")
_BLOCK = 1024


def _write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    blocks, heads, block_size, size = key_cache.shape
    value_size = value_cache.shape[3]
    launch(
        _kernels.reshape_and_cache,
        (key.shape[0],),
        key_cache,
        value_cache,
        key,
        value,
        slot_mapping,
        blocks * block_size,
        block_size,
        heads,
        size,
        value_size,
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        BLOCK=min(block_of(heads * max(size, value_size)), _BLOCK),
    )


_traced_write = mutating(
    NAMESPACE,
    "write(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping) -> ()",
)(_write)


def _plain(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    _write(key, value, key_cache, value_cache, slot_mapping)
    return key_cache, value_cache


@implements(
    op,
    on_device("key", "value", "key_cache", "value_cache", "slot_mapping") & WRITES,
    inplace=True,
)
@undispatched(_plain)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Write *key* and *value* into their slots of the caches, in-place."""
    _traced_write(key, value, key_cache, value_cache, slot_mapping)
    return key_cache, value_cache
