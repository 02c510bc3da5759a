"""Acme's parts of the engine, each alone. In an engine, opweave's tests/acme runs them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import acme_device
import pytest
import torch
from acme_device.engine.attention import AcmeAttention
from acme_device.engine.http import router
from acme_device.engine.model_runner import AcmeModelRunner
from acme_device.engine.sampler import AcmeSampler
from acme_device.engine.scheduler import AcmeScheduler
from acme_device.engine.stat_logger import AcmeStatLogger
from acme_device.engine.usage import Usage, usage
from acme_device.platform import AcmePlatform
from torch import Tensor

from opweave import ir, platforms
from opweave.config import EngineConfig, ParallelConfig, SchedulerConfig
from opweave.platforms import CpuPlatform
from opweave_engine import EngineStats, SamplingParams
from opweave_engine.attention import (
    FullAttentionSpec,
    LatentAttentionSpec,
    PagedAttention,
    SequenceBatch,
)
from opweave_engine.decode_graphs import SequenceStep
from opweave_engine.errors import NonFiniteLogitsError, UnsupportedCacheError
from opweave_engine.kv_cache import CacheGroup, EveryToken, KVCacheManager
from opweave_engine.metrics import StatCounter
from opweave_engine.request import Request
from opweave_engine.runner import ModelRunner
from opweave_engine.sampling.sampler import Sampled, Sampler, SamplingRequest

BLOCK = 16


@pytest.fixture(autouse=True)
def _from_zero() -> None:
    vars(usage).update(vars(Usage()))


@pytest.mark.parametrize("budget", [5, 16, 20, 37, 100])
def test_parts_of_prompts_end_with_a_block(budget: int) -> None:
    cache = KVCacheManager([CacheGroup(EveryToken(), 16)], BLOCK)
    scheduler = AcmeScheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget), cache)
    requests = [Request(str(n), [n] * n) for n in (70, 40, 3)]
    computed = dict.fromkeys(requests, 0)
    for request in requests:
        scheduler.add(request)
    while any(computed[request] < request.num_tokens for request in requests):
        step = [s for s in scheduler.schedule() if computed[s.request] < s.request.num_tokens]
        assert step
        for item in step:
            assert len(item.tables[0]) * BLOCK >= computed[item.request] + item.num_tokens
            computed[item.request] += item.num_tokens
            end = computed[item.request]
            assert item.is_complete or end % BLOCK == 0 or item.num_tokens < BLOCK
        scheduler.update(step)
        for item in step:
            if computed[item.request] == item.request.num_tokens:
                scheduler.remove(item.request.request_id)
        cache.check_integrity()
    cache.check_empty()
    assert usage.aligned_parts > 0


def steps_of(*lengths: int) -> list[SequenceStep]:
    sampling = SamplingRequest(SamplingParams(), 0)
    return [SequenceStep(str(i), [i] * n, 0, ((1,),), sampling) for i, n in enumerate(lengths)]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> AcmeModelRunner:
    """A runner without a model: the next token is the sequence's length, and NaN for 7."""

    def execute(self: ModelRunner, steps: Sequence[SequenceStep]) -> list[Sampled]:
        assert len({len(step.token_ids) == 1 for step in steps}) == 1
        wrong = [row for row, step in enumerate(steps) if len(step.token_ids) == 7]
        if wrong:
            raise NonFiniteLogitsError("no numbers", wrong)
        return [Sampled(len(step.token_ids)) for step in steps]

    monkeypatch.setattr(ModelRunner, "execute", execute)
    return object.__new__(AcmeModelRunner)


@pytest.mark.parametrize(
    ("lengths", "decodes", "prompts"), [((1, 1), 1, 0), ((4,), 0, 1), ((1, 1, 3, 2), 1, 1)]
)
def test_decodes_and_prompts_run_apart(
    runner: AcmeModelRunner, lengths: tuple[int, ...], decodes: int, prompts: int
) -> None:
    sampled = runner.execute(steps_of(*lengths))
    assert [one.token_id for one in sampled] == list(lengths)
    assert (usage.decode_forwards, usage.prompt_forwards) == (decodes, prompts)


def test_rows_that_fail_are_those_of_the_step(runner: AcmeModelRunner) -> None:
    with pytest.raises(NonFiniteLogitsError) as error:
        runner.execute(steps_of(1, 1, 3, 7))
    assert error.value.rows == (3,)


def batch(lengths: Sequence[int], new: Sequence[int]) -> SequenceBatch:
    """Sequences of two blocks each, whose last tokens are new."""
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0)], dtype=torch.int32)
    slots = [
        (1 + 2 * s) * BLOCK + place
        for s, (length, count) in enumerate(zip(lengths, new, strict=True))
        for place in range(length - count, length)
    ]
    return SequenceBatch(
        query_starts=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        key_starts=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        block_tables=torch.arange(1, 1 + 2 * len(lengths), dtype=torch.int32).view(-1, 2),
        slot_mapping=torch.tensor(slots),
        num_decodes=sum(count == 1 for count in new),
    )


def moved(found: SequenceBatch) -> SequenceBatch:
    fields = {name: getattr(found, name) for name in SequenceBatch.__slots__}
    return SequenceBatch(
        **{k: v.to("acme") if isinstance(v, Tensor) else v for k, v in fields.items()}
    )


@pytest.mark.parametrize(("key_size", "value_size"), [(8, 8), (8, 24)])
def test_attends_as_opweave_does_and_in_place(key_size: int, value_size: int) -> None:
    spec = FullAttentionSpec(2, key_size, value_size, torch.float32)
    own = AcmeAttention(spec, 5, BLOCK, torch.device("acme"))
    other = PagedAttention(spec, 5, BLOCK, torch.device("cpu"))
    address = own.keys.data_ptr()
    for lengths, new in (((20, 5), (20, 5)), ((21, 17), (1, 12))):
        step, count = batch(lengths, new), sum(new)
        query, key, value = (
            torch.randn(count, heads, size)
            for heads, size in ((4, key_size), (2, key_size), (2, value_size))
        )
        expected = other.forward(step, query, key, value, 0.3, 9, None)
        on_device = [x.to("acme") for x in (query, key, value)]
        acme_device.reset_fallbacks()
        found = own.forward(moved(step), *on_device, 0.3, 9, None)
        assert acme_device.fallbacks() == {}
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)
    assert own.keys.data_ptr() == address
    assert own.values.data_ptr() == address + key_size * own.keys.element_size()
    assert torch.equal(own.keys[0].cpu(), torch.zeros(2, BLOCK, key_size))
    assert usage.attention_calls == 2


def test_refuses_what_it_cannot_keep() -> None:
    spec = FullAttentionSpec(2, 8, 8, torch.float32)
    with pytest.raises(UnsupportedCacheError, match="multiple of 16 tokens, not 24"):
        AcmeAttention(spec, 5, 24, torch.device("acme"))
    with pytest.raises(UnsupportedCacheError, match="keys and values only"):
        AcmeAttention(LatentAttentionSpec(8, torch.float32), 5, 16, torch.device("acme"))


def test_writes_only_to_caches_without_overlaps() -> None:
    rows = torch.zeros(3, 2, BLOCK, 12, device="acme")
    token = torch.zeros(1, 2, 6, device="acme")
    slots = torch.tensor([BLOCK]).to("acme")

    def provider(cache: Tensor) -> str:
        return ir.ops.reshape_and_cache.dispatch(token, token, cache, cache, slots).provider

    assert provider(rows[..., :6]) == provider(rows[..., 6:]) == "acme"
    assert provider(rows[..., :6].contiguous()) == "acme"
    assert provider(rows[:, :, :1, :6].expand(3, 2, BLOCK, 6)) == "native"
    assert provider(rows[:, :1, :, :6]) == "native"  # gaps


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chooses_what_opweave_chooses(temperature: float) -> None:
    logits = torch.randn(3, 50)
    params = SamplingParams(temperature=temperature, top_k=20, top_p=0.9, logprobs=2)
    requests = [SamplingRequest(params, seed) for seed in range(3)]
    on_device = logits.to("acme")
    acme_device.reset_fallbacks()
    assert AcmeSampler()(on_device, requests) == Sampler()(logits, requests)
    assert acme_device.fallbacks() == {}
    assert usage.sampled_tokens == 3


def stats_after(*seconds: float) -> EngineStats:
    counter = StatCounter()
    for each in seconds:
        counter.step(each, 1)
    return counter.stats()


def test_the_stat_logger_watches_the_device(caplog: pytest.LogCaptureFixture) -> None:
    logger = AcmeStatLogger(EngineConfig())
    held = torch.zeros(2**20, device="acme")
    logger.record(stats_after(0.5))
    del held
    logger.record(stats_after(0.5, 0.25))
    AcmeStatLogger(EngineConfig()).record(stats_after(1.0))  # another engine's
    assert usage.busy_seconds == 1.75
    assert usage.peak_bytes >= 2**22 > torch.acme.memory_allocated()
    with caplog.at_level("INFO", "opweave.acme"):
        logger.shutdown()
    assert "busy for 0.8 of" in caplog.text


class Engine:
    model_name = "tiny"


def routes() -> dict[str, Any]:
    return {route.path: route.endpoint for route in router(Engine()).routes}


def test_the_route_tells_of_the_device() -> None:
    usage.decode_forwards = 3
    found = routes()["/acme/device"]()
    assert (found["device"], found["model"], found["decode_forwards"]) == ("acme:0", "tiny", 3)
    assert 0 < found["memory"]["free"] <= found["memory"]["total"]


def test_on_another_platform_nothing_is_watched_or_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "current_platform", CpuPlatform(), raising=False)
    AcmeStatLogger(EngineConfig()).record(stats_after(1.0))
    assert usage.busy_seconds == 0
    assert routes() == {}


def test_more_ranks_than_devices_are_refused() -> None:
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2))
    with pytest.raises(acme_device.AcmeError, match=r"there are 1\. ACME_DEVICES=2 makes more"):
        AcmePlatform().check_and_update_config(config)
