"""Linear layers: kernels for few tokens, which are memory-bound, and for many.

The scale of 8-bit weights multiplies the sum of the products instead of each weight, so the sum may
overflow if activations are close to the largest float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import SymBool, Tensor
from torch.nn import functional

from opweave.base import compat, plain_call
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

# The largest number of tokens for which our kernel is faster than torch's matrix product, as
# measured; None: always. The choice depends on the batch size, so it cannot be a predicate. To
# avoid guards, graphs with a dynamic number of tokens use torch, and graphs for one token our
# kernel; with 8-bit weights, dynamic graphs use our kernel too, because torch would widen the
# weights on every call. torch sums in another order, so these implementations are not
# batch-invariant; those of opweave_c_invariant are. torch computes in 16 bits only if the CPU does;
# otherwise it widens the weights on every call.
_BFLOAT16 = "avx512bf16" in STATUS.isa_levels
_AMX, _TILE = compat.has_amx(), 32  # columns of a bfloat16 tile
_MOST_TOKENS = {
    torch.float32: 32,
    torch.bfloat16: 6 if _AMX else 16 if _BFLOAT16 else None,
    torch.float16: 16 if compat.multiplies_float16() else None,
}
# On other architectures than x86, our kernel has only the vector types of the compiler, and widens
# 16 bits without instructions for it, which torch has.
if not compat.is_x86():
    _MOST_TOKENS.update({torch.bfloat16: 0, torch.float16: 0})
# Measured with 512 to 4,096 columns, for int8 and float8; torch multiplies in float32.
_MOST_TOKENS_W8 = {
    torch.float32: 96,
    torch.bfloat16: 48 if _BFLOAT16 else 96,
    torch.float16: 96,
}
# The smallest number of tokens for which our kernel for many tokens is faster: panels with AVX2,
# which also beat torch, and tiles with AMX, for 8-bit weights only. The native op chooses at run
# time, so dynamic graphs use it too. Measured with 512 to 8,192 columns.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FEWEST = dict.fromkeys(_DTYPES, 16) if STATUS.isa == "avx2" else {}
_FEWEST_W8 = (
    {torch.float32: 9, torch.bfloat16: 4, torch.float16: 6} if STATUS.isa == "amx" else _FEWEST
)
# torch uses oneDNN only for 16 bits. In float32, oneDNN is 4 % to 30 % faster than MKL, torch's
# choice, for 33 to 512 tokens; the gain grows with the size of the weight.
_HAS_ONEDNN = compat.has_onednn() and "avx512" in STATUS.isa_levels

# Weights per piece and thread: 4 MiB of float32, measured with 2,048 to 14,336 columns. Smaller
# pieces, or fewer than 64 rows, slow torch down; larger ones do not fit into the CPU caches.
_PIECE, _FEWEST_ROWS = 1 << 20, 64

_WEIGHT = (
    rules.cpu("weight", "bias") & rules.ndim("weight", 2) & rules.unit_stride("weight", "bias")
)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])


def is_known(fact: bool | SymBool) -> bool:
    """Return whether *fact* is true; in a graph, whether it is true for all dynamic sizes."""
    if isinstance(fact, SymBool):
        # Imported lazily, because it imports sympy.
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


@implements(op, ACCEPTED, traits=(), tunable={"kernel": ("auto", "own", "torch")})
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kernel: str = "auto"
) -> Tensor:
    """Return ``x @ weight.T + bias``.

    ``auto`` chooses as measured, ``own`` and ``torch`` are for any number of tokens. torch
    multiplies only what it computes row by row.
    """
    fewest = _FEWEST.get(x.dtype)
    if kernel == "auto":
        is_torchs = fewest is None and _is_torchs(x)
    else:
        is_torchs = kernel == "torch" and has_whole_tiles(x)
    if is_torchs:
        return _torchs_linear(x, weight, bias)
    out = new_rows(x, weight.shape[0])
    if fewest is None:
        _linear(out, x, weight, bias)
    else:
        _linear_many(out, x, weight, bias, fewest)
    return out


def _is_torchs(x: Tensor) -> bool:
    """Return whether torch is faster for the tokens of *x*, or may be in a dynamic graph."""
    most = _MOST_TOKENS[x.dtype]
    return most is not None and not is_known(x.numel() <= most * x.shape[-1]) and has_whole_tiles(x)


def has_whole_tiles(x: Tensor) -> bool:
    """Return whether torch computes the rows of *x* independently.

    With AMX, oneDNN multiplies whole tiles. If a tile is wider than a row, it multiplies the memory
    after the row by zero. Often that is the next token, whose NaN or infinity then spreads.
    """
    return not (_AMX and x.dtype is torch.bfloat16) or is_known(x.shape[-1] % _TILE == 0)


def _torchs_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply with the faster one of torch's libraries; in a graph, with ``F.linear``."""
    if (
        x.dtype is torch.float32
        and _HAS_ONEDNN
        and torch.backends.mkldnn.enabled
        and not plain_call.kernels_are_traced()
    ):
        return compat.onednn_linear(x, weight, bias)
    return functional.linear(x, weight, bias)


compat.trace_instead(_torchs_linear, functional.linear)


@implements(op_w8a16, ACCEPTED_W8A16, traits=())
def linear_w8a16(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ (scale * weight).T + bias``; the 8-bit *weight* is widened on the fly."""
    fewest = _FEWEST_W8.get(x.dtype)
    if fewest is None and is_known(x.numel() > _MOST_TOKENS_W8[x.dtype] * x.shape[-1]):
        return _by_pieces(x, weight, scale, bias)
    out = new_rows(x, weight.shape[0])
    if fewest is None:
        _linear_w8a16(out, x, weight, scale, bias)
    else:
        _linear_w8a16_many(out, x, weight, scale, bias, fewest)
    return out


def _by_pieces(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by pieces of *weight* that fit into the CPU caches after widening.

    Graphs contain the native definition instead: the compiler fuses the widening.
    """
    if plain_call.kernels_are_traced():
        result: Tensor = op_w8a16.native(x, weight, scale, bias)
        return result

    def widen(wide: Tensor, piece: slice) -> None:
        _widen_rows(wide, weight[piece], scale if scale.numel() == 1 else scale[piece])

    return multiply_by_pieces(x, weight.shape[0], torch.float32, widen, bias)


def multiply_by_pieces(
    x: Tensor,
    rows: int,
    dtype: torch.dtype,
    widen: Callable[[Tensor, slice], None],
    bias: Tensor | None,
) -> Tensor:
    """Multiply by *rows* of weights, of which ``widen(out, piece)`` writes some as *dtype*."""
    columns = x.shape[-1]
    out = new_rows(x, rows)
    tokens = x.reshape(-1, columns).to(dtype).contiguous()
    step = _rows_of_piece(columns, len(tokens))
    wide = tokens.new_empty((min(step, rows), columns))
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        weights = wide[: rows - start]
        widen(weights, piece)
        offsets = None if bias is None else bias[piece].to(dtype)
        out.view(-1, rows)[:, piece] = _torchs_linear(tokens, weights, offsets)
    return out


def _rows_of_piece(columns: int, tokens: int) -> int:
    """Return the number of rows to widen at a time: at least the number of tokens.

    The matrix product packs all tokens again for every piece, which is only cheap compared with a
    piece of as many rows.
    """
    rows = max(_PIECE * torch.get_num_threads() // columns, tokens)
    return max(rows // _FEWEST_ROWS, 1) * _FEWEST_ROWS


compat.trace_instead(_by_pieces, op_w8a16.native)
