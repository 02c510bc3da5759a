"""RMS norm, one program per row."""

import triton
import triton.language as tl

from opweave.kernels.triton.jit.casts import rounded
from opweave.kernels.triton.jit.rows import store_quantized


@triton.jit
def rms_norm(
    out, scales, total, x, residual, weight, scale,
    out_stride, total_stride, x_stride, residual_stride,
    width, epsilon,
    SCHEME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add *residual*, normalize, and quantize with *SCHEME*; the first and last are optional."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if residual is not None:
        added = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
        values = rounded(values.to(tl.float32) + added.to(tl.float32), x.dtype.element_ty)
        tl.store(total + row * total_stride + columns, values, mask=inside)
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
    if weight is not None:
        kind: tl.constexpr = weight.dtype.element_ty
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        normed = rounded(rounded(normed, kind).to(tl.float32) * factor, kind).to(tl.float32)
    result = rounded(normed, x.dtype.element_ty)
    if SCHEME is None:
        tl.store(out + row * out_stride + columns, result, mask=inside)
    else:
        store_quantized(
            out, scales, result.to(tl.float32), inside, row, columns, out_stride, scale, SCHEME
        )
