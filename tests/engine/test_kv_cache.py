"""The plain cache returns what was written, sequence by sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.engine.kv_cache import PackedCaches, SequenceCache
from opweave.models import LlamaConfig

CONFIG = LlamaConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)


def cache(capacity: int) -> SequenceCache:
    return SequenceCache(CONFIG, capacity, dtype=torch.float32)


def new(tokens: int) -> Tensor:
    return torch.randn(tokens, 2, 4)


def test_sequences_are_packed_in_order_and_grow() -> None:
    torch.manual_seed(0)
    caches = [cache(1), cache(6), cache(2)]
    history: list[list[tuple[Tensor, Tensor]]] = [[], [], []]  # per sequence, of layer 1
    for counts in ([3, 1, 2], [1, 1, 1], [1, 5, 1]):
        packed = PackedCaches(caches, counts)
        for layer in (0, 1):
            keys, values = new(sum(counts)), new(sum(counts))
            all_keys, all_values = packed.append(layer, keys, values)
        for past, key, value in zip(
            history,
            torch.split_with_sizes(keys, counts),
            torch.split_with_sizes(values, counts),
            strict=True,
        ):
            past.append((key, value))
        packed.advance()
        assert torch.equal(all_keys, torch.cat([k for past in history for k, _ in past]))
        assert torch.equal(all_values, torch.cat([v for past in history for _, v in past]))
    assert [c.num_tokens for c in caches] == [5, 7, 4]
    assert all(c.capacity >= c.num_tokens for c in caches)


def test_one_sequence_is_not_copied() -> None:
    only = cache(8)
    keys, _ = PackedCaches([only], [3]).append(1, new(3), new(3))
    assert keys.data_ptr() == only.write(1, new(3), new(3))[0].data_ptr()


def test_nothing_counts_before_it_is_confirmed() -> None:
    sequence = cache(4)
    PackedCaches([sequence], [2]).append(0, new(2), new(2))
    assert sequence.num_tokens == 0
    packed = PackedCaches([sequence], [1])
    key = new(1)
    assert torch.equal(packed.append(0, key, key)[0], key)
    packed.advance()
    assert sequence.num_tokens == 1


def test_growth_is_geometric() -> None:
    sequence = cache(4)
    allocations = set()
    for _ in range(100):
        packed = PackedCaches([sequence], [1])
        packed.append(0, new(1), new(1))
        packed.advance()
        allocations.add(sequence.capacity)
    assert len(allocations) <= 6
