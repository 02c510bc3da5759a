"""Add up the parts of matrix products."""

import triton
import triton.language as tl

from opweave.kernels.triton.jit.casts import rounded


@triton.jit
def own_columns(width, DEPTH: tl.constexpr):
    """Return the bounds of the columns that this program multiplies, of *width* in all."""
    share = tl.cdiv(tl.cdiv(width, tl.num_programs(2)), DEPTH) * DEPTH
    begin = tl.program_id(2) * share
    return begin, tl.minimum(begin + share, width)


@triton.jit
def store_sums(out, bias, sums, tokens, features, count, feature_count):
    """Store float32 *sums* of a tile of rows *tokens* and columns *features*.

    With several splits, *out* has a matrix for each.
    """
    is_feature = features < feature_count
    if bias is not None:
        sums += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    rows = tl.program_id(2).to(tl.int64) * count + tokens
    tl.store(
        out + rows[:, None] * feature_count + features[None, :],
        rounded(sums, out.dtype.element_ty),
        mask=(tokens < count)[:, None] & is_feature[None, :],
    )


@triton.jit
def add_parts(out, parts, bias, size, features, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the matrices *parts* and *bias*, one program per block of elements."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    sums = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        sums += tl.load(parts + split * size + places, mask=inside, other=0.0)
    if bias is not None:
        sums += tl.load(bias + places % features, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, rounded(sums, out.dtype.element_ty), mask=inside)
