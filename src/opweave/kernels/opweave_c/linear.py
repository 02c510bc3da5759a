"""Linear maps by the native module: of few tokens, whose work is to read the weights, and of many.

The scale of weights of 8 bits then multiplies the sum of the products, not each weight; so a sum
may overflow where activations are near float32's largest number.
"""

from __future__ import annotations

import torch
from torch import SymBool, Tensor
from torch.nn import functional

from opweave.base import compat, torch_state
from opweave.ir import rules
from opweave.ir.ops.linear import linear as op
from opweave.ir.ops.linear import linear_w8a16 as op_w8a16
from opweave.ir.ops.linear import scales_rows
from opweave.kernels.opweave_c.arguments import ROWS, SCALE
from opweave.kernels.opweave_c.call_paths import STATUS, implements, native_op
from opweave.kernels.opweave_c.outputs import new_rows

_linear = native_op("linear")
_linear_w8a16 = native_op("linear_w8a16")
_linear_many = native_op("linear_many")
_linear_w8a16_many = native_op("linear_w8a16_many")
_widen_rows = native_op("widen_rows")

# Beyond how many tokens torch's matrix product is faster, as measured; None: it never was. The
# choice depends on the size of the batch, so it cannot be a predicate's. A graph for any number of
# tokens multiplies by torch, a graph for one by our kernel: a guard would make a third. But weights
# of 8 bits torch would widen for every token, so theirs takes our kernel. Because torch adds in
# another order, no implementation here is batch-invariant; those of opweave_c_invariant are. torch
# computes in 16 bits only where the CPU does: elsewhere it widens the weights on every call.
_BFLOAT16 = "avx512bf16" in STATUS.isa_levels
_AMX, _TILE = compat.has_amx(), 32  # a tile has so many columns of bfloat16
_MOST_TOKENS = {
    torch.float32: 32,
    torch.bfloat16: 6 if _AMX else 16 if _BFLOAT16 else None,
    torch.float16: 16 if compat.multiplies_float16() else None,
}
# Measured with 512 columns to 4,096, for int8 as for float8; torch multiplies in float32.
_MOST_TOKENS_W8 = {
    torch.float32: 96,
    torch.bfloat16: 48 if _BFLOAT16 else 96,
    torch.float16: 96,
}
# Where we have a kernel for many tokens, from how many on it is faster: panels with AVX2, faster
# than torch's product, too, and tiles with AMX, for weights of 8 bits alone. The op chooses when it
# runs, so graphs for any number of tokens have it, too. Measured with 512 columns to 8,192.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FEWEST = dict.fromkeys(_DTYPES, 16) if STATUS.isa == "avx2" else {}
_FEWEST_W8 = (
    {torch.float32: 9, torch.bfloat16: 4, torch.float16: 6} if STATUS.isa == "amx" else _FEWEST
)
# torch brings oneDNN, too, but takes it for 16 bits only. In float32 it was faster than MKL, which
# torch takes: by 4 % to 30 %, from 33 tokens to 512, the more the larger the weight.
_HAS_ONEDNN = compat.has_onednn() and "avx512" in STATUS.isa_levels

# Weights of a piece for each thread: 4 MiB of float32, as measured from 2,048 columns to 14,336.
# With fewer, or fewer rows than 64, torch is slower; with more, they leave the caches.
_PIECE, _FEWEST_ROWS = 1 << 20, 64

_WEIGHT = (
    rules.cpu("weight", "bias") & rules.ndim("weight", 2) & rules.unit_stride("weight", "bias")
)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])


def _is_known(fact: bool | SymBool) -> bool:
    """Whether *fact* holds; in a graph, whether it holds for every size that the graph is for."""
    if isinstance(fact, SymBool):
        # Not at the top: it imports sympy.
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(fact)
    return fact


def _fits_w8a16(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> bool:
    return _fits(x, weight, bias) and scales_rows(scale, weight)


ACCEPTED = (
    ROWS
    & _WEIGHT
    & rules.same_dtype("x", "weight", "bias")
    & rules.custom(_fits, "shapes do not fit")
)
ACCEPTED_W8A16 = (
    ROWS
    & _WEIGHT
    & rules.dtype("weight", torch.int8, torch.float8_e4m3fn)
    & SCALE
    & (rules.same_dtype("x", "bias") | rules.dtype("bias", torch.float32))
    & rules.custom(_fits_w8a16, "shapes do not fit")
)


@implements(op, ACCEPTED, traits=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply the rows of *x* by *weight*."""
    fewest = _FEWEST.get(x.dtype)
    if fewest is None and _is_torchs(x):
        return _torchs_linear(x, weight, bias)
    out = new_rows(x, weight.shape[0])
    if fewest is None:
        _linear(out, x, weight, bias)
    else:
        _linear_many(out, x, weight, bias, fewest)
    return out


def _is_torchs(x: Tensor) -> bool:
    """Whether torch multiplies so many tokens faster, or there may be so many in a graph."""
    most = _MOST_TOKENS[x.dtype]
    return (
        most is not None and not _is_known(x.numel() <= most * x.shape[-1]) and _has_whole_tiles(x)
    )


def _has_whole_tiles(x: Tensor) -> bool:
    """Whether torch keeps the rows of *x* apart: with AMX, oneDNN multiplies whole tiles.

    Where a tile is wider than a row, it multiplies what follows in memory by zero; often that is
    the next token, whose NaN or infinity then makes this one NaN.
    """
    return not (_AMX and x.dtype is torch.bfloat16) or _is_known(x.shape[-1] % _TILE == 0)


def _torchs_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by the faster one of torch's libraries; in a graph, the compiler chooses."""
    if (
        x.dtype is torch.float32
        and _HAS_ONEDNN
        and torch.backends.mkldnn.enabled
        and not torch_state.kernels_are_traced()
    ):
        return compat.onednn_linear(x, weight, bias)
    return functional.linear(x, weight, bias)


compat.trace_instead(_torchs_linear, functional.linear)


@implements(op_w8a16, ACCEPTED_W8A16, traits=())
def linear_w8a16(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply the rows of *x* by *weight*; for few of them, it is widened in registers."""
    fewest = _FEWEST_W8.get(x.dtype)
    if fewest is None and _is_known(x.numel() > _MOST_TOKENS_W8[x.dtype] * x.shape[-1]):
        return _by_pieces(x, weight, scale, bias)
    out = new_rows(x, weight.shape[0])
    if fewest is None:
        _linear_w8a16(out, x, weight, scale, bias)
    else:
        _linear_w8a16_many(out, x, weight, scale, bias, fewest)
    return out


def _by_pieces(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply as the definition does, by rows of *weight* that stay in the caches, widened there.

    A graph has the definition: the compiler widens weights while it reads them.
    """
    if torch_state.kernels_are_traced():
        result: Tensor = op_w8a16.native(x, weight, scale, bias)
        return result
    rows, columns = weight.shape
    out = new_rows(x, rows)
    tokens = x.reshape(-1, columns).float().contiguous()
    step = _rows_of_piece(columns, len(tokens))
    wide = tokens.new_empty((min(step, rows), columns))
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        weights = wide[: rows - start]
        _widen_rows(weights, weight[piece], scale if scale.numel() == 1 else scale[piece])
        offsets = None if bias is None else bias[piece].float()
        out.view(-1, rows)[:, piece] = _torchs_linear(tokens, weights, offsets)
    return out


def _rows_of_piece(columns: int, tokens: int) -> int:
    """Return how many rows to widen at a time: as many as there are tokens, or more.

    The product packs all tokens anew for every piece, which takes as long as to pack as many rows.
    """
    rows = max(_PIECE * torch.get_num_threads() // columns, tokens)
    return max(rows // _FEWEST_ROWS, 1) * _FEWEST_ROWS


compat.trace_instead(_by_pieces, op_w8a16.native)
