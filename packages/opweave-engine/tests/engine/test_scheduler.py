"""Every request gets the same tokens alone and batched with any other requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.simulated_model import VOCABULARY, SimulatedModel, alone
from opweave.config import SchedulerConfig
from opweave_engine.kv_cache import (
    CacheGroup,
    EveryToken,
    KVCacheManager,
    Retention,
    SequenceState,
    Window,
)
from opweave_engine.request import Request
from opweave_engine.scheduler import Scheduled, Scheduler

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
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}

    def add(self, name: str, prompt: Sequence[int], count: int, priority: int = 0) -> Request:
        request = Request(name, prompt, priority=priority)
        self.wanted[name], self.requests[name] = count, request
        self.scheduler.add(request)
        return request

    def remove(self, name: str) -> Request | None:
        self.requests.pop(name, None)
        return self.scheduler.remove(name)

    @property
    def first(self) -> Request:
        """Who never waits: of the highest priority that there is, the one that came first."""
        by_priority = self.scheduler.config.policy == "priority"
        return min(self.requests.values(), key=lambda r: (r.priority * by_priority, r.arrival))

    def step(self) -> list[Scheduled]:
        step = self.scheduler.schedule()
        limits = self.scheduler.config
        assert 0 < sum(item.num_tokens for item in step) <= limits.max_num_batched_tokens
        assert all(item.num_tokens > 0 for item in step)
        assert self.scheduler.num_running <= limits.max_num_seqs
        assert self.first in [item.request for item in step]
        tokens = self.model.forward(step)
        self.scheduler.update(step)
        for item, token in zip(step, tokens, strict=True):
            if token is not None:
                request = item.request
                request.token_ids.append(token)
                if len(request.output_token_ids) == self.wanted[request.request_id]:
                    self.answers[request.request_id] = request.output_token_ids
                    self.remove(request.request_id)
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
        if run.remove(str(i)) is not None:
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


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "cbda")])
def test_the_order_of_the_policy(policy: str, order: str) -> None:
    run = Run(SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, policy=policy))
    for name, priority in (("a", 5), ("b", 0), ("c", -1), ("d", 0)):
        run.add(name, [1, 2], 1, priority)
    assert [list(counts(run.step())) for _ in range(4)] == [[name] for name in order]


def test_what_is_refused_is_not_kept() -> None:
    run = Run(SchedulerConfig(policy="priority"))
    run.add("a", [1, 2], 1)
    with pytest.raises(TypeError):
        run.scheduler.add(Request("b", [1, 2], priority=None))  # type: ignore[arg-type]
    run.finish()
    assert run.scheduler.num_waiting == 0


def priority(
    max_num_seqs: int = 4, budget: int = 64, num_blocks: int = 64, chunks: bool = True
) -> Run:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        policy="priority",
        enable_chunked_prefill=chunks,
    )
    return Run(config, num_blocks=num_blocks)


@given(requests=requests, num_blocks=st.integers(13, 40), max_num_seqs=st.integers(1, 6))
def test_among_equals_priorities_change_nothing(
    requests: list[tuple[list[int], int, int, int]], num_blocks: int, max_num_seqs: int
) -> None:
    histories = []
    for policy in ("fcfs", "priority"):
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=12, policy=policy
        )
        run, history = Run(config, num_blocks=num_blocks), []
        for i, (prompt, count, _, delay) in enumerate(requests):
            run.add(str(i), prompt, count, 7)
            history += [counts(run.step()) for _ in range(delay) if run.scheduler.has_unfinished]
        while run.scheduler.has_unfinished:
            history.append(counts(run.step()))
        histories.append(history)
    assert histories[0] == histories[1]


@given(requests=requests)
def test_with_one_place_the_highest_priority_has_it(
    requests: list[tuple[list[int], int, int, int]],
) -> None:
    run = priority(max_num_seqs=1, budget=8, num_blocks=12)
    for i, (prompt, count, number, delay) in enumerate(requests):
        run.add(str(i), prompt, count, number)
        for _ in range(delay):
            if run.scheduler.has_unfinished:
                highest = min(request.priority for request in run.requests.values())
                assert [item.request.priority for item in run.step()] == [highest]
    run.finish()
    # Each of them is the cause once at most.
    assert run.scheduler.num_preemptions < len(requests)


def test_a_place_is_taken_from_lower_priority_only() -> None:
    run = priority(max_num_seqs=2)
    for name, number in (("a", 1), ("b", 2)):
        run.add(name, [1, 2], 9, number)
    run.step()
    run.add("equal", [3], 1, 2)
    assert counts(run.step()) == {"a": 1, "b": 1}
    run.add("higher", [4], 1, 0)
    assert counts(run.step()) == {"a": 1, "higher": 1}
    assert counts(run.step()) == {"a": 1, "b": 4}  # which came before its equal
    run.finish()
    assert run.scheduler.num_preemptions == 1


def test_as_many_lose_their_blocks_as_must() -> None:
    run = priority(num_blocks=8)
    numbers = {"a": 1, "b": 1, "c": 3, "d": 2}
    added = [run.add(name, [number] * 7, 2, number) for name, number in numbers.items()]
    run.step()
    run.add("urgent", [5] * 15, 1, 0)
    assert counts(run.step()) == {"a": 1, "b": 1, "urgent": 15}
    assert [request.num_preemptions for request in added] == [0, 0, 1, 1]
    run.finish()
    assert list(run.answers) == ["a", "b", "urgent", "d", "c"]


def test_nobody_loses_blocks_in_vain() -> None:
    run = priority(num_blocks=8)
    first = run.add("a", [1] * 19, 2, 0)
    second = run.add("b", [2] * 7, 2, 2)
    run.step()
    run.add("c", [3] * 15, 1, 1)  # with those of "b", there are three blocks for it
    assert counts(run.step()) == {"a": 1, "b": 1}
    run.finish()
    assert first.num_preemptions == second.num_preemptions == 0


def test_blocks_that_others_hold_are_not_counted_as_room() -> None:
    run = priority(num_blocks=9)
    prompt = [1, 2, 3, 4] * 4
    run.add("a", [*prompt, 5], 9, 1)
    run.step()
    shares = run.add("b", [*prompt, 6], 9, 2)
    run.step()
    run.add("c", [3] * 19, 1, 0)  # four blocks of "b" are those of "a", too
    assert counts(run.step()) == {"c": 19}
    assert shares.num_preemptions == 1
    run.finish()


def test_a_prompt_of_higher_priority_comes_before_the_rest_of_another() -> None:
    run = priority(budget=10)
    run.add("a", [1] * 30, 2, 1)
    run.step()
    run.add("b", [2] * 12, 1, 1)
    run.add("c", [3] * 12, 2, 0)
    assert [counts(run.step()) for _ in range(3)] == [{"c": 10}, {"c": 2, "a": 8}, {"c": 1, "a": 9}]


def test_without_chunks_the_budget_of_lower_priority_is_taken() -> None:
    run = priority(budget=10, chunks=False)
    for name, number in (("a", 0), ("b", 1), ("c", 1)):
        run.add(name, [number] * 3, 5, number)
    run.step()
    run.add("d", [5] * 10, 1, 0)
    assert counts(run.step()) == {"a": 1, "b": 1, "c": 1}  # without "b" and "c", 9 are left
    run.add("e", [5] * 8, 1, -1)
    assert counts(run.step()) == {"a": 1, "b": 1, "e": 8}
    run.finish()


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
