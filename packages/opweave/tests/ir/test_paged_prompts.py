"""Prompts over the paged cache by gathered keys: the provider ``aten`` of ``paged_attention``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.errors import ProviderRejectedError
from opweave.kernels.arguments import FLOATS

OP = ir.ops.paged_attention
each_variant = pytest.mark.parametrize("provider", ["aten", "aten[prompt=1]"])
BLOCK = 16


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def batch(
    sequences: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (32, 32),
    extra: int = 0,
) -> list[Tensor]:
    """Return tensors for *sequences* (numbers of queries and of keys), and *extra* tokens."""
    counts, lengths = zip(*sequences, strict=True)
    width = max(-(-max(lengths) // BLOCK), 1)
    blocks = len(sequences) * width + 1
    shape = (blocks, heads[1], BLOCK)
    tables = torch.randperm(blocks - 1).view(len(sequences), width) + 1
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [
        torch.randn(starts[-1] + extra, heads[0], sizes[0]).to(dtype),
        torch.randn(*shape, sizes[0]).to(dtype),
        torch.randn(*shape, sizes[1]).to(dtype),
        *(torch.tensor(x, dtype=torch.int32) for x in (tables.tolist(), lengths, starts)),
    ]


def check(provider: str, arguments: list[Tensor], **options: Any) -> Tensor:
    found: Tensor = OP.using(f"{provider}!")(*arguments, **options)
    expected = OP.native(*arguments, **options)
    tolerance = OP.get_tolerance(found.dtype)._asdict()
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
    assert found.is_contiguous()
    return found


MIXED = [(1, 40), (150, 150), (0, 20), (3, 70), (130, 200), (1, 1), (128, 128), (20, 20)]


@each_variant
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"scale": -0.3},
        {"causal": False},
        {"window": 1},
        {"window": 33},
        {"window": 500},
    ],
    ids=str,
)
def test_prompts_decodes_and_chunks_in_one_batch(
    provider: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    check(provider, batch(MIXED, dtype, extra=5), **options)


@each_variant
@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (6, 2), (3, 3)])
@pytest.mark.parametrize("sizes", [(16, 16), (24, 40), (40, 24)])
def test_heads(provider: str, heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    check(provider, batch([(129, 129), (1, 30), (140, 160)], heads=heads, sizes=sizes))


@each_variant
def test_queries_without_keys_give_zeros(provider: str) -> None:
    found = check(provider, batch([(130, 100), (140, 0), (200, 200)]))
    assert not found[:30].any()
    assert not found[130:270].any()


@each_variant
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [1, 2])
def test_masked_keys_contribute_nothing(provider: str, which: int, bad: float) -> None:
    arguments = batch([(150, 150), (130, 130)])
    last = arguments[3][0, 149 // BLOCK]
    arguments[which][last, :, 149 % BLOCK] = bad  # the last key, which one query sees
    arguments[which][last, :, 150 % BLOCK :] = math.nan  # beyond the keys
    arguments[which][0] = math.nan  # of no table
    found = check(provider, arguments)
    assert found[:149].isfinite().all()
    assert found[150:].isfinite().all()


def test_batches_of_decodes_never_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of decode steps can be recorded with it of any size."""

    def tolist(self: Tensor) -> Any:
        raise AssertionError("waits for the device")

    decodes, few = batch([(1, 40)] * 200), batch([(100, 130), (20, 20)])
    expected = [OP.native(*arguments) for arguments in (decodes, few)]
    monkeypatch.setattr(Tensor, "tolist", tolist)
    for arguments, wanted in zip((decodes, few), expected, strict=True):
        found = OP.using("aten!")(*arguments)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    with pytest.raises(AssertionError, match="waits"):
        OP.using("aten!")(*batch([(100, 130), (200, 200)]))


def test_decodes_are_left_to_a_kernel_that_reads_the_cache() -> None:
    arguments = batch(MIXED)
    with ir.record() as record, ir.priority(paged_attention=["aten"]):
        OP(*arguments)
    [chosen] = [each for each in record.selected_impls["paged_attention"] if each != "aten"]
    assert chosen in ("opweave_c", "native")


@each_variant
def test_invalid_lengths_and_blocks_are_errors(provider: str) -> None:
    for length in (-1, 161):
        arguments = batch([(150, 150), (130, 130)])
        arguments[4][1] = length
        with pytest.raises(IndexError, match=rf"seq_lens\[1\] is {length}; .* room for 0 to 160"):
            OP.using(f"{provider}!")(*arguments)
    for block in (-1, 99):
        arguments = batch([(150, 150), (130, 130)])
        arguments[3][1, 2] = block
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            OP.using(f"{provider}!")(*arguments)


def test_a_soft_cap_is_refused() -> None:
    with pytest.raises(ProviderRejectedError, match="soft_cap"):
        OP.using("aten!")(*batch([(130, 130)]), soft_cap=30.0)
