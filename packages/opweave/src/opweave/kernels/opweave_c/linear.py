"""Linear layers: kernels for few tokens, which are memory-bound, and for many."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import SymBool, Tensor
from torch.nn import functional

from opweave import plain_call, torch_compat
from opweave.ir import IrOp, ops, rules
from opweave.ir.ops.linear import scales_rows, spread_token_scales
from opweave.kernels.arguments import W4A16, W8A8, Q, group_of, q_fits, w4a16_fits, w8a8_fits
from opweave.kernels.opweave_c.calls import (
    HAS_DIMS,
    ROWS,
    SCALE,
    STATUS,
    implements,
    native_op,
    new_rows,
)
from opweave.kernels.wrap import opaque

# Linear layers: kernels for few tokens, which are memory-bound, and for many.
#
# The scale of 8-bit weights multiplies the sum of the products instead of each weight, so the
# sum may overflow if activations are close to the largest float32.


_Multiply = Callable[..., Tensor]

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
_BFLOAT16 = torch_compat.has_avx512_bf16()
_AMX, _TILE = torch_compat.has_amx(), 32  # columns of a bfloat16 tile
_MAX_TOKENS = {
    torch.float32: 32,
    torch.bfloat16: 6 if _AMX else 16 if _BFLOAT16 else None,
    torch.float16: 16 if torch_compat.multiplies_float16() else None,
}
# On other architectures than x86, our kernel has only the vector types of the compiler, and widens
# 16 bits without instructions for it, which torch has.
if not torch_compat.is_x86():
    _MAX_TOKENS.update({torch.bfloat16: 0, torch.float16: 0})
# Measured with 512 to 4,096 columns, for int8 and float8; torch multiplies in float32.
_MAX_TOKENS_W8 = {torch.float32: 96, torch.bfloat16: 48 if _BFLOAT16 else 96, torch.float16: 96}
# The smallest number of tokens for which our kernel for many tokens is faster: panels with AVX2,
# which also beat torch, and tiles with AMX, for 8-bit weights only. The native op chooses at run
# time, so dynamic graphs use it too. Measured with 512 to 8,192 columns.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_TOKENS = dict.fromkeys(_DTYPES, 16) if STATUS.isa == "avx2" else {}
_MIN_TOKENS_W8 = (
    {torch.float32: 9, torch.bfloat16: 4, torch.float16: 6} if STATUS.isa == "amx" else _MIN_TOKENS
)
# torch uses oneDNN only for 16 bits. In float32, oneDNN is 4 % to 30 % faster than MKL, torch's
# choice, for 33 to 512 tokens; the gain grows with the size of the weight.
_HAS_ONEDNN = torch_compat.has_onednn() and torch_compat.has_avx512()

# Weights per piece and thread: 4 MiB of float32, measured with 2,048 to 14,336 columns. Smaller
# pieces, or fewer than 64 rows, slow torch down; larger ones do not fit into the CPU caches.
_PIECE, _MIN_ROWS = 1 << 20, 64

_WEIGHT = (
    rules.cpu("weight", "bias") & rules.ndim("weight", 2) & rules.unit_stride("weight", "bias")
)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])


def is_known(fact: bool | SymBool) -> bool:
    """Return whether *fact* is true; in a graph, whether it is true for all dynamic sizes."""
    if isinstance(fact, SymBool):
        # Imported lazily, because it imports sympy.
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(fact)
    return fact


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
    & rules.custom(_fits, "shapes do not fit")
    & rules.custom(scales_rows, "scale has neither one element nor one for each row of weight")
)


@implements(ops.linear, ACCEPTED, traits=(), tunable={"kernel": ("auto", "own", "torch")})
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kernel: str = "auto"
) -> Tensor:
    """Return ``x @ weight.T + bias``.

    ``auto`` chooses as measured, ``own`` and ``torch`` are for any number of tokens. torch
    multiplies only what it computes row by row.
    """
    fewest = _MIN_TOKENS.get(x.dtype)
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
    most = _MAX_TOKENS[x.dtype]
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
        return torch_compat.onednn_linear(x, weight, bias)
    return functional.linear(x, weight, bias)


torch_compat.trace_instead(_torchs_linear, functional.linear)


@implements(ops.linear_w8a16, ACCEPTED_W8A16, traits=())
def linear_w8a16(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ (scale * weight).T + bias``; the 8-bit *weight* is widened on the fly."""
    fewest = _MIN_TOKENS_W8.get(x.dtype)
    if fewest is None and is_known(x.numel() > _MAX_TOKENS_W8[x.dtype] * x.shape[-1]):
        return _by_pieces(x, weight, scale, bias)
    out = new_rows(x, weight.shape[0])
    if fewest is None:
        _linear_w8a16(out, x, weight, scale, bias)
    else:
        _linear_w8a16_many(out, x, weight, scale, bias, fewest)
    return out


def _native_in_graphs(op: IrOp) -> Callable[[_Multiply], _Multiply]:
    """Make graphs contain the native definition of *op* instead of the decorated function.

    The compiler fuses the widening of the weights. The function takes the op's arguments.
    """

    def decorate(function: _Multiply) -> _Multiply:
        @functools.wraps(function)
        def call(*arguments: Any) -> Tensor:
            run: _Multiply = op.native if plain_call.kernels_are_traced() else function
            return run(*arguments)

        torch_compat.trace_instead(call, op.native)
        return call

    return decorate


@_native_in_graphs(ops.linear_w8a16)
def _by_pieces(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by pieces of *weight* that fit into the CPU caches after widening."""

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
    return max(rows // _MIN_ROWS, 1) * _MIN_ROWS


# Linear layers with weights and activations of 8 bits, by the kernels for 8-bit weights.
#
# Activations are dequantized to float32, which is exact for their codes; weights stay narrow.


# From here on, torch's product of integers is faster, where the CPU has instructions for it.
_MIN_TOKENS_INT8 = 16
_MULTIPLIES_INT8 = torch_compat.has_vnni()
_MAX_COLUMNS = 1 << 17  # sums of more products may not fit into 32 bits
# The largest number of tokens to multiply block by block; others multiply widened weights.
_MAX_TOKENS_W8A8 = 16
_MIN_ROWS_W8A8 = 16  # blocks with fewer rows multiply widened weights


ACCEPTED_W8A8 = (
    rules.cpu("x", "x_scale", "weight", "scale", "bias")
    & HAS_DIMS
    & W8A8
    & rules.custom(w8a8_fits, "shapes do not fit")
)


@implements(ops.linear_w8a8, ACCEPTED_W8A8, traits=())
def linear_w8a8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``(x * x_scale) @ (weight * scale).T + bias``."""
    if is_blocked(scale, weight):
        result: Tensor = _by_blocks(x, x_scale, weight, scale, bias, out_dtype)
        return result
    if _multiplies_integers(x, x_scale):
        return _by_integers(x, x_scale, weight, scale, bias).to(out_dtype)
    bias = None if bias is None else bias.float()
    wide = widened(x, x_scale)
    out: Tensor = linear_w8a16(wide, weight, scale.contiguous(), bias)
    return out.to(out_dtype)


def is_blocked(scale: Tensor, weight: Tensor) -> bool:
    """Whether *scale* is not one for the whole *weight* or for each row."""
    return scale.ndim == 2 and scale.numel() > 1 and scale.shape != (weight.shape[0], 1)


def widened(x: Tensor, x_scale: Tensor) -> Tensor:
    """Return the activations in float32."""
    return (x.to(torch.float32) * spread_token_scales(x_scale, x)).contiguous()


def _multiplies_integers(x: Tensor, x_scale: Tensor) -> bool:
    """Return whether products of integers are faster, and each token has one scale at most."""
    return (
        _MULTIPLIES_INT8
        and x.dtype is torch.int8
        and x.shape[-1] <= _MAX_COLUMNS
        and (x_scale.ndim != x.ndim or x_scale.shape[-1] == 1)
        and is_known(x.numel() >= _MIN_TOKENS_INT8 * x.shape[-1])
    )


def _by_integers(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply codes as integers, which is exact, and scale the sums; float32."""
    sums = torch_compat.multiply_int8(x.reshape(-1, x.shape[-1]).contiguous(), weight.t())
    sums = sums.reshape(*x.shape[:-1], weight.shape[0])
    out = sums.float() * spread_token_scales(x_scale, x) * scale.reshape(-1)
    return out if bias is None else out + bias.float()


@opaque(ops.linear_w8a8, "opweave_c_blocks")
def _by_blocks(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Multiply by blocks with a scale each."""
    tokens = widened(x, x_scale)
    rows = weight.shape[0] // scale.shape[0]
    if x.numel() <= _MAX_TOKENS_W8A8 * x.shape[-1] and rows >= _MIN_ROWS_W8A8:
        return of_blocks(tokens, weight, scale, bias).to(out_dtype)
    of_row = scale.repeat_interleave(rows, 0)
    one = torch.ones(1)

    def widen(wide: Tensor, piece: slice) -> None:
        _widen_rows(wide, weight[piece], one)
        torch.unflatten(wide, 1, (scale.shape[1], -1)).mul_(of_row[piece, :, None])

    offsets = None if bias is None else bias.float()
    pieces = multiply_by_pieces(tokens, weight.shape[0], torch.float32, widen, offsets)
    return pieces.to(out_dtype)


def of_blocks(tokens: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows of blocks by tokens times the scales of these blocks, in float32.

    A row of blocks is contiguous in memory, unlike a column of them.
    """
    flat = tokens.reshape(-1, tokens.shape[-1])
    groups = torch.unflatten(flat, 1, (scale.shape[1], -1))
    parts = torch.unflatten(weight, 0, (scale.shape[0], -1))
    out = tokens.new_empty((scale.shape[0], flat.shape[0], parts.shape[1]))
    one: Any = torch.ones(1)
    for part, factors, sums in zip(parts, scale, out, strict=True):
        _linear_w8a16(sums, (groups * factors[:, None]).flatten(1), part, one, None)
    joined = out.transpose(0, 1).reshape(*tokens.shape[:-1], weight.shape[0])
    return joined if bias is None else joined + bias.float()


# Linear layers with low-bit weights: kernels for few tokens and, with AMX, for many in bfloat16.
#
# Otherwise, many tokens are multiplied by torch, by pieces of the weight.


NEEDS = ("linear_w4a16", "linear_w4a16_many", "widen_w4")
NEEDS_Q = ("linear_gguf", "linear_gguf_many", "widen_gguf")

_linear_w4a16 = native_op("linear_w4a16")
_linear_w4a16_many = native_op("linear_w4a16_many")
_widen_w4 = native_op("widen_w4")
_linear_gguf = native_op("linear_gguf")
_linear_gguf_many = native_op("linear_gguf_many")
_widen_gguf = native_op("widen_gguf")

# The largest number of tokens for which the kernel for few tokens is faster, measured with 2,048
# columns. Graphs with a dynamic number of tokens use it too.
MAX_TOKENS_W4 = {torch.float32: 24, torch.bfloat16: 12 if _BFLOAT16 else 32, torch.float16: 32}
MAX_TOKENS_Q = {torch.float32: 12, torch.bfloat16: 6 if _BFLOAT16 else 12, torch.float16: 12}
# The smallest number of bfloat16 tokens for which AMX tiles are faster; None: the CPU has no AMX.
# Like torch by pieces, they round the weights to bfloat16.
_MIN_TOKENS_AMX = 7 if STATUS.isa == "amx" else None
_MANY_GROUP = 32  # groups of such weights are a multiple of this
FORMATS = ("q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k")  # in the order of the native op
_GROUP = 8  # the kernel's sums are for so many columns


ACCEPTED_W4A16 = (
    ROWS
    & rules.cpu("weight", "scale", "offset", "bias")
    & W4A16
    & rules.custom(w4a16_fits, "shapes do not fit")
    & rules.custom(
        lambda weight, scale: group_of(weight, scale) % _GROUP == 0,
        f"a group is not a multiple of {_GROUP} columns",
    )
)


@implements(ops.linear_w4a16, ACCEPTED_W4A16, traits=(), needs=NEEDS)
def linear_w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``x @ (weight * scale + offset).T + bias``; 4-bit weights are widened on the fly."""
    is_narrow = _MIN_TOKENS_AMX is not None and x.dtype is torch.bfloat16
    if is_narrow and group_of(weight, scale) % _MANY_GROUP == 0:
        out = new_rows(x, weight.shape[0])
        _linear_w4a16_many(out, x, weight, scale, offset, bias, _MIN_TOKENS_AMX)
        return out
    if is_known(x.numel() > MAX_TOKENS_W4[x.dtype] * x.shape[-1]):
        return _by_pieces_w4(x, weight, scale, offset, bias)
    out = new_rows(x, weight.shape[0])
    _linear_w4a16(out, x, weight, scale, offset, bias)
    return out


@_native_in_graphs(ops.linear_w4a16)
def _by_pieces_w4(
    x: Tensor, weight: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Multiply by pieces of *weight*, like those of 8 bits.

    Where the CPU multiplies bfloat16, weights for tokens in bfloat16 are rounded to it: their
    errors average out, and the rounding of the result is as large.
    """

    def widen(wide: Tensor, piece: slice) -> None:
        _widen_w4(wide, weight[piece], scale[piece], None if offset is None else offset[piece])

    return multiply_by_pieces(x, weight.shape[0], _dtype_of_pieces(x, bias), widen, bias)


def _dtype_of_pieces(x: Tensor, bias: Tensor | None) -> torch.dtype:
    """Return the dtype to multiply in; a float32 bias must not be rounded to bfloat16."""
    is_narrow = (
        x.dtype is torch.bfloat16
        and _BFLOAT16
        and has_whole_tiles(x)
        and (bias is None or bias.dtype is torch.bfloat16)
    )
    return torch.bfloat16 if is_narrow else torch.float32


ACCEPTED_Q = ROWS & rules.cpu("weight", "bias") & Q & rules.custom(q_fits, "shapes do not fit")


@implements(ops.linear_q, ACCEPTED_Q, traits=(), needs=NEEDS_Q)
def linear_q(x: Tensor, weight: Tensor, bias: Tensor | None = None, format: str = "q8_0") -> Tensor:
    """Return ``x @ dequantized(weight).T + bias``; blocks are dequantized on the fly."""
    if _MIN_TOKENS_AMX is not None and x.dtype is torch.bfloat16:
        out = new_rows(x, weight.shape[0])
        _linear_gguf_many(out, x, weight, bias, FORMATS.index(format), _MIN_TOKENS_AMX)
        return out
    if is_known(x.numel() > MAX_TOKENS_Q[x.dtype] * x.shape[-1]):
        return _by_pieces_q(x, weight, bias, format)
    out = new_rows(x, weight.shape[0])
    _linear_gguf(out, x, weight, bias, FORMATS.index(format))
    return out


@_native_in_graphs(ops.linear_q)
def _by_pieces_q(x: Tensor, weight: Tensor, bias: Tensor | None, format: str) -> Tensor:
    """Multiply by pieces of *weight*, like those of ``linear_w4a16``."""
    index = FORMATS.index(format)

    def widen(wide: Tensor, piece: slice) -> None:
        _widen_gguf(wide, weight[piece], index)

    return multiply_by_pieces(x, weight.shape[0], _dtype_of_pieces(x, bias), widen, bias)
