"""Attention over the paged cache, with the options, sizes and contents that kernels get wrong."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.kernels.triton import launch as limits

OP = ir.ops.paged_attention


def check(arguments: tuple[Any, ...], **options: Any) -> Tensor:
    found: Tensor = OP.using("triton!")(*arguments[:6], **options)
    expected = OP.native(*arguments[:6], **options)
    tolerance = OP.get_tolerance(found.dtype)
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance._asdict())
    return found


def decoding(device: str, lengths: list[int], block_size: int = 16) -> tuple[Any, ...]:
    """One query for each sequence, of lengths that may be 0."""
    width = max(-(-max(lengths) // block_size), 1)
    count = len(lengths)
    tables = torch.randperm(count * width, device=device, dtype=torch.int32).view(count, width)
    caches = torch.randn(2, count * width, 2, block_size, 32, device=device)
    return (
        torch.randn(count, 4, 32, device=device),
        *caches,
        tables,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.arange(count + 1, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize("lengths", [[700], [1, 300, 5], [0, 200], [16, 32]], ids=str)
def test_programs_that_share_the_keys_of_a_sequence(device: str, lengths: list[int]) -> None:
    check(decoding(device, lengths))
    check(decoding(device, lengths), window=33)


def test_sequences_without_queries_or_keys_and_queries_after_the_last(device: str) -> None:
    query, keys, values, tables, _, _ = decoding(device, [60, 60, 60, 60, 60])
    starts = torch.tensor([0, 1, 1, 3, 3, 4], dtype=torch.int32, device=device)
    lengths = torch.tensor([60, 60, 2, 60, 0], dtype=torch.int32, device=device)
    found = check((query, keys, values, tables, lengths, starts))
    assert not found[3:].any()


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_no_query_sees_is_not_used(device: str, tokens: int, poison: float) -> None:
    """A value that some queries of a tile see, and others do not, is where it must be."""
    arguments = list(OP.generate_inputs(num_tokens=tokens, num_seqs=1, device=device))
    values, tables, lengths = arguments[2:5]
    at = int(lengths[0]) - tokens // 2 - 1
    block_size = values.shape[2]
    values[tables[0, at // block_size], :, at % block_size, 3] = poison
    found = check(tuple(arguments))
    is_there = found[:, :, 3].isnan() | found[:, :, 3].isinf()
    assert is_there.all(1).tolist() == [i >= tokens - tokens // 2 - 1 for i in range(tokens)]
    assert not found[:, :, [0, 1, 2, 4]].isnan().any()


def test_a_block_that_is_not_in_the_cache_gives_nan(device: str) -> None:
    arguments = decoding(device, [40, 40])
    arguments[3][0, 1] = 99
    found = OP.using("triton!")(*arguments)
    assert found[0].isnan().all()
    assert not found[1].isnan().any()


LAYOUTS = {  # of one tensor (2, blocks, heads, positions, size)
    "blocks": (1, 0, 2, 3, 4),
    "heads": (1, 2, 0, 3, 4),
    "positions before heads": (0, 1, 3, 2, 4),
    "heads of positions": (1, 3, 2, 0, 4),
}


def in_one_tensor(caches: tuple[Tensor, Tensor], layout: str) -> tuple[Tensor, Tensor]:
    order = LAYOUTS[layout]
    memory = torch.stack(caches).permute(order).contiguous()
    keys, values = memory.permute([order.index(i) for i in range(5)])
    return keys, values


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_in_one_tensor(device: str, layout: str) -> None:
    query, keys, values, *rest = OP.generate_inputs(num_tokens=6, num_seqs=4, device=device)
    caches = in_one_tensor((keys, values), layout)
    expected = check((query, keys, values, *rest))
    assert torch.equal(check((query, *caches, *rest)), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_into_caches_in_one_tensor(device: str, layout: str) -> None:
    write = ir.ops.reshape_and_cache
    key, value, keys, values, slots = write.generate_inputs(num_tokens=20, device=device)
    expected = write.native(key, value, keys, values, slots)
    caches = in_one_tensor((keys, values), layout)
    found = write.using("triton!").maybe_inplace(key, value, *caches, slots)
    for got, wanted, cache in zip(found, expected, caches, strict=True):
        assert torch.equal(got, wanted)
        assert got is cache


def test_amd_gpus_have_one_size_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INTERPRETED", False)
    found = {"shared_memory_per_block": 65_536}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**found)
    )
    read = limits.shared_memory.__wrapped__
    assert read(torch.device("cuda")) == 65_536
    found["shared_memory_per_block_optin"] = 232_448
    assert read(torch.device("cuda")) == 232_448
