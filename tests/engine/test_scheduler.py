"""Whatever is scheduled together, every request gets the tokens that it gets alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.simulated_model import VOCABULARY, SimulatedModel, alone
from opweave.config import SchedulerConfig
from opweave.engine.kv import (
    CacheGroup,
    EveryToken,
    KVCacheManager,
    Retention,
    SequenceState,
    Window,
)
from opweave.engine.request import Request
from opweave.engine.scheduler import Scheduled, Scheduler

BLOCK = 4
LONGEST = 40  # tokens of a request, prompt and answer
RETENTIONS: list[list[Retention]] = [
    [EveryToken()],
    [Window(6)],
    [EveryToken(), Window(1), Window(9)],
    [SequenceState()],
    [EveryToken(), SequenceState()],
]


class Run:
    """A scheduler with a simulated model."""

    def __init__(
        self,
        config: SchedulerConfig,
        retentions: Sequence[Retention] = (EveryToken(),),
        num_blocks: int = 64,
        prefix_caching: bool = True,
    ) -> None:
        groups = [CacheGroup(retention, num_blocks) for retention in retentions]
        self.cache = KVCacheManager(groups, BLOCK, enable_prefix_caching=prefix_caching)
        self.scheduler = Scheduler(config, self.cache)
        self.model = SimulatedModel(retentions, BLOCK)
        self.wanted: dict[str, int] = {}
        self.answers: dict[str, list[int]] = {}

    def add(self, name: str, prompt: Sequence[int], count: int, priority: int = 0) -> Request:
        request = Request(name, prompt, priority=priority)
        self.wanted[name] = count
        self.scheduler.add(request)
        return request

    def step(self) -> list[Scheduled]:
        step = self.scheduler.schedule()
        limits = self.scheduler.config
        assert 0 < sum(item.num_tokens for item in step) <= limits.max_num_batched_tokens
        assert all(item.num_tokens > 0 for item in step)
        assert self.scheduler.num_running <= limits.max_num_seqs
        tokens = self.model.forward(step)
        self.scheduler.update(step)
        for item, token in zip(step, tokens, strict=True):
            if token is not None:
                request = item.request
                request.token_ids.append(token)
                if len(request.output_token_ids) == self.wanted[request.request_id]:
                    self.answers[request.request_id] = request.output_token_ids
                    self.scheduler.remove(request.request_id)
        self.cache.check_integrity()
        return step

    def finish(self, most: int = 10_000) -> int:
        for done in range(most):
            if not self.scheduler.has_unfinished:
                self.cache.check_empty()
                return done
            self.step()
        raise AssertionError(f"{self.scheduler.num_waiting} still wait after {most} steps")


prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=LONGEST - 10)
requests = st.lists(
    st.tuples(prompts, st.integers(1, 10), st.integers(0, 2), st.integers(0, 6)),
    min_size=1,
    max_size=10,
)


@given(
    requests=requests,
    retentions=st.sampled_from(RETENTIONS),
    num_blocks=st.integers(LONGEST // BLOCK + 3, 40),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, LONGEST),
    policy=st.sampled_from(["fcfs", "priority"]),
    prefix_caching=st.booleans(),
)
def test_together_as_alone(
    requests: list[tuple[list[int], int, int, int]],
    retentions: list[Retention],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    policy: str,
    prefix_caching: bool,
) -> None:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, policy=policy
    )
    run = Run(config, retentions, num_blocks, prefix_caching)
    for i, (prompt, count, priority, delay) in enumerate(requests):
        for _ in range(delay):
            if run.scheduler.has_unfinished:
                run.step()
        run.add(str(i), prompt, count, priority)
    # Every request computed alone, token by token, and as often again as it was preempted.
    run.finish(most=len(requests) * LONGEST * (1 + len(requests)))
    assert run.answers == {
        str(i): alone(prompt, count) for i, (prompt, count, _, _) in enumerate(requests)
    }


@given(requests=requests, aborted=st.lists(st.integers(0, 9)), num_blocks=st.integers(13, 30))
def test_aborts_leave_nothing_behind(
    requests: list[tuple[list[int], int, int, int]], aborted: list[int], num_blocks: int
) -> None:
    run = Run(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16), num_blocks=num_blocks)
    for i, (prompt, count, _, _) in enumerate(requests):
        run.add(str(i), prompt, count)
    gone = set()
    for i in aborted:
        if run.scheduler.has_unfinished:
            run.step()
        if run.scheduler.remove(str(i)) is not None:
            gone.add(str(i))
        run.cache.check_integrity()
    run.finish()
    assert not gone & run.answers.keys()
    assert gone | run.answers.keys() == set(map(str, range(len(requests))))
    for i, (prompt, count, _, _) in enumerate(requests):
        if str(i) in run.answers:
            assert run.answers[str(i)] == alone(prompt, count)


def counts(step: list[Scheduled]) -> dict[str, int]:
    return {item.request.request_id: item.num_tokens for item in step}


def test_prompts_fill_what_decodes_leave() -> None:
    run = Run(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=10))
    run.add("a", [1] * 8, 9)
    run.add("b", [2] * 20, 3)
    assert counts(run.step()) == {"a": 8, "b": 2}
    assert counts(run.step()) == {"a": 1, "b": 9}
    assert counts(run.step()) == {"a": 1, "b": 9}
    assert counts(run.step()) == {"a": 1, "b": 1}


def test_without_chunks_a_prompt_waits_for_the_budget() -> None:
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=10, enable_chunked_prefill=False
    )
    run = Run(config)
    run.add("a", [1] * 8, 3)
    run.add("b", [2] * 10, 1)
    run.add("c", [3], 1)
    assert [counts(run.step()) for _ in range(5)] == [
        {"a": 8},
        {"a": 1},
        {"a": 1},
        {"b": 10},
        {"c": 1},  # it would have fitted before, but b came first
    ]


def test_first_come_first_served() -> None:
    run = Run(SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64))
    for name, priority in (("a", 5), ("b", 0), ("c", -1)):
        run.add(name, [1, 2], 1, priority)
    assert [list(counts(run.step())) for _ in range(3)] == [["a"], ["b"], ["c"]]


def test_priorities_go_first() -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, policy="priority")
    run = Run(config)
    for name, priority in (("a", 5), ("b", 0), ("c", -1), ("d", 0)):
        run.add(name, [1, 2], 1, priority)
    assert [list(counts(run.step())) for _ in range(4)] == [["c"], ["b"], ["d"], ["a"]]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_last_one_loses_its_blocks(policy: str) -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, policy=policy)
    run = Run(config, num_blocks=6)
    first = run.add("a", [1] * 11, 12, priority=1)
    second = run.add("b", [2] * 11, 12, priority=0)
    run.finish()
    loser, winner = (second, first) if policy == "fcfs" else (first, second)
    assert (loser.num_preemptions > 0, winner.num_preemptions) == (True, 0)
    assert run.scheduler.num_preemptions == loser.num_preemptions
    assert list(run.answers) == [winner.request_id, loser.request_id]


def test_a_stream_of_short_requests_does_not_starve_a_long_one() -> None:
    run = Run(SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8), num_blocks=10)
    run.add("short 0", [1], 2)
    run.add("long", [3] * 30, 10)
    for i in range(1, 60):
        run.add(f"short {i}", [i % VOCABULARY], 2)
        run.step()
    assert run.answers["long"] == alone([3] * 30, 10)
    run.finish()


def test_a_prefix_is_computed_once() -> None:
    run = Run(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64))
    prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
    first = run.add("a", prompt, 5)
    run.finish()
    again = run.add("b", prompt, 5)
    longer = run.add("c", [*prompt, *run.answers["a"]], 5)
    other = run.add("d", [2, *prompt[1:]], 5)
    whole = run.add("e", prompt[:8], 1)
    assert counts(run.step()) == {"b": 2, "c": 3, "d": 10, "e": 4}
    cached = [r.num_cached_tokens for r in (first, again, longer, other, whole)]
    assert cached == [0, 8, 12, 0, 4]  # never all of it: the last token must be computed
    run.finish()
    assert (run.scheduler.prefix_queries, run.scheduler.prefix_hits) == (10 + 10 + 15 + 10 + 8, 24)
