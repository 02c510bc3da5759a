"""How memory becomes blocks, and what is said where it is too little."""

from __future__ import annotations

from typing import Any

import pytest

from opweave.config import CacheConfig, EngineConfig, SchedulerConfig
from opweave.ir.errors import SettingError
from opweave_engine.errors import CacheSizeError
from opweave_engine.kv_cache import (
    UNBOUNDED_MODEL_LEN,
    CachePlan,
    EveryToken,
    LayerGroup,
    Retention,
    SequenceState,
    Window,
    plan_cache,
)

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
    assert "holds 160 tokens, and so much is the context" in warning.getMessage()
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
