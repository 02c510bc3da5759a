"""Benchmark cases: one `Case` or more for every op with a kernel in opweave_c."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_cells import eager
from kernel_cells.shape import BLOCK_SIZE, HEAD_SIZE, Shape
from opweave import ir
from opweave.ir.ops.low_bit import random_blocks

PROVIDER = "opweave_c"
Arguments = tuple[Any, ...]
Traffic = Callable[[Arguments, Sequence[Tensor]], tuple[int, int]]


def size_of(tensors: Sequence[object]) -> int:
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


def everything(arguments: Arguments, outputs: Sequence[Tensor]) -> tuple[int, int]:
    """Every input is read once, every output written once."""
    return size_of(arguments), size_of(outputs)


def rows_of_table(arguments: Arguments, outputs: Sequence[Tensor]) -> tuple[int, int]:
    """The same, but of the table of angles only the rows of the positions are read."""
    query, key, positions, table, *rest = arguments
    used = table[:1].nbytes * min(positions.numel(), table.shape[0])
    return size_of([query, key, positions, *rest]) + used, size_of(outputs)


def new_tokens(arguments: Arguments, outputs: Sequence[Tensor]) -> tuple[int, int]:
    """Keys and values are read, and written into the cache; the rest of the cache is not used."""
    key, value, _, _, slots = arguments
    return size_of([key, value, slots]), size_of([key, value])


def rotated_tokens(arguments: Arguments, outputs: Sequence[Tensor]) -> tuple[int, int]:
    """The same with queries, which are read and written, and rows of the table of angles."""
    query, key, value, positions, table, _, _, slots, *_ = arguments
    used = table[:1].nbytes * min(positions.numel(), table.shape[0])
    tokens = [query, key, value]
    return size_of([*tokens, positions, slots]) + used, size_of(tokens)


@dataclass(frozen=True, slots=True)
class Case:
    """How to measure an op.

    *eager* replaces the native implementation where nobody would run that. *streams* says that
    a server's calls never find the op's inputs in a cache, for any number of tokens:
    weights, or the keys of a sequence. *states* are what is measured: a ``fresh`` output that the
    call allocates, and one that is ``reused``: given by the caller, or the input itself. In place,
    most ops write what they have read; *moves* says that this one writes elsewhere. More tokens
    than *most_in_one_call* take many native calls, so that no output can be given to one. *passes*
    is how often what exceeds every cache has to be read: twice, where the first result depends on
    the last input.
    """

    inputs: Callable[[Shape], Arguments]
    variant: str = ""
    eager: Callable[..., Any] | None = None
    traffic: Traffic = everything
    streams: bool = False
    attends: bool = False
    is_floating: bool = True
    moves: bool = False
    passes: int = 1
    states: tuple[str, ...] = ("fresh", "reused")
    most_in_one_call: float = math.inf
    least_share: float = 0.8

    @property
    def stream(self) -> str:
        """The stream whose bandwidth is the kernel's: of a copy, or of a read if it streams."""
        return "read" if self.streams else "copy"


def _small_weight(s: Shape) -> Tensor:
    """A weight with which adding the result to the residual, again and again, stays finite."""
    return torch.full((s.hidden,), 1e-3).to(s.dtype)


def _gated(*options: object) -> Callable[[Shape], Arguments]:
    return lambda s: (s.rows(2 * s.hidden), *options)


def _single(*options: object) -> Callable[[Shape], Arguments]:
    return lambda s: (s.rows(), *options)


def _rotary(s: Shape, is_neox: bool) -> Arguments:
    angles = torch.rand(max(4096, s.tokens), HEAD_SIZE // 2) * 6.3
    table = torch.cat((angles.cos(), angles.sin()), -1).to(s.dtype)
    query, key = s.rows(s.heads * HEAD_SIZE), s.rows(s.key_heads * HEAD_SIZE)
    return query, key, torch.arange(s.tokens), table, HEAD_SIZE, is_neox


def _norm_rope(s: Shape) -> Arguments:
    query, key, positions, table, size, is_neox = _rotary(s, True)
    weights = [torch.ones(HEAD_SIZE, dtype=s.dtype)] * 2  # in place, others would leave denormals
    return query, key, positions, table, *weights, 1e-6, size, is_neox


def _cache(s: Shape, blocks: int) -> tuple[Tensor, Tensor]:
    size = (blocks, s.key_heads, BLOCK_SIZE, HEAD_SIZE)
    return s.values(*size), s.values(*size)


def _new_tokens(s: Shape) -> Arguments:
    """Whole blocks in a random order, as a prompt fills them, or one token for a decode step."""
    key, value = (s.values(s.tokens, s.key_heads, HEAD_SIZE) for _ in range(2))
    blocks = -(-s.tokens // BLOCK_SIZE) + 2
    slots = torch.randperm(blocks)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    return key, value, *_cache(s, blocks), slots.flatten()[: s.tokens].contiguous()


def _rotated_tokens(s: Shape) -> Arguments:
    query, key, positions, table, size, is_neox = _rotary(s, True)
    _, value, *cache_and_slots = _new_tokens(s)
    return query, key, value, positions, table, *cache_and_slots, size, is_neox


def _attention(s: Shape) -> Arguments:
    """One token each of several sequences, or all of one prompt."""
    sequences = s.tokens if is_decode(s.tokens) else 1
    blocks = s.context // BLOCK_SIZE
    tables = torch.randperm(sequences * blocks).view(sequences, blocks).to(torch.int32)
    lengths = torch.full((sequences,), s.context, dtype=torch.int32)
    starts = torch.arange(sequences + 1, dtype=torch.int32) * (s.tokens // sequences)
    query = s.values(s.tokens, s.heads, HEAD_SIZE)
    return query, *_cache(s, sequences * blocks), tables, lengths, starts


def _attention_quant(s: Shape) -> Arguments:
    return *_attention(s), s.scale()


def is_decode(tokens: int) -> bool:
    return tokens <= BLOCK_SIZE


def _step(s: Shape) -> Arguments:
    """Blocks so long that no number of repeated steps reaches the end."""
    zeros = [torch.zeros(s.tokens, dtype=torch.int64) for _ in range(3)]
    lengths = torch.zeros(s.tokens, dtype=torch.int32)
    tables = torch.arange(4 * s.tokens, dtype=torch.int32).view(s.tokens, 4)
    return zeros[0], torch.ones_like(zeros[0]), zeros[1], lengths, zeros[2], tables, 1 << 24


def _xielu(s: Shape) -> Arguments:
    numbers = torch.tensor([[0.2], [-1.1]]).to(s.dtype)
    return s.rows(), numbers[0], numbers[1], 0.5, -1e-6


def _linear(s: Shape) -> Arguments:
    return s.rows(), s.values(s.hidden, s.hidden).mul_(s.hidden**-0.5)


def _linear_w8a16(dtype: torch.dtype) -> Callable[[Shape], Arguments]:
    def inputs(s: Shape) -> Arguments:
        weight = s.values(s.hidden, s.hidden).mul_(30).to(dtype)
        return s.rows(), weight, torch.full((s.hidden,), 1e-3)

    return inputs


def _linear_w8a8(dtype: torch.dtype, block: int = 0) -> Callable[[Shape], Arguments]:
    def inputs(s: Shape) -> Arguments:
        codes, weight = (s.values(n, s.hidden).mul_(30).to(dtype) for n in (s.tokens, s.hidden))
        groups = s.hidden // block if block else 1
        scale = torch.full((groups, groups) if block else (s.hidden,), 1e-3)
        return codes, torch.full((s.tokens, groups), 1e-2), weight, scale, None, s.dtype

    return inputs


def _linear_w4a16(s: Shape) -> Arguments:
    weight = torch.randint(0, 256, (s.hidden, s.hidden // 2), dtype=torch.uint8)
    return s.rows(), weight, torch.full((s.hidden, s.hidden // 32), 1e-3, dtype=torch.float16)


def _linear_q(format: str) -> Callable[[Shape], Arguments]:
    def inputs(s: Shape) -> Arguments:
        return s.rows(), random_blocks(s.hidden, s.hidden, format), None, format

    return inputs


CASES: dict[str, list[Case]] = {
    "rms_norm": [Case(lambda s: (s.rows(), s.weight(), 1e-6))],
    "fused_add_rms_norm": [Case(lambda s: (s.rows(), s.rows(), _small_weight(s), 1e-6))],
    "layer_norm": [Case(lambda s: (s.rows(), s.weight(), s.weight(), 1e-5))],
    "rms_norm_gated": [Case(lambda s: (s.rows(), s.weight(), s.rows(), 1e-6))],
    "silu_and_mul": [Case(_gated())],
    "mul_and_silu": [Case(_gated())],
    "gelu_and_mul": [Case(_gated("none"), "erf"), Case(_gated("tanh"), "tanh")],
    "gelu_and_mul_sparse": [Case(_gated(1.6448536269514722, "tanh"))],
    "fatrelu_and_mul": [Case(_gated(0.01))],
    "swigluoai_and_mul": [Case(_gated())],
    "gelu_new": [Case(_single())],
    "gelu_fast": [Case(_single())],
    "quick_gelu": [Case(_single())],
    "relu2": [Case(_single())],
    "xielu": [Case(_xielu)],
    "rotary_embedding": [
        Case(lambda s: _rotary(s, True), "neox", traffic=rows_of_table),
        Case(lambda s: _rotary(s, False), "interleaved", traffic=rows_of_table),
    ],
    "qk_norm_rope": [Case(_norm_rope, traffic=rows_of_table)],
    "static_quant_fp8": [Case(lambda s: (s.rows(), s.scale()))],
    "static_quant_int8": [Case(lambda s: (s.rows(), s.scale()))],
    "dynamic_per_tensor_quant_fp8": [Case(_single(), passes=2)],
    "dynamic_per_token_quant_fp8": [Case(_single())],
    "dynamic_per_token_quant_int8": [Case(_single())],
    "per_token_group_quant_fp8": [Case(_single(128))],
    "rms_norm_static_quant_fp8": [Case(lambda s: (s.rows(), s.weight(), 1e-6, s.scale()))],
    "rms_norm_dynamic_per_token_quant_fp8": [Case(lambda s: (s.rows(), s.weight(), 1e-6))],
    "rms_norm_dynamic_per_token_quant_int8": [Case(lambda s: (s.rows(), s.weight(), 1e-6))],
    "fused_add_rms_norm_static_quant_fp8": [
        Case(lambda s: (s.rows(), s.rows(), s.weight(), 1e-6, s.scale()))
    ],
    "fused_add_rms_norm_dynamic_per_token_quant_fp8": [
        Case(lambda s: (s.rows(), s.rows(), s.weight(), 1e-6))
    ],
    "fused_add_rms_norm_dynamic_per_token_quant_int8": [
        Case(lambda s: (s.rows(), s.rows(), s.weight(), 1e-6))
    ],
    "silu_and_mul_static_quant_fp8": [Case(lambda s: (s.rows(2 * s.hidden), s.scale()))],
    "silu_and_mul_dynamic_per_token_quant_fp8": [Case(_gated())],
    "silu_and_mul_dynamic_per_token_quant_int8": [Case(_gated())],
    "silu_and_mul_per_token_group_quant_fp8": [Case(_gated(128))],
    "reshape_and_cache": [
        Case(
            _new_tokens,
            eager=eager.write_slots,
            traffic=new_tokens,
            moves=True,
            states=("reused",),
        )
    ],
    "paged_attention": [
        Case(
            _attention,
            eager=eager.gather_and_attend,
            streams=True,
            attends=True,
            least_share=0.6,
        )
    ],
    "rope_reshape_and_cache": [
        Case(
            _rotated_tokens,
            eager=eager.rotate_and_write_slots,
            traffic=rotated_tokens,
            moves=True,
            states=("reused",),
        )
    ],
    "attention_quant": [
        Case(
            _attention_quant,
            eager=eager.gather_attend_and_quantize,
            streams=True,
            attends=True,
            least_share=0.6,
        )
    ],
    "linear": [Case(_linear, streams=True)],
    "linear_w8a16": [
        Case(_linear_w8a16(torch.int8), "int8", streams=True, most_in_one_call=96),
        Case(_linear_w8a16(torch.float8_e4m3fn), "fp8", streams=True, most_in_one_call=96),
    ],
    "linear_w8a8": [
        Case(_linear_w8a8(torch.int8), "int8", streams=True, most_in_one_call=0),
        Case(_linear_w8a8(torch.float8_e4m3fn, 128), "fp8", streams=True, most_in_one_call=0),
    ],
    "linear_w4a16": [Case(_linear_w4a16, streams=True, most_in_one_call=12)],
    "linear_q": [
        Case(_linear_q("q4_k"), "q4_k", streams=True, most_in_one_call=6),
        Case(_linear_q("q8_0"), "q8_0", streams=True, most_in_one_call=6),
    ],
    "advance_step_flashattn": [Case(_step, is_floating=False)],
}


def ops_with_kernels() -> list[ir.IrOp]:
    """Return every op that has an implementation in opweave_c, by name."""
    registry = ir.current_registry()
    registry.ensure_ready()
    return sorted(
        (op for op in registry.ops.values() if PROVIDER in op.impls), key=lambda op: op.name
    )


def ops_without_case() -> list[str]:
    """Return the ops with a kernel that nothing here measures."""
    return [op.name for op in ops_with_kernels() if op.name not in CASES]


def contexts(case: Case, tokens: int) -> Iterator[int]:
    """Return the numbers of cached keys to measure *tokens* with; 0 for ops without a cache."""
    if not case.attends:
        yield 0
    elif is_decode(tokens):
        yield from (512, 2048)
    else:
        yield tokens
