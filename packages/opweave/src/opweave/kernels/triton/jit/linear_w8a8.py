"""Linear layers with weights and activations of 8 bits."""

import triton
import triton.language as tl

from opweave.kernels.triton.jit.product import own_columns, store_sums


@triton.jit
def linear_w8a8(
    out, x, x_scale, weight, scale, bias, count, feature_count, width,
    x_stride, x_scale_stride, weight_stride, scale_stride,
    x_group, block_rows, block_columns,
    SCALES_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One program per tile of the output and split of the columns.

    A step of *DEPTH* columns has one scale for each token and each row of weights. With
    *SCALES_LAST*, all steps have the same, and codes are multiplied as integers, which is exact.
    """
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    features = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token = tokens < count
    is_feature = features < feature_count
    x_rows = x + (tokens.to(tl.int64) * x_stride)[:, None]
    rows = weight + (features.to(tl.int64) * weight_stride)[:, None]
    token_scales = x_scale + tokens.to(tl.int64) * x_scale_stride
    row_scales = scale + (features // block_rows).to(tl.int64) * scale_stride
    sums = tl.zeros((ROWS, COLUMNS), tl.int32 if SCALES_LAST else tl.float32)
    begin, end = own_columns(width, DEPTH)
    for start in range(begin, end, DEPTH):
        columns = (start + tl.arange(0, DEPTH))[None, :]
        inside = columns < width
        codes = tl.load(x_rows + columns, mask=is_token[:, None] & inside, other=0.0)
        weights = tl.load(rows + columns, mask=is_feature[:, None] & inside, other=0.0)
        if SCALES_LAST:
            sums = tl.dot(codes, tl.trans(weights), sums, out_dtype=tl.int32)
        else:
            one = tl.load(token_scales + start // x_group, mask=is_token, other=0.0)
            other = tl.load(row_scales + start // block_columns, mask=is_feature, other=0.0)
            sums += tl.dot(codes, tl.trans(weights)).to(tl.float32) * one[:, None] * other[None, :]
    if SCALES_LAST:
        one = tl.load(token_scales, mask=is_token, other=0.0)
        other = tl.load(row_scales, mask=is_feature, other=0.0)
        wide = sums.to(tl.float32) * one[:, None] * other[None, :]
        store_sums(out, bias, wide, tokens, features, count, feature_count)
    else:
        store_sums(out, bias, sums, tokens, features, count, feature_count)
