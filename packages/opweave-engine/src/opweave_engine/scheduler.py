"""Continuous batching: chooses the tokens that each step computes."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from opweave.config import SchedulerConfig
from opweave_engine.kv_cache import KVCacheManager
from opweave_engine.request import Request


class Scheduled(NamedTuple):
    """The tokens of one request that a step computes.

    Attributes:
        request: the request.
        num_tokens: the number of tokens, from the first uncomputed one.
        tables: the block table of each group of layers.
    """

    request: Request
    num_tokens: int
    tables: tuple[Sequence[int], ...]

    @property
    def is_complete(self) -> bool:
        """Whether the step computes all tokens, so that the next one can be sampled."""
        return self.num_tokens == self.request.num_uncomputed_tokens


class _StepPlan:
    """The token count of each request, the remaining budget, and the preempted requests."""

    def __init__(self, budget: int) -> None:
        self.budget, self.counts = budget, dict[Request, int]()
        self.dropped: set[Request] = set()

    def add(self, request: Request, count: int) -> None:
        self.counts[request] = count
        self.budget -= count


class Scheduler:
    """Continuous batching: fills every step up to a token budget.

    Decodes come first, one token each. The rest of the budget goes to prefills, in chunks if
    needed. If memory runs out, the last request in the policy's order is preempted: its blocks are
    freed, and it is recomputed later. The first request always makes progress, so all requests
    finish. A request is admitted only if the free blocks hold all of its tokens so far, and not in
    the step that preempted it.

    With the policy ``"priority"``, a request does not wait for requests of lower priority. Its
    prompt comes first, and if blocks are short, the last requests of lower priority are preempted,
    if this suffices. Requests of equal priority do not preempt each other, which would alternate.

    Args:
        config: the limits and the policy.
        cache: allocates blocks to requests.

    Attributes:
        num_preemptions: the number of preemptions.
        prefix_queries, prefix_hits: the numbers of tokens that were looked up and found in the
            prefix cache at admission.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        self.config, self.cache = config, cache
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._by_id: dict[str, Request] = {}
        self.num_preemptions = self.prefix_queries = self.prefix_hits = 0

    @property
    def num_running(self) -> int:
        """The number of running requests, which hold KV blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The number of waiting requests, which hold no KV blocks."""
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether there are unfinished requests."""
        return bool(self._by_id)

    def add(self, request: Request) -> None:
        """Add *request* to the waiting queue. The cache must be able to hold it alone."""
        insort(self._waiting, request, key=self._order)  # first: what it refuses is not kept
        self._by_id[request.request_id] = request

    def remove(self, request_id: str) -> Request | None:
        """Remove a request that has finished or was aborted, and free its blocks.

        Returns:
            The request; None if the name is unknown.
        """
        request = self._by_id.pop(request_id, None)
        if request is not None:
            self.cache.free(request)
            queue = self._running if request in self._running else self._waiting
            queue.remove(request)
        return request

    def schedule(self) -> list[Scheduled]:
        """Return the next step, which is not empty if there are requests."""
        plan = _StepPlan(self.config.max_num_batched_tokens)
        running = [(request, request.num_uncomputed_tokens) for request in self._running]
        for request in [request for request, count in running if count == 1]:
            self._continue(request, plan)
        for request in [request for request, count in running if count > 1]:
            self._admit(plan, before=request)
            self._continue(request, plan)
        self._admit(plan)
        return [
            Scheduled(request, count, self.cache.tables(request))
            for request, count in plan.counts.items()
        ]

    def ahead(self, step: Sequence[Scheduled]) -> list[Scheduled]:
        """Return the step after one that is running, before its tokens are known.

        Args:
            step: the items of the running step that sample a token and go on after it; the other
                running requests end with that step.

        Returns:
            One token of each of these; nothing if :meth:`schedule` must choose, since a waiting
            request may start, or blocks are short.
        """
        plan = _StepPlan(self.config.max_num_batched_tokens - len(step))
        if self._waiting and (len(step) < len(self._running) or self._room(self._waiting[0], plan)):
            return []
        if not all(self.cache.allocate(request, count + 1) for request, count, _ in step):
            return []
        return [Scheduled(item.request, 1, self.cache.tables(item.request)) for item in step]

    def update(self, step: list[Scheduled]) -> None:
        """Record that a step was computed."""
        for request, count, _ in step:
            request.num_computed_tokens += count
            self.cache.commit(request)

    def undo(self, step: list[Scheduled]) -> None:
        """Preempt the requests of a failed step, so that they are recomputed.

        Keys and values could be overwritten, but recurrent states cannot be reset.
        """
        for request, _, _ in step:
            self._preempt(request)

    def _order(self, request: Request) -> tuple[int, int]:
        by_priority = self.config.policy == "priority"
        return request.priority if by_priority else 0, request.arrival

    def _outranks(self, one: Request, other: Request) -> bool:
        """Whether *one* has a higher priority than *other*."""
        return self._order(one)[0] < self._order(other)[0]

    def _continue(self, request: Request, plan: _StepPlan) -> None:
        """Plan the next tokens of a running request; preempt the last requests if necessary."""
        while plan.budget and request not in plan.dropped:  # it may have lost its blocks meanwhile
            count = min(request.num_uncomputed_tokens, plan.budget)
            if self.cache.allocate(request, count):
                plan.add(request, count)
                return
            self._take_back(self._running[-1], plan)

    def _take_back(self, request: Request, plan: _StepPlan) -> None:
        plan.budget += plan.counts.pop(request, 0)
        plan.dropped.add(request)
        self._preempt(request)

    def _preempt(self, request: Request) -> None:
        self.cache.free(request)
        self._running.remove(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, request, key=self._order)

    def _admit(self, plan: _StepPlan, before: Request | None = None) -> None:
        """Plan waiting requests; with *before*, only those that outrank it."""
        while self._waiting:
            request = self._waiting[0]
            if request in plan.dropped or (before and not self._outranks(request, before)):
                return
            if not self._begin(request, plan):
                return

    def _room(self, request: Request, plan: _StepPlan) -> tuple[int, Sequence[Request]] | None:
        """Return a waiting request's cached prefix, and the requests to preempt for it.

        None: it does not fit.
        """
        outranked = [r for r in reversed(self._running) if self._outranks(request, r)]
        if not outranked and not (plan.budget and len(self._running) < self.config.max_num_seqs):
            return None
        prefix = self.cache.find_prefix(request) if request.uses_prefix else 0
        if self._fits(request, prefix, plan, ()):
            return prefix, ()
        if not outranked or not self._fits(request, prefix, plan, outranked):
            return None
        fewer = (outranked[:count] for count in range(1, len(outranked)))
        victims = next((v for v in fewer if self._fits(request, prefix, plan, v)), outranked)
        return prefix, victims

    def _begin(self, request: Request, plan: _StepPlan) -> bool:
        """Plan the first tokens of a waiting request, if it fits, or fits after preemptions."""
        room = self._room(request, plan)
        if room is None:
            return False
        prefix, victims = room
        for victim in victims:
            self._take_back(victim, plan)
        count = min(request.num_tokens - prefix, plan.budget)
        is_allocated = self.cache.allocate(request, count, prefix)
        assert is_allocated, f"{request} fits no more"
        self._waiting.remove(request)
        insort(self._running, request, key=self._order)
        request.num_computed_tokens = prefix
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(prefix, request.num_prompt_tokens)
        self.prefix_queries += request.num_tokens
        self.prefix_hits += prefix
        plan.add(request, count)
        return True

    def _fits(
        self, request: Request, prefix: int, plan: _StepPlan, victims: Sequence[Request]
    ) -> bool:
        """Whether *request* fits if *victims* are preempted."""
        budget = plan.budget + sum(plan.counts.get(victim, 0) for victim in victims)
        rest = request.num_tokens - prefix
        count = min(rest, budget)
        if not count or (count < rest and not self.config.enable_chunked_prefill):
            return False
        if len(self._running) - len(victims) >= self.config.max_num_seqs:
            return False
        return self.cache.fits(request, count, prefix, without=victims)
