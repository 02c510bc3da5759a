"""Blocks have one owner for each use, are counted right, and keep what their names say."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from opweave_engine.kv_cache import (
    NULL_BLOCK,
    BlockPool,
    CacheGroup,
    CacheIntegrityError,
    EveryToken,
    KVCacheManager,
    Retention,
    SequenceState,
    Window,
)
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
    tables = {cache.tables(one) for one in (first, second)}
    assert tables == {((1,),), ((2,),)}
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
