"""Write into the paged cache, one program per token."""

import triton
import triton.language as tl


@triton.jit
def copy_heads(
    cache, x, block, inner, head_stride, block_stride, cache_head_stride, position_stride,
    heads, size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(0, heads * size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        head, column = places // size, places % size
        inside = places < heads * size
        found = tl.load(x + head * head_stride + column, mask=inside)
        target = block * block_stride + head * cache_head_stride + inner * position_stride + column
        tl.store(cache + target, found, mask=inside)


@triton.jit(do_not_specialize=["slot_count"])
def reshape_and_cache(
    key_cache, value_cache, key, value, slots, slot_count, block_size, heads, size, value_size,
    key_block_stride, key_cache_head_stride, key_position_stride, value_block_stride,
    value_cache_head_stride, value_position_stride, key_stride, key_head_stride, value_stride,
    value_head_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    tl.device_assert((slot >= -1) & (slot < slot_count), "a slot is not in the cache")
    if (slot >= 0) & (slot < slot_count):
        block, inner = slot // block_size, slot % block_size
        copy_heads(
            key_cache, key + token * key_stride, block, inner, key_head_stride,
            key_block_stride, key_cache_head_stride, key_position_stride, heads, size, BLOCK,
        )  # fmt: skip
        copy_heads(
            value_cache, value + token * value_stride, block, inner,
            value_head_stride, value_block_stride, value_cache_head_stride, value_position_stride,
            heads, value_size, BLOCK,
        )  # fmt: skip
