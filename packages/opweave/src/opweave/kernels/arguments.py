"""Argument rules shared by several providers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.ops.arguments import host_lengths
from opweave.ir.ops.linear import scales_tokens, scales_weight
from opweave.ir.ops.low_bit import GGUF_BLOCKS, groups_rows
from opweave.ir.rules import Rule, TensorRule

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NARROW_FLOATS = (torch.bfloat16, torch.float16)

_VECTOR = 16  # bytes that a GPU loads at once


def one_element(name: str) -> Rule:
    """Require that parameter *name* has one element, or is None if it is optional."""
    return TensorRule(
        (name,), "{t}.numel() == 1", lambda n, t: f"{n}: {t.numel()} elements (supports 1)"
    )


def row(weight: str, x: str = "x") -> Rule:
    """Require a contiguous vector *weight*, with an element for each column of *x*."""
    return (
        rules.not_none(weight)
        & rules.per_last_dim(weight, x)
        & rules.contiguous(weight)
        & rules.same_device(x, weight)
    )


def residual(name: str, x: str = "x") -> Rule:
    """Require a contiguous tensor *name* like *x*."""
    return (
        rules.same_shape(x, name)
        & rules.same_dtype(x, name)
        & rules.same_device(x, name)
        & rules.contiguous(name)
    )


def aligned(*names: str) -> Rule:
    """Require that tensors begin at a multiple of 16 bytes, which vectorized loads need."""
    return TensorRule(
        names,
        "{t}.storage_offset() * {t}.itemsize % {0} == 0",
        lambda n, t: (
            f"{n}: begins {t.storage_offset() * t.itemsize} bytes into its memory (supports "
            f"multiples of {_VECTOR})"
        ),
        (_VECTOR,),
    )


def nvidia(name: str, major: int, minor: int) -> Rule:
    """Require that *name* is on an NVIDIA GPU of at least this compute capability."""
    return rules.cuda(name) & TensorRule(
        (name,),
        "{0}({t}.device) >= {1}",
        lambda n, t: f"{n}: on {t.device} (needs NVIDIA compute capability {major}.{minor})",
        (_capability, (major, minor)),
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability; (0, 0) for a GPU of AMD."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


# Argument rules for linear layers with low-bit weights on any device.
#
# Providers add rules for devices, for the activations, and for groups that their kernels
# support.


_BIAS = rules.same_dtype("x", "bias") | rules.dtype("bias", torch.float32)

W4A16 = (
    rules.ndim("weight", 2)
    & rules.ndim("scale", 2)
    & rules.unit_stride("weight", "scale", "offset", "bias")
    & rules.dtype("weight", torch.uint8)
    & rules.dtype("scale", *FLOATS)
    & rules.same_dtype("scale", "offset")
    & _BIAS
)
Q = (
    rules.ndim("weight", 2)
    & rules.unit_stride("weight", "bias")
    & rules.dtype("weight", torch.uint8)
    & _BIAS
)
W8A8 = (
    rules.dtype("x", torch.int8, torch.float8_e4m3fn)
    & rules.same_dtype("x", "weight")
    & rules.dtype("x_scale", torch.float32)
    & rules.dtype("scale", torch.float32)
    & rules.dtype("bias", *FLOATS)
    & rules.one_of("out_dtype", *FLOATS)
    & rules.ndim("weight", 2)
    & rules.unit_stride("weight", "bias")
)


def w4a16_fits(
    x: Tensor, weight: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None
) -> bool:
    """Return whether the shapes of the arguments of ``linear_w4a16`` fit each other."""
    return (
        x.shape[-1] == 2 * weight.shape[1] > 0
        and groups_rows(scale, weight)
        and (offset is None or offset.shape == scale.shape)
        and (bias is None or bias.shape == weight.shape[:1])
    )


def group_of(weight: Tensor, scale: Tensor) -> int:
    """Return the number of columns of the packed *weight* that share a scale."""
    return 2 * weight.shape[1] // scale.shape[1]


def q_fits(x: Tensor, weight: Tensor, bias: Tensor | None, format: str) -> bool:
    """Return whether the arguments of ``linear_q`` have a known format and fit each other."""
    block = GGUF_BLOCKS.get(format)
    return (
        block is not None
        and x.shape[-1] % block.columns == 0
        and weight.shape[1] == x.shape[-1] // block.columns * block.size
        and (bias is None or bias.shape == weight.shape[:1])
    )


def w8a8_fits(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> bool:
    """Return whether the shapes of the arguments of ``linear_w8a8`` fit each other."""
    return (
        x.shape[-1] == weight.shape[1] > 0
        and scales_tokens(x_scale, x)
        and scales_weight(scale, weight)
        and (bias is None or bias.shape == weight.shape[:1])
    )


# Argument rules for paged KV cache kernels on any device.


def has_whole_heads(cache: Tensor) -> bool:
    """Return whether the positions of each head in a block are contiguous.

    Blocks and heads may have any strides, as in one tensor for both keys and values.

    Args:
        cache: ``(blocks, heads, block_size, head_size)``.
    """
    _, _, block_size, size = cache.shape
    return has_whole_rows(cache) and (block_size == 1 or cache.stride(2) == size)


def has_whole_rows(cache: Tensor) -> bool:
    """Return whether the elements of each position and head of a cache are contiguous."""
    return cache.shape[3] == 1 or cache.stride(3) == 1


def _tokens_fit(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> bool:
    return (
        key_cache is not value_cache
        and key_cache.shape[:3] == value_cache.shape[:3]
        and _takes(key_cache, key)
        and _takes(value_cache, value)
        and key.shape[0] == slot_mapping.shape[0] == value.shape[0]
    )


def _takes(cache: Tensor, x: Tensor) -> bool:
    """Return whether the rows of *cache* are contiguous and have the shape of tokens of *x*."""
    _, heads, _, size = cache.shape
    return x.shape[1:] == (heads, size) and has_whole_rows(cache)


WRITES = (
    rules.dtype("key", *FLOATS)
    & rules.same_dtype("key", "value", "key_cache", "value_cache")
    & rules.dtype("slot_mapping", torch.int64)
    & rules.ndim("key", 3)
    & rules.ndim("value", 3)
    & rules.ndim("key_cache", 4)
    & rules.ndim("value_cache", 4)
    & rules.ndim("slot_mapping", 1)
    & rules.contiguous("slot_mapping")
    & rules.unit_stride("key", "value")
    & rules.custom(
        _tokens_fit, "tokens and caches do not fit, or rows of a cache are not contiguous"
    )
)
"""The rules of ``reshape_and_cache``."""

ATTENDS = (
    rules.dtype("query", *FLOATS)
    & rules.same_dtype("query", "key_cache", "value_cache")
    & rules.dtype("block_tables", torch.int32)
    & rules.same_dtype("block_tables", "seq_lens", "cu_seqlens_q")
    & rules.ndim("query", 3)
    & rules.ndim("key_cache", 4)
    & rules.ndim("value_cache", 4)
    & rules.ndim("block_tables", 2)
    & rules.unit_stride("query", "block_tables")
    & rules.contiguous("seq_lens", "cu_seqlens_q")
)
"""The rules of ``paged_attention``, in addition to :func:`attention_fits`."""


def attention_fits(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
) -> bool:
    """Return whether the shapes are compatible and the options are positive.

    The arguments must satisfy :data:`ATTENDS`.
    """
    _, heads, block_size, size = key_cache.shape
    sequences = block_tables.shape[0]
    return (
        heads > 0
        and query.shape[1] % heads == 0
        and query.shape[2] == size > 0
        and block_size > 0
        and value_cache.shape[:3] == key_cache.shape[:3]
        and seq_lens.shape == (sequences,)
        and cu_seqlens_q.shape == (sequences + 1,)
        and (window is None or (causal and window > 0))
        and (soft_cap is None or soft_cap > 0)
    )


# Argument rules for paged attention of CUDA libraries that need lengths on the host.


POSITIVE_SCALE = rules.custom(lambda scale: scale is None or scale > 0, "scale is not positive")
"""With another scale, FlashAttention does not subtract the largest scaled score."""

HAS_HOST_LENGTHS = rules.custom(
    lambda seq_lens, cu_seqlens_q: host_lengths(seq_lens, cu_seqlens_q) is not None,
    "the lengths are not known on the host",
)

PLANNABLE = (
    nvidia("query", 8, 0) & rules.dtype("query", *NARROW_FLOATS) & POSITIVE_SCALE & HAS_HOST_LENGTHS
)
"""The rules of every op with queries over a paged cache."""

PLANNED = (
    PLANNABLE
    & ATTENDS
    & rules.same_device("query", "key_cache", "value_cache", "block_tables", "seq_lens")
    & rules.same_shape("key_cache", "value_cache")
    & rules.contiguous("query", "key_cache", "value_cache")
    & aligned("query", "key_cache", "value_cache")
    & rules.custom(attention_fits, "shapes do not fit, or window or soft_cap is not positive")
)
"""The rules of ``paged_attention``, besides the sizes of heads and blocks."""
