"""The engine itself: requests in, tokens out, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from opweave import platforms
from opweave.config import EngineConfig
from opweave.engine.cache import KVCacheManager
from opweave.engine.cache.plan import CachePlan, plan_cache
from opweave.engine.errors import EngineError, InvalidArgumentError, NonFiniteLogitsError
from opweave.engine.loading.checkpoint import Checkpoint
from opweave.engine.loading.generation_config import log_defaults, sampling_defaults
from opweave.engine.loading.loader import Progress
from opweave.engine.metrics.selection_report import SelectionReport
from opweave.engine.metrics.stat_logger import stat_loggers
from opweave.engine.metrics.stats import EngineStats, StatCounter
from opweave.engine.parallel.executor import Executor
from opweave.engine.request.active_request import ActiveRequest
from opweave.engine.request.detokenized_output import DetokenizedOutput
from opweave.engine.request.factory import RequestFactory
from opweave.engine.request.outputs import RequestOutput
from opweave.engine.request.prompts import Prompt, PromptReader
from opweave.engine.request.request import Request
from opweave.engine.runner.compilation import check_backend
from opweave.engine.runner.step import SequenceStep
from opweave.engine.sampling.logprobs import named
from opweave.engine.sampling.sampling_params import SamplingParams
from opweave.engine.sampling.sampling_request import Sampled
from opweave.engine.scheduler import Scheduled, Scheduler
from opweave.engine.structured.grammars import Grammars
from opweave.engine.tokenization.tokenizer import tokenizer_of
from opweave.platforms import Platform
from opweave.plugins import resolve_obj_by_qualname

_log = logging.getLogger(__name__)


class EngineCore:
    """A model, its cache, and the requests that share them.

    One thread at a time calls :meth:`add_request`, :meth:`abort` and :meth:`step`. :meth:`prepare`
    and :meth:`stats` may be called from another one.

    Args:
        model: the directory of a checkpoint.
        config: how to run it; the platform fits it to itself.
        platform: where; by default on the current one. It names the executor, the worker, the
            runner, the scheduler, the sampler and the attention backends. Stat loggers that are
            installed are told what each step has done.
        progress: called while loading, with the number of tensors loaded so far and in total.

    Attributes:
        config: as the platform runs it.
        executor: of the workers.
        grammars: that answers follow; one that is compiled before makes :meth:`prepare` quick.
        scheduler: chooses what each step computes.
        tokenizer: of the checkpoint.
        sampling_defaults: sampling parameters that the checkpoint sets, by name.
        max_model_len: the most tokens of a prompt and its answer together.

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
        checkpoint.config()  # what a directory that is no checkpoint lacks first
        self.tokenizer = tokenizer_of(checkpoint, config)
        self.sampling_defaults = sampling_defaults(checkpoint, config.generation_config)
        log_defaults(checkpoint, config.generation_config, self.sampling_defaults)
        executor: type[Executor] = resolve_obj_by_qualname(self.platform.get_executor_cls(config))
        self.executor = executor(model, config, self.platform, progress)
        try:
            self._start()
        except BaseException:  # nobody else can: there is no engine
            self.executor.shutdown()
            raise

    def _start(self) -> None:
        config, facts = self.config, self.executor.facts
        plan = plan_cache(
            facts.groups, config.cache, config.scheduler, facts.context, facts.memory, facts.free
        )
        self.max_model_len, self.model_config = plan.max_model_len, facts.config
        self._selections = self._warm_up(plan)
        cache = KVCacheManager(
            plan.cache_groups(facts.groups),
            plan.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
        scheduler: type[Scheduler] = resolve_obj_by_qualname(
            self.platform.get_scheduler_cls(config)
        )
        self.scheduler = scheduler(config.scheduler, cache)
        eos_token_ids = self._known_eos(facts.vocab_size)
        self.grammars = Grammars(self.tokenizer, facts.vocab_size, eos_token_ids)
        prompts = PromptReader(self.tokenizer, facts.vocab_size, self.max_model_len)
        self._factory = RequestFactory(
            prompts, self.grammars, self.platform, eos_token_ids, config.seed
        )
        self._requests: dict[str, ActiveRequest] = {}
        # By the name of the sequence in the scheduler.
        self._outputs: dict[str, tuple[ActiveRequest, DetokenizedOutput]] = {}
        self._counter, self._loggers = StatCounter(), stat_loggers(config)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._factory.prompts.vocab_size

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything to do."""
        return self.scheduler.has_unfinished

    @property
    def unfinished(self) -> list[str]:
        """The names of all requests that are not finished."""
        return list(self._requests)

    def tokens(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the tokens of one prompt, cut as *params* say.

        Raises:
            PromptError: it is empty, too long, or not made of the model's tokens.
        """
        return self._factory.tokens(prompt, params, add_special_tokens=add_special_tokens)

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        streams: bool = True,
        add_special_tokens: bool = True,
    ) -> ActiveRequest:
        """Return a request that can be added.

        Args:
            request_id: its name.
            prompt: a text, or token ids.
            params: how to choose tokens.
            priority: an integer; a lower one goes first, where the scheduler's policy asks for it.
            streams: return an output after every token, and not only at the end.
            add_special_tokens: begin a text with the special tokens that the tokenizer adds.

        Raises:
            PromptError: the prompt is empty, too long, or not made of the model's tokens.
            SamplingParamsError: *params* are none, name tokens that the model does not have, or
                hold a grammar that cannot be compiled.
            InvalidArgumentError: *priority* is no integer.
            OpweaveError: the platform does not serve such a request.
        """
        return self._factory.make(
            request_id,
            prompt,
            params,
            priority=priority,
            streams=streams,
            add_special_tokens=add_special_tokens,
        )

    def add_request(self, generation: ActiveRequest) -> None:
        """Let a request wait for its turn.

        Raises:
            InvalidArgumentError: an unfinished one has its name.
        """
        if generation.request_id in self._requests:
            raise InvalidArgumentError(
                f"request_id={generation.request_id!r} is in use by a request that is not finished."
            )
        self.scheduler.add(generation.answers[0].request)  # a request that it refuses is not kept
        self._requests[generation.request_id] = generation
        for answer in generation.answers:
            self._outputs[answer.request.request_id] = generation, answer

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Give up requests; return the last output of each that was there."""
        found = [self._requests[name] for name in request_ids if name in self._requests]
        for generation in found:
            generation.abort()
            self._forget_all(generation)
        return [generation.output() for generation in found]

    def step(self) -> list[RequestOutput]:
        """Compute the next tokens of as many requests as there is room for.

        Requests for which the model's scores are not numbers fail; the others are computed again,
        as all are after any other error.

        Returns:
            What each request has so far that got a token, if it streams or is finished now.
        """
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        # Sequences with one new token first, those with cached tokens before new ones.
        scheduled.sort(key=lambda s: (s.num_tokens > 1, s.request.num_computed_tokens == 0))
        steps = [self._step_of(item) for item in scheduled]
        asking = [item for item, step in zip(scheduled, steps, strict=True) if step.sampling]
        complete = [item.is_complete for item in asking]
        starts = [item.request.num_computed_tokens for item in asking]
        began = time.perf_counter()
        try:
            with self._selections.watch(sum(item.num_tokens for item in scheduled)):
                sampled = self.executor.execute(steps)
        except Exception as error:
            self.scheduler.undo(scheduled)
            if isinstance(error, NonFiniteLogitsError) and error.rows:
                return self._fail([asking[row].request for row in error.rows], error)
            raise  # also if nobody knows whose scores they are
        self.scheduler.update(scheduled)
        answers = [self._outputs[item.request.request_id][1] for item in asking]
        self.grammars.advance(
            (answer.grammar, found.token_id)
            for answer, is_complete, found in zip(answers, complete, sampled, strict=True)
            if is_complete and not answer.ends_at(found.token_id)
        )
        changed: dict[str, ActiveRequest] = {}
        for item, start, is_complete, found in zip(asking, starts, complete, sampled, strict=True):
            generation, answer = self._outputs[item.request.request_id]
            scores = [named(each, self.tokenizer) for each in found.prompt_logprobs]
            generation.score_prompt(start, scores)
            if is_complete:
                self._append(generation, answer, found)
                changed[generation.request_id] = generation
        for generation in changed.values():
            if (failure := generation.grammar_failure) is not None:
                self._lose(generation, failure)
        self._counter.step(time.perf_counter() - began, sum(s.num_tokens for s in scheduled))
        for logger in self._loggers:
            logger.record(self.stats())
        return [g.output() for g in changed.values() if g.streams or g.is_finished]

    def stats(self) -> EngineStats:
        """Return what the engine does and has done."""
        scheduler, counter = self.scheduler, self._counter
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_usage=scheduler.cache.usage,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=counter.prompt_tokens,
            generation_tokens=counter.generation_tokens,
            steps=counter.steps,
            finished=dict(counter.finished),
            histograms=counter.histograms(),
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
        """End what is unfinished without an answer: the engine has died, of *error*."""
        for generation in list(self._requests.values()):
            self._lose(generation, error)

    def shutdown(self) -> None:
        """Abort what is unfinished, and free the model and its cache."""
        self.abort(self.unfinished)
        self.executor.shutdown()
        for logger in self._loggers:
            logger.shutdown()

    def _known_eos(self, vocab_size: int) -> frozenset[int]:
        given = self.tokenizer.eos_token_ids
        known = frozenset(token for token in given if 0 <= token < vocab_size)
        if unknown := sorted(given - known):
            _log.warning(
                "the end-of-text tokens %s are ignored: the model has the ids from 0 to %d",
                unknown, vocab_size - 1,
            )  # fmt: skip
        return known

    def _warm_up(self, plan: CachePlan) -> SelectionReport:
        usage, began = SelectionReport(), time.perf_counter()
        self.executor.allocate(plan)
        if self.config.compilation.compiles:
            usage.compile_seconds = time.perf_counter() - began
        if self.config.compilation.uses_passes:
            usage.add_graph()
        return usage

    def _step_of(self, item: Scheduled) -> SequenceStep:
        request = item.request
        generation, answer = self._outputs[request.request_id]
        answer.schedule()
        start = request.num_computed_tokens
        targets = generation.prompt_targets(answer, start, item.num_tokens)
        return SequenceStep(
            request.request_id,
            request.token_ids[start : start + item.num_tokens],
            start,
            item.tables,
            answer.sampling if item.is_complete or targets else None,
            targets,
        )

    def _append(
        self, generation: ActiveRequest, answer: DetokenizedOutput, sampled: Sampled
    ) -> None:
        answer.append(sampled.token_id, named(sampled.logprobs, self.tokenizer))
        is_first = answer.num_tokens == 1
        computes_prompt = answer is generation.answers[0]
        self._counter.token(
            answer.since_last,
            is_first=is_first,
            num_prompt_tokens=answer.request.num_prompt_tokens if computes_prompt else 0,
        )
        if is_first and computes_prompt:
            for other in generation.answers[1:]:
                self.scheduler.add(other.request)
        if answer.is_finished:
            self._forget(answer)
        if generation.is_finished:
            del self._requests[generation.request_id]

    def _fail(self, requests: Sequence[Request], error: EngineError) -> list[RequestOutput]:
        found = {id(g): g for g, _ in (self._outputs[each.request_id] for each in requests)}
        for request in requests:  # its scores were not looked at before: any block may be wrong
            self.scheduler.cache.forget(request)
        for generation in found.values():
            self._lose(generation, error)
        return [generation.output() for generation in found.values()]

    def _lose(self, generation: ActiveRequest, error: EngineError) -> None:
        generation.fail(error)
        self._forget_all(generation)

    def _forget_all(self, generation: ActiveRequest) -> None:
        del self._requests[generation.request_id]
        for answer in generation.answers:
            if answer.request.request_id in self._outputs:
                self._forget(answer)

    def _forget(self, answer: DetokenizedOutput) -> None:
        del self._outputs[answer.request.request_id]
        self.scheduler.remove(answer.request.request_id)
        self._counter.finish(answer.finish_reason or "error", answer.timings())
