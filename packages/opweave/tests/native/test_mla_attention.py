"""The two forms of latent attention are one attention, over any cache and in any batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ir.workloads import check
from opweave import ir

HEADS, NOPE, ROPE, VALUE, LATENT = 4, 8, 6, 5, 12
prefill, decode = ir.ops.mla_attention_prefill, ir.ops.mla_attention_decode


class Sequences:
    """Packed latent rows of sequences, and queries at the end of each."""

    def __init__(self, lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
        self.new, self.all = ([pair[i] for pair in lengths] for i in range(2))
        self.cu_q, self.cu_k = (
            torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32)
            for n in (self.new, self.all)
        )
        self.query = torch.randn(sum(self.new), HEADS, NOPE + ROPE).to(dtype)
        self.rows = torch.randn(sum(self.all), LATENT + ROPE).to(dtype)
        self.weight = (torch.randn(HEADS * (NOPE + VALUE), LATENT) / LATENT**0.5).to(dtype)

    def prefill(self, scale: float | None = None) -> Tensor:
        kv_c, k_pe = torch.split_with_sizes(self.rows, [LATENT, ROPE], -1)
        out: Tensor = prefill(self.query, kv_c, k_pe, self.weight, self.cu_q, self.cu_k, scale)
        return out

    def decode(self, block_size: int, scale: float | None = None) -> Tensor:
        """From blocks in random order; what belongs to no sequence is NaN."""
        width = -(-max([*self.all, 1]) // block_size)
        tables = torch.randperm(len(self.all) * width + 1)[: len(self.all) * width]
        tables = tables.view(-1, width).int()
        blocks = len(self.all) * width + 1
        cache = self.rows.new_full((blocks, block_size, LATENT + ROPE), float("nan"))
        for table, rows in zip(tables, torch.split_with_sizes(self.rows, self.all), strict=True):
            for position, row in enumerate(rows):
                cache[table[position // block_size], position % block_size] = row
        lens = torch.tensor(self.all, dtype=torch.int32)
        out: Tensor = decode(self.query, cache, self.weight, tables, lens, self.cu_q, scale)
        return out


@pytest.mark.parametrize("provider", ["native", "batch_invariant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(
    "lengths",
    [[(1, 1)], [(1, 7), (1, 33), (1, 16)], [(5, 5), (2, 19)], [(3, 2), (0, 4), (1, 1)], []],
    ids=str,
)
def test_the_absorbed_form_is_the_expanded_form(
    lengths: list[tuple[int, int]], block_size: int, dtype: torch.dtype, provider: str
) -> None:
    with ir.priority(mla_attention_decode=f"{provider}!"):
        for scale in (None, 0.2):
            sequences = Sequences(lengths, dtype)
            check(prefill, sequences.decode(block_size, scale), sequences.prefill(scale))


def test_a_step_at_a_time_is_one_prefill() -> None:
    whole = Sequences([(9, 9)], torch.float32)
    expected = whole.prefill()
    for length in range(1, 10):
        step = Sequences([(1, length)], torch.float32)
        step.query, step.rows = whole.query[length - 1 : length], whole.rows[:length]
        step.weight = whole.weight
        check(prefill, step.decode(4), expected[length - 1 : length])
        check(prefill, step.prefill(), expected[length - 1 : length])


@torch.enable_grad()
def test_gradients_of_both_forms_are_the_same() -> None:
    sequences = Sequences([(2, 5), (1, 3)], torch.float64)
    leaves = (sequences.query, sequences.rows, sequences.weight)
    for leaf in leaves:
        leaf.requires_grad_()
    weights = torch.randn(3, HEADS, VALUE, dtype=torch.float64)
    expected = torch.autograd.grad((sequences.prefill() * weights).sum(), leaves)
    found = torch.autograd.grad((sequences.decode(4) * weights).sum(), leaves)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("provider", ["native", "batch_invariant"])
def test_a_block_that_the_cache_does_not_have(provider: str) -> None:
    s = Sequences([(1, 3)], torch.float32)
    cache, lens = torch.zeros(2, 4, LATENT + ROPE), torch.tensor([3], dtype=torch.int32)
    for block in (2, -1):
        tables = torch.tensor([[block]], dtype=torch.int32)
        with pytest.raises(IndexError):
            decode.using(f"{provider}!")(s.query, cache, s.weight, tables, lens, s.cu_q)


Change = Callable[..., tuple[Tensor, ...]]
INVALID: dict[str, tuple[Change, str]] = {
    "latent": (lambda q, c, k, w: (q, c[0], k, w), r"kv_c must be \(k_tokens, latent\)"),
    "rope": (lambda q, c, k, w: (q, c, k[1:], w), r"k_pe must be \(3, rope\)"),
    "heads": (lambda q, c, k, w: (q[:, :3], c, k, w), r"kv_b_weight must be \(3 \* \(8 \+ value"),
    "query": (lambda q, c, k, w: (q[..., :5], c, k, w), r"query must be \(tokens, heads, nope"),
    "weight": (lambda q, c, k, w: (q, c, k, w[:, 1:]), r"kv_b_weight must be .*, 12\)"),
    "dtype": (lambda q, c, k, w: (q, c, k, w.half()), "float32, as query is; found float16"),
}


@pytest.mark.parametrize("case", INVALID)
def test_what_does_not_fit_is_named(case: str) -> None:
    change, message = INVALID[case]
    s = Sequences([(3, 3)], torch.float32)
    kv_c, k_pe = torch.split_with_sizes(s.rows, [LATENT, ROPE], -1)
    arguments = change(s.query, kv_c, k_pe, s.weight)
    with pytest.raises(ValueError, match=message):
        prefill(*arguments, s.cu_q, s.cu_k)


def test_a_cache_without_room_for_a_row_is_named() -> None:
    s = Sequences([(1, 1)], torch.float32)
    tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"kv_cache must be \(blocks, block_size, 12 \+ rope\)"):
        decode(s.query, torch.zeros(1, 4, 11), s.weight, tables, lens, s.cu_q)
