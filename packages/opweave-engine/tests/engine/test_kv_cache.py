"""Blocks have one owner for each use, are counted right, and keep what their names say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from torch import nn

from opweave.config import CacheConfig, EngineConfig, SchedulerConfig
from opweave.ir.errors import SettingError
from opweave.layers import DuplicateLayerError, StatefulLayer
from opweave_engine.attention import (
    FullAttentionSpec,
    LatentAttentionSpec,
    SlidingWindowSpec,
    cache_specs,
)
from opweave_engine.errors import CacheSizeError
from opweave_engine.kv_cache import (
    NULL_BLOCK,
    UNBOUNDED_MODEL_LEN,
    BlockPool,
    CacheGroup,
    CacheIntegrityError,
    CachePlan,
    EveryToken,
    KVCacheManager,
    LayerGroup,
    Retention,
    SequenceState,
    Window,
    plan_cache,
)
from opweave_engine.models import Attention, LatentAttention
from opweave_engine.request import Request

BLOCK = 4
WINDOW = 6


class Caches(RuleBasedStateMachine):
    """Requests come, grow, share, and go; a dict says what each block holds."""

    running = Bundle("running")

    @initialize(
        retentions=st.sampled_from([[EveryToken()], [EveryToken(), Window(WINDOW)]]),
        num_blocks=st.integers(8, 20),
    )
    def build(self, retentions: list[Retention], num_blocks: int) -> None:
        groups = [CacheGroup(retention, num_blocks) for retention in retentions]
        self.retentions, self.num_blocks = retentions, num_blocks
        self.cache = KVCacheManager(groups, BLOCK)
        self.content: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self.alive: list[Request] = []
        self.names = 0

    @rule(target=running, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def begin(self, tokens: list[int]) -> Request:
        self.names += 1
        request = Request(str(self.names), tokens)
        prefix = self.cache.find_prefix(request)
        assert prefix % BLOCK == 0
        assert prefix < len(tokens)
        count = len(tokens) - prefix
        fits = self.cache.fits(request, count, prefix)
        assert self.cache.allocate(request, count, prefix) == fits
        if fits:
            self.alive.append(request)
            request.num_computed_tokens = prefix
            self.compute(request, count)
        return request

    @rule(request=running, count=st.integers(1, 9), bit=st.integers(0, 1))
    def grow(self, request: Request, count: int, bit: int) -> None:
        if request not in self.alive:
            return
        before = self.cache.tables(request)
        request.token_ids += [bit] * count
        if self.cache.allocate(request, count):
            self.compute(request, count)
        else:
            del request.token_ids[-count:]
            after = self.cache.tables(request)
            assert list(map(len, before)) == list(map(len, after)), "all or nothing"

    @rule(request=consumes(running))
    def end(self, request: Request) -> None:
        self.cache.free(request)
        if request in self.alive:
            self.alive.remove(request)

    @rule(request=running)
    def forget(self, request: Request) -> None:
        self.cache.forget(request)
        assert self.cache.find_prefix(Request("same", [*request.token_ids, 0])) == 0

    def compute(self, request: Request, count: int) -> None:
        start, tables = request.num_computed_tokens, self.cache.tables(request)
        for position in range(start, start + count):
            for group, table in enumerate(tables):
                slot = group, table[position // BLOCK], position % BLOCK
                assert slot[1] != NULL_BLOCK
                self.content[slot] = tuple(request.token_ids[: position + 1])
        request.num_computed_tokens += count
        self.cache.commit(request)

    @invariant()
    def everyone_reads_their_own_tokens(self) -> None:
        for request in getattr(self, "alive", []):
            end = request.num_computed_tokens
            tables = self.cache.tables(request)
            for group, (retention, table) in enumerate(zip(self.retentions, tables, strict=True)):
                # The inputs of the next token.
                first = max(0, end + 1 - WINDOW) if isinstance(retention, Window) else 0
                for position in range(first, end):
                    slot = group, table[position // BLOCK], position % BLOCK
                    assert self.content[slot] == tuple(request.token_ids[: position + 1])

    @invariant()
    def all_blocks_are_accounted_for(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for request in self.alive:
                self.cache.free(request)
            self.cache.check_empty()
            assert self.cache.usage == 0


TestCaches = Caches.TestCase
TestCaches.settings = settings(max_examples=40, stateful_step_count=30)


def request(count: int, name: str = "a") -> Request:
    return Request(name, range(count))


def test_windows_let_go_of_what_nobody_reads() -> None:
    cache = KVCacheManager([CacheGroup(Window(WINDOW), 4)], BLOCK)
    one = request(BLOCK)
    assert cache.allocate(one, BLOCK)
    for _ in range(100):  # many times what the cache holds
        one.num_computed_tokens = one.num_tokens
        cache.commit(one)
        one.token_ids.append(0)
        assert cache.allocate(one, 1)
        (table,) = cache.tables(one)
        assert sum(block != NULL_BLOCK for block in table) <= 3
    cache.free(one)
    cache.check_empty()


def test_a_state_takes_one_slot_whatever_the_length() -> None:
    cache = KVCacheManager([CacheGroup(SequenceState(), 2)], BLOCK)
    assert not cache.shares_prefixes
    first, second, third = (request(50, name) for name in "abc")
    assert cache.allocate(first, 7)
    assert cache.allocate(second, 50)
    assert not cache.allocate(third, 1)
    first.num_computed_tokens = 7
    assert cache.allocate(first, 43)
    assert cache.usage == 1
    tables = [tuple(table) for one in (first, second) for table in cache.tables(one)]
    assert sorted(tables) == [(1,), (2,)]
    cache.free(second)
    assert cache.allocate(third, 1)


def test_blocks_that_were_used_last_are_kept_longest() -> None:
    cache = KVCacheManager([CacheGroup(EveryToken(), 4)], BLOCK)
    old, new = Request("old", [1] * 8), Request("new", [2] * 8)
    for one in (old, new):
        assert cache.allocate(one, 8)
        one.num_computed_tokens = 8
        cache.commit(one)
    cache.free(old)
    cache.free(new)
    other = Request("other", [3] * 8)
    assert cache.allocate(other, 8)
    assert cache.find_prefix(Request("again", [1] * 9)) == 0
    assert cache.find_prefix(Request("again", [2] * 9)) == 8
    # The end of a prefix goes before its beginning.
    assert cache.allocate(Request("one", [4] * 4), 4)
    assert cache.find_prefix(Request("again", [2] * 9)) == 4


def test_what_is_forgotten_is_found_no_more() -> None:
    cache = KVCacheManager([CacheGroup(EveryToken(), 6), CacheGroup(Window(WINDOW), 6)], BLOCK)
    kept, bad = Request("kept", [1] * 8), Request("bad", [1] * 4 + [2] * 8)
    for one in (kept, bad):
        prefix = cache.find_prefix(one)
        assert cache.allocate(one, one.num_tokens - prefix, prefix)
        one.num_computed_tokens = one.num_tokens
        cache.commit(one)
    blocks = cache.tables(bad)[0]
    cache.free(bad)
    cache.forget(bad)
    # The block that both have is among them: nobody knows which one is wrong.
    assert cache.find_prefix(Request("again", [*bad.token_ids, 0])) == 0
    assert cache.find_prefix(Request("again", [1] * 9)) == 0
    cache.check_integrity()
    assert cache.tables(kept)[0][0] == blocks[0]
    # Blocks without content are evicted first.
    other = Request("other", [3] * 8)
    assert cache.allocate(other, 8)
    assert set(cache.tables(other)[0]) == set(blocks[1:])


def test_the_check_finds_what_is_wrong() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.check([blocks])
    with pytest.raises(CacheIntegrityError, match="Block 2 is in 0 tables, counts 1 holders"):
        pool.check([blocks[:1]])
    with pytest.raises(CacheIntegrityError, match="Block 1 is in 2 tables"):
        pool.check([blocks, blocks[:1]])
    with pytest.raises(CacheIntegrityError, match=r"Block 3 is in 1 tables, counts 0.* is free"):
        pool.check([[*blocks, 3]])
    pool._free[1] = None
    with pytest.raises(CacheIntegrityError, match=r"Block 1 .*and is free"):
        pool.check([blocks])
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.name(block, b"x")
    pool._by_hash[b"y"] = block
    with pytest.raises(CacheIntegrityError, match="Hashes"):
        pool.check([[block]])
    cache = KVCacheManager([CacheGroup(EveryToken(), 4)], BLOCK)
    assert cache.allocate(request(3), 3)
    with pytest.raises(CacheIntegrityError, match="These hold blocks: a"):
        cache.check_empty()


# How memory becomes blocks, and what is said where it is too little


BYTES = 1000  # of a block
CONTEXT = 256


def plan(
    *retentions: Retention,
    memory: int = 10**9,
    free: int = 10**9,
    context: int | None = CONTEXT,
    cache: CacheConfig | None = None,
    **limits: Any,
) -> CachePlan:
    groups = [LayerGroup(retention, (i,), BYTES) for i, retention in enumerate(retentions)]
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **limits}
    cache = cache or CacheConfig(block_size=16)
    return plan_cache(groups, cache, SchedulerConfig(**limits), context, memory, free)


def test_no_more_than_all_sequences_at_their_longest() -> None:
    assert plan(EveryToken()) == CachePlan((8 * CONTEXT // 16,), CONTEXT, 16)


@pytest.mark.parametrize("memory", [17 * BYTES, 60_500, 100_000])
@pytest.mark.parametrize("retentions", [[EveryToken()], [EveryToken(), Window(20)]])
def test_the_memory_is_used_and_not_exceeded(memory: int, retentions: list[Retention]) -> None:
    found = plan(*retentions, memory=memory)
    used = sum(count + 1 for count in found.num_blocks) * BYTES
    assert memory - len(retentions) * BYTES < used <= memory


def test_windows_get_what_sequences_keep() -> None:
    every, window = plan(EveryToken(), Window(20)).num_blocks
    assert every == 128
    assert window == 8 * (2 + 2) + 4  # for each sequence, and what a step adds


def test_states_get_a_slot_for_each_sequence() -> None:
    assert plan(SequenceState()).num_blocks == (8,)
    assert plan(SequenceState(), memory=5 * BYTES).num_blocks == (4,)
    assert plan(EveryToken(), SequenceState()).num_blocks == (128, 8)
    assert plan(SequenceState(), context=None).max_model_len == UNBOUNDED_MODEL_LEN
    with pytest.raises(CacheSizeError, match="states of one sequence take 1000 bytes"):
        plan(SequenceState(), memory=1500)


def test_the_context_is_cut_to_what_the_cache_holds(caplog: pytest.LogCaptureFixture) -> None:
    found = plan(EveryToken(), memory=11 * BYTES)
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "holds 160 tokens, so that max_model_len is reduced to that" in warning.getMessage()
    assert (found.num_blocks, found.max_model_len) == ((10,), 160)
    assert plan(EveryToken(), max_model_len=100).max_model_len == 100


@pytest.mark.parametrize(("options", "message"), [
    ({"max_model_len": 300}, "max_model_len=300 is more than the model's context of 256"),
    ({"max_model_len": 200, "memory": 9 * BYTES},
     "9000 bytes of memory hold 8 blocks .* takes 13, which are 14000 bytes"),
    ({"memory": 10**12, "free": 128 * BYTES},
     "memory_bytes=1000000000000, the cache takes 129000 bytes, but 128000 .* are free"),
    ({"cache": CacheConfig(block_size=16, num_blocks=99), "free": 99 * BYTES},
     "num_blocks=99, the cache takes 100000 bytes, but 99000 .* serve --kv-cache-memory"),
    ({"memory": 500}, "500 bytes of memory hold 0 blocks"),
    ({"max_model_len": 200, "cache": CacheConfig(block_size=16, num_blocks=5)},
     "num_blocks=5 of 16 tokens do not hold a sequence of 200 .* at least 13 blocks"),
    ({"enable_chunked_prefill": False}, "a prompt of max_model_len=256 .*=64"),
])  # fmt: skip
def test_what_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheSizeError, match=message):
        plan(EveryToken(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CacheConfig(block_size=0), "block_size=0 must be a positive integer"),
        (lambda: CacheConfig(num_blocks=-1), "num_blocks=-1 must be a positive integer, or None"),
        (lambda: CacheConfig(memory_utilization=1.5), "memory_utilization=1.5 must be a number"),
        (lambda: CacheConfig(enable_prefix_caching=1), "must be True or False"),  # type: ignore[arg-type]
        (lambda: CacheConfig(num_blocks=1, memory_bytes=1), "give one of them"),
        (lambda: SchedulerConfig(max_num_seqs=True), "max_num_seqs=True must be a positive"),
        (lambda: SchedulerConfig(policy="fcsf"), "'fcsf' must be one of fcfs, priority.*fcfs"),
        (
            lambda: SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7),
            "max_num_batched_tokens=7 is below max_num_seqs=8",
        ),
        (lambda: EngineConfig(load_format="dumy"), "load_format='dumy'.*auto, dummy.*'dummy'"),  # type: ignore[arg-type]
        (lambda: EngineConfig(cache={"block_size": 16}), "should be a CacheConfig"),  # type: ignore[arg-type]
    ],
)
def test_wrong_settings(make: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()


# Every layer of a model has a place of its own in the cache


class Recurrent(StatefulLayer):
    """A layer with a state."""

    def __init__(self) -> None:
        super().__init__("mixer")
        self.state_shapes = {"conv": (3,)}


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "full": lambda layer: Attention(layer, 4, 2, 8),
    "window": lambda layer: Attention(layer, 4, 2, 8, window=5),
    "latent": lambda layer: LatentAttention(layer, 4, 24),
}


def test_what_is_kept_is_found_by_the_index() -> None:
    model = nn.ModuleList(build(i) for i, build in enumerate(LAYERS.values()))
    assert cache_specs(model, torch.bfloat16) == {
        0: FullAttentionSpec(2, 8, 8, torch.bfloat16),
        1: SlidingWindowSpec(2, 8, 8, torch.bfloat16, 5),
        2: LatentAttentionSpec(24, torch.bfloat16),
    }


@pytest.mark.parametrize("kinds", [*combinations_with_replacement(LAYERS, 2)])
def test_two_layers_of_one_index_are_named(kinds: tuple[str, str]) -> None:
    first, second = (LAYERS[kind](3) for kind in kinds)
    model = nn.ModuleDict({"first": first, "second": second})
    message = r"^first and second are both layer 3 to the cache, .* index or prefix of its own\.$"
    with pytest.raises(DuplicateLayerError, match=message):
        cache_specs(model, torch.float32)


def test_two_layers_with_states_of_one_name_are_named() -> None:
    model = nn.ModuleList(Recurrent() for _ in range(2))
    with pytest.raises(DuplicateLayerError, match=r"^0 and 1 are both layer 'mixer' to the cache"):
        cache_specs(model, torch.float32)
