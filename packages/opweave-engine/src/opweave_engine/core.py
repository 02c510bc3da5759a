"""The engine core: schedules requests, runs the model, and collects tokens, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from opweave import ir, platforms
from opweave.config import EngineConfig
from opweave.platforms import Platform
from opweave_engine.decode_graphs import SequenceStep
from opweave_engine.errors import EngineError, InvalidArgumentError, NonFiniteLogitsError, id_in_use
from opweave_engine.kv_cache import CacheGroup, KVCacheManager, plan_cache
from opweave_engine.load.checkpoint import Checkpoint, Progress, log_defaults, sampling_defaults
from opweave_engine.metrics import EngineStats, SelectionReport, StatCounter, stat_loggers
from opweave_engine.outputs import RequestOutput
from opweave_engine.parallel.executor import Executor
from opweave_engine.parts import part, supports
from opweave_engine.prompts import PromptReader
from opweave_engine.request import ActiveRequest, DetokenizedOutput, Request, RequestFactory
from opweave_engine.runner import check_backend
from opweave_engine.sampling.sampler import Sampled, named
from opweave_engine.scheduler import Scheduled, Scheduler
from opweave_engine.structured.grammar_compiler import GrammarCompiler
from opweave_engine.tokenizer import tokenizer_of

# Priorities that hold for one engine's forwards and nowhere else.


PriorityLists = Mapping[str, str | Iterable[str]]


def engine_priorities(lists: PriorityLists | None, config: EngineConfig) -> ir.IrOpPriorityConfig:
    """Merge the ``ir_op_priority`` argument of an engine with the priorities in its configuration.

    Raises:
        InvalidArgumentError: an op has a list in both.
        IrError: an op or provider, here or in any setting of the process, is unknown; or a list is
            malformed.
    """
    direct = ir.IrOpPriorityConfig(lists)
    configured = ir.IrOpPriorityConfig(config.kernel_config.ir_op_priority)
    if twice := sorted(direct.keys() & configured.keys()):
        raise InvalidArgumentError(
            f"The priority of {', '.join(map(repr, twice))} is given twice: in ir_op_priority and "
            "in config.kernel_config. Give it once."
        )
    ir.current_registry().check_settings()
    merged = ir.IrOpPriorityConfig({**direct, **configured})
    with ir.priority(merged):  # checks the names
        return merged


@contextmanager
def private_context(priorities: PriorityLists) -> Iterator[Context]:
    """Yield a context for forward passes with *priorities*; the caller's context is unchanged.

    Use one context for many forward passes, because selection is prepared once per scope.
    """
    context = copy_context()
    if not priorities:
        yield context
        return
    scope = ir.priority(priorities)
    context.run(scope.__enter__)
    try:
        yield context
    finally:
        context.run(scope.__exit__, None, None, None)


# The core.


_log = logging.getLogger(__name__)


class _SequencePart(NamedTuple):
    """One sequence in a step."""

    item: Scheduled
    request: ActiveRequest
    output: DetokenizedOutput
    step: SequenceStep

    @property
    def is_plain(self) -> bool:
        """Whether its tokens do not change how the next one is sampled: without the host."""
        changes = self.output.grammar is not None or self.output.params.bad_words
        return self.step.sampling is not None and self.step.sampling.is_plain and not changes

    def ahead(self, row: int, item: Scheduled) -> _SequencePart:
        """Return its part of the next step, whose token is the one that *row* samples."""
        start = self.step.start + len(self.step.token_ids)
        step = self.step._replace(token_ids=[~row], start=start, tables=item.tables)
        return self._replace(item=item, step=step)


class _Step(NamedTuple):
    """A step that the executor has started.

    Attributes:
        parts: its sequences.
        result: waits for the sampled tokens; or the error of the launch.
    """

    parts: list[_SequencePart]
    result: Callable[[], list[Sampled]] | Exception


class EngineCore:
    """A model, its KV cache, and the requests that share them.

    Only one thread at a time may call :meth:`add_request`, :meth:`abort` and :meth:`step`.
    :attr:`prepare` and :meth:`stats` may be called from another thread. Installed stat loggers get
    the statistics after each step.

    Args:
        model: the directory of a checkpoint.
        config: how to run it; the platform may change it.
        platform: names the executor, worker, runner, scheduler, sampler and attention backends;
            None: the current platform.
        progress: called while loading, with the number of tensors loaded so far and in total.

    Attributes:
        config: the configuration after the platform's changes.
        executor: runs the workers.
        grammars: the compiled grammars for structured output; compile a grammar before
            :attr:`prepare` to make that fast.
        prepare: returns a request for :meth:`add_request`; see
            :meth:`opweave_engine.request.RequestFactory.make`.
        scheduler: chooses the tokens of each step.
        tokenizer: the checkpoint's tokenizer.
        sampling_defaults: sampling parameters from the checkpoint, by name.
        vocab_size: the size of the vocabulary: token ids are below it.
        max_model_len: the maximum number of tokens of a prompt and its output.

    Raises:
        EngineError, ModelError: the checkpoint is missing, damaged or not supported, or the cache
            is too small.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        *,
        platform: Platform | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.platform = platform or platforms.current_platform
        self.config = config = platforms.configured(config, self.platform)
        check_backend(config.compilation)
        checkpoint = Checkpoint(model)
        checkpoint.config()  # first: its error says that the directory is not a checkpoint
        self.tokenizer = tokenizer_of(checkpoint, config)
        self.sampling_defaults = sampling_defaults(checkpoint, config.generation_config)
        log_defaults(checkpoint, config.generation_config, self.sampling_defaults)
        executor: Callable[..., Executor] = part(self.platform, "get_executor_cls", config)
        self.executor = executor(checkpoint.path, config, self.platform, progress)
        try:
            self._start()
        except BaseException:  # there is no engine yet that could shut it down
            self.executor.shutdown()
            raise

    def _start(self) -> None:
        config, facts = self.config, self.executor.facts
        plan = plan_cache(
            facts.groups, config.cache, config.scheduler, facts.context, facts.memory, facts.free
        )
        self.max_model_len, self.model_config = plan.max_model_len, facts.config
        self._selections, began = SelectionReport(), time.perf_counter()
        self.executor.allocate(plan)
        if config.compilation.compiles:
            self._selections.compile_seconds = time.perf_counter() - began
        if config.compilation.uses_passes:
            self._selections.add_graph()
        sizes = zip(facts.groups, plan.num_blocks, strict=True)
        groups = [CacheGroup(group.retention, count) for group, count in sizes]
        finds_prefixes = config.cache.enable_prefix_caching
        cache = KVCacheManager(groups, plan.block_size, enable_prefix_caching=finds_prefixes)
        scheduler: type[Scheduler] = part(self.platform, "get_scheduler_cls", config)
        limits = config.scheduler
        if facts.needs_whole_prompts:
            budget = max(limits.max_num_batched_tokens, self.max_model_len)
            limits = replace(limits, enable_chunked_prefill=False, max_num_batched_tokens=budget)
            _log.info("prompts are not split over steps, since the model's logits depend on it")
        self.scheduler = scheduler(limits, cache)
        self.vocab_size = size = facts.vocab_size
        eos_token_ids = frozenset(t for t in self.tokenizer.eos_token_ids if 0 <= t < size)
        if unknown := sorted(self.tokenizer.eos_token_ids - eos_token_ids):
            _log.warning(
                "the end-of-text tokens %s are ignored: the model has the ids from 0 to %d",
                unknown, size - 1,
            )  # fmt: skip
        self.grammars = GrammarCompiler(self.tokenizer, size, eos_token_ids)
        prompts = PromptReader(self.tokenizer, size, self.max_model_len)
        factory = RequestFactory(prompts, self.grammars, self.platform, eos_token_ids, config.seed)
        self.prepare = factory.make
        self._requests: dict[str, ActiveRequest] = {}
        # By the name of the sequence in the scheduler.
        self._outputs: dict[str, tuple[ActiveRequest, DetokenizedOutput]] = {}
        self._ahead: _Step | None = None
        self._overlaps = self.executor.overlaps and supports(self.scheduler, "ahead", "schedule")
        if limits.async_scheduling and not self._overlaps:
            _log.warning("async_scheduling=True has no effect: a part of the engine lacks it")
        self._counter, self._loggers = StatCounter(), stat_loggers(config)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_unfinished

    @property
    def unfinished(self) -> list[str]:
        """The ids of all unfinished requests."""
        return list(self._requests)

    def add_request(self, request: ActiveRequest) -> None:
        """Queue a request.

        Raises:
            InvalidArgumentError: an unfinished request has the same name.
        """
        if request.request_id in self._requests:
            raise id_in_use(request.request_id)
        self.scheduler.add(request.outputs[0].request)  # first: it may reject the request
        self._requests[request.request_id] = request
        for output in request.outputs:
            self._outputs[output.request.request_id] = request, output

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Abort requests; return the last output of each one that was unfinished."""
        requests = [self._requests[name] for name in request_ids if name in self._requests]
        for request in requests:
            request.abort()
            self._forget_all(request)
        return [request.next_output() for request in requests]

    def step(self) -> list[RequestOutput]:
        """Compute the next tokens of as many requests as fit.

        Requests whose logits are not finite fail, and the others are computed again. A request
        whose own state raises an exception fails, too: its masks, log-probabilities or text. After
        an error of the executor, all are computed again.

        Returns:
            The next output of each request that got a token, if it streams or has finished.
        """
        began, step, self._ahead = time.perf_counter(), self._ahead, None
        if step is None or all(part.output.is_finished for part in step.parts):
            scheduled = self.scheduler.schedule()
            if not scheduled:
                return []
            if any(item.num_tokens > 1 for item in scheduled):
                # Sequences with one new token come first, and cached tokens before new ones.
                scheduled.sort(key=lambda s: (s.num_tokens > 1, s.request.num_computed_tokens == 0))
            parts = []
            for item in scheduled:
                request, output = self._outputs[item.request.request_id]
                try:
                    parts.append(
                        _SequencePart(item, request, output, _step_of(item, request, output))
                    )
                except Exception as error:
                    self.scheduler.undo(scheduled)
                    self._lose(request, _failure(request, error))
                    return [request.next_output()]
            step = self._launch(parts)
        return self._collect(step, self._launch_ahead(step), began)

    def _launch(self, parts: list[_SequencePart]) -> _Step:
        try:
            with self._selections.watch(sum([part.item.num_tokens for part in parts])):
                return _Step(parts, self.executor.launch([part.step for part in parts]))
        except Exception as error:
            return _Step(parts, error)

    def _launch_ahead(self, running: _Step) -> _Step | None:
        """Launch the step after *running*, if it needs no token of that on the host.

        A sequence that turns out to have ended gets one token too many, which is dropped. Its
        blocks are free at once, since the device computes steps in the order of their launches.
        """
        if not self._overlaps or isinstance(running.result, Exception):
            return None
        rows = [(row, p) for row, p in enumerate(running.parts) if not p.output.is_finished]
        if len(rows) < self.scheduler.num_running or not all(p.is_plain for _, p in rows):
            return None
        rows = [(row, p) for row, p in rows if p.output.num_tokens + 1 < p.output.max_tokens]
        scheduled = self.scheduler.ahead([part.item for _, part in rows])
        following = [p.ahead(row, item) for (row, p), item in zip(rows, scheduled, strict=False)]
        return self._launch(following) if following else None

    def _collect(self, step: _Step, ahead: _Step | None, began: float) -> list[RequestOutput]:
        """Wait for the tokens of a step, and append them to the sequences that have not ended.

        The step *ahead* was computed from them, so an error drops it.
        """
        scheduled = [part.item for part in step.parts if not part.output.is_finished]
        asking = [part for part in step.parts if part.step.sampling is not None]
        try:
            if isinstance(step.result, Exception):
                raise step.result
            sampled = step.result()
        except Exception as error:
            self.scheduler.undo(scheduled)
            if isinstance(error, NonFiniteLogitsError) and error.rows:
                failed = [asking[row].output for row in error.rows]
                return self._fail([o.request for o in failed if not o.is_finished], error)
            raise  # NonFiniteLogitsError, too, if its rows are unknown
        self.scheduler.update(scheduled)  # a sequence that has ended is never computed
        self.grammars.advance(
            (output.grammar, token.token_id)
            for (_, _, output, _), token in zip(asking, sampled, strict=True)
            if output.grammar is not None
            and output.request.is_computed
            and not output.ends_at(token.token_id)
        )
        changed: dict[str, ActiveRequest] = {}
        failures: dict[str, EngineError] = {}
        for (_, request, output, sequence), token in zip(asking, sampled, strict=True):
            is_complete = output.request.is_computed
            try:
                if token.prompt_logprobs:
                    scores = [named(scores, self.tokenizer) for scores in token.prompt_logprobs]
                    request.score_prompt(sequence.start, scores)
                if is_complete:
                    logprobs = named(token.logprobs, self.tokenizer) if token.logprobs else {}
                    output.append(token.token_id, logprobs)
            except Exception as error:
                failures[request.request_id] = _failure(request, error)
                changed[request.request_id] = request
                continue
            if is_complete:
                self._count(request, output)
                changed[request.request_id] = request
        for request in changed.values():
            failure = failures.get(request.request_id) or request.grammar_failure
            if failure is not None:
                self._lose(request, failure)
        self._ahead = ahead if self._outputs else None
        num_tokens = sum([item.num_tokens for item in scheduled])
        self._counter.step(time.perf_counter() - began, num_tokens)
        for logger in self._loggers:
            logger.record(self.stats())
        requests = self._requests  # unfinished ones
        return [r.next_output() for n, r in changed.items() if r.streams or n not in requests]

    def stats(self) -> EngineStats:
        """Return the statistics since the engine started."""
        scheduler = self.scheduler
        return replace(
            self._counter.stats(),
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_usage=scheduler.cache.usage,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.num_preemptions,
            kernels=self._selections.kernels,
            compile_seconds=self._selections.compile_seconds,
        )

    def check_idle(self) -> None:
        """Check that no request is left, and that every block is free.

        Raises:
            CacheIntegrityError: otherwise.
        """
        self.scheduler.cache.check_empty()

    def fail(self, error: EngineError) -> None:
        """End all unfinished requests with *error*, because the engine has died."""
        for request in list(self._requests.values()):
            self._lose(request, error)

    def shutdown(self) -> None:
        """Abort all unfinished requests, and free the model and its cache."""
        self.abort(self.unfinished)
        self.grammars.close()
        self.executor.shutdown()
        for logger in self._loggers:
            logger.shutdown()

    def _count(self, request: ActiveRequest, output: DetokenizedOutput) -> None:
        """Account for a new token: start the other outputs, or end this one."""
        computes_prompt = output is request.outputs[0]
        is_first = output.num_tokens == 1
        prompt_tokens = output.request.num_prompt_tokens if computes_prompt else 0
        self._counter.token(output.since_last, is_first=is_first, num_prompt_tokens=prompt_tokens)
        if is_first and computes_prompt:
            for other in request.outputs[1:]:
                self.scheduler.add(other.request)
        if output.is_finished:
            self._forget(output)
            if request.is_finished:
                del self._requests[request.request_id]

    def _fail(self, sequences: Sequence[Request], error: EngineError) -> list[RequestOutput]:
        requests = list(dict.fromkeys(self._outputs[s.request_id][0] for s in sequences))
        for sequence in sequences:  # its logits were not checked before: any block may be wrong
            self.scheduler.cache.forget(sequence)
        for request in requests:
            self._lose(request, error)
        return [request.next_output() for request in requests]

    def _lose(self, request: ActiveRequest, error: EngineError) -> None:
        request.fail(error)
        self._forget_all(request)

    def _forget_all(self, request: ActiveRequest) -> None:
        del self._requests[request.request_id]
        for output in request.outputs:
            if output.request.request_id in self._outputs:
                self._forget(output)

    def _forget(self, output: DetokenizedOutput) -> None:
        del self._outputs[output.request.request_id]
        self.scheduler.remove(output.request.request_id)
        self._counter.finish(output.finish_reason or "error", output.timings())


def _step_of(item: Scheduled, request: ActiveRequest, output: DetokenizedOutput) -> SequenceStep:
    output.schedule()
    sequence, count, tables = item
    start = sequence.num_computed_tokens
    tokens = sequence.token_ids[start : start + count]
    targets = request.prompt_targets(output, start, count)
    is_complete = start + count == len(sequence.token_ids)
    sampling = output.sampling if is_complete or targets else None
    return SequenceStep(sequence.request_id, tokens, start, tables, sampling, targets)


def _failure(request: ActiveRequest, error: Exception) -> EngineError:
    _log.error("request %s failed", request.request_id, exc_info=error)
    failure = EngineError(f"The request failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
