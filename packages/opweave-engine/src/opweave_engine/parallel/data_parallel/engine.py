"""The data-parallel engine: routes each request to one of several replicas."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from opweave import platforms
from opweave.config import EngineConfig
from opweave_engine.client.streaming_client import StreamingClient
from opweave_engine.embedding.pooling_params import PoolingParams
from opweave_engine.errors import EngineDeadError
from opweave_engine.loading.checkpoint import Checkpoint, Progress
from opweave_engine.loading.generation_config import sampling_defaults
from opweave_engine.loading.loader import check_ranks
from opweave_engine.metrics.stats import EngineStats
from opweave_engine.parallel.data_parallel.group import ReplicaGroup
from opweave_engine.parallel.data_parallel.merged_stats import merged
from opweave_engine.parallel.data_parallel.messages import (
    LoadOrder,
    ReplicaReport,
    RequestFailure,
    Submission,
)
from opweave_engine.parallel.data_parallel.ray_group import RayGroup
from opweave_engine.parallel.data_parallel.replica_handle import ReplicaHandle
from opweave_engine.parallel.data_parallel.replicas import Replicas
from opweave_engine.parallel.data_parallel.router import ReplicaRouter
from opweave_engine.parallel.executor.agreement import Agreement
from opweave_engine.priorities import engine_priorities
from opweave_engine.request.outputs import EmbeddingOutput, RequestOutput
from opweave_engine.request.prompts import Prompt, as_ids, split_prompt
from opweave_engine.sampling.sampling_params import SamplingParams, check_params
from opweave_engine.sampling.seeds import RequestSeeds
from opweave_engine.tokenization.tokenizer import Tokenizer, tokenizer_of

_log = logging.getLogger(__name__)


class DataParallelEngine(StreamingClient):
    """Implements :class:`~opweave_engine.EngineClient` with several engines, the replicas.

    Each replica is a Ray actor on any machine with free resources, and holds the whole model on as
    many ranks as the configuration says. A request goes to the replica with the lowest load, or to
    one that probably has its prefix cached. Seeds are drawn here, so that sampling does
    not depend on the replica. In float32, or with batch invariance, the tokens are those of one
    engine; otherwise the logits also depend on the batch, and thus on the replica.

    If a replica dies, its requests fail with :class:`~opweave_engine.errors.EngineDeadError`, and
    it is replaced. The other replicas go on.

    Args:
        model: the directory of a checkpoint; the same on every machine.
        config: how to run each replica, and the number of replicas.
        model_name: by default the name of the directory.
        progress: called while the first replica loads, with the number of tensors loaded so far and
            in total.
        group: the replicas; None: Ray actors.

    Raises:
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.
        ShardingError: the model cannot be divided over the ranks of a replica.
        IrError: an op or provider is unknown.
        MissingDependencyError: Ray is not installed.
        InvalidArgumentError: (a ValueError) the Ray cluster is unreachable or too small.
        ReplicaFailedError: a replica does not start, or has another platform, other plugins,
            versions or priorities.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        config: EngineConfig,
        model_name: str | None = None,
        progress: Progress | None = None,
        group: ReplicaGroup | None = None,
    ) -> None:
        super().__init__(model, model_name)
        checkpoint = Checkpoint(model)
        # Errors must be raised before any replica is started.
        fitted, _ = platforms.configured(config), engine_priorities(None, config)
        if (ranks := config.parallel.tensor_parallel_size) > 1:
            check_ranks(model, ranks, config.model_impl)
        self._tokenizer, self._seeds = tokenizer_of(checkpoint, fitted), RequestSeeds(fitted.seed)
        self._sampling_defaults = sampling_defaults(checkpoint, fitted.generation_config)
        order = LoadOrder(
            agreement=Agreement.here().to_json(),
            model=checkpoint.path.resolve(),
            config=config,
            model_name=self.model_name,
            neighbors=1,
            log_level=logging.getLogger("opweave_engine").getEffectiveLevel(),
        )
        size = config.parallel.data_parallel_size
        self._router = ReplicaRouter(size, finds_prefixes=fitted.cache.enable_prefix_caching)
        self._owed: dict[str, tuple[ReplicaHandle, int]] = {}
        self._vectors: dict[str, asyncio.Future[EmbeddingOutput]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="opweave-replicas", daemon=True)
        self._replicas = Replicas(
            group or RayGroup(config.parallel),
            size,
            order,
            self._pass_on,
            lambda member: self._tell(partial(self._lose, member)),
            progress,
        )
        try:
            self._replicas.load()
        except BaseException:
            self._replicas.close()
            raise
        lengths = [member.max_model_len for member in self._replicas.members]
        self._max_model_len = min(length for length in lengths if length is not None)
        self._vocab_size = max(member.vocab_size for member in self._replicas.members)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self._sampling_defaults

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def dead_with(self) -> BaseException | None:
        return self._dead_with or (None if self._replicas.able else self._replicas.last_failure)

    def generate_deltas(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        def prepare() -> Callable[[], None]:
            check_params(params)
            seeded = replace(params, seed=self._seeds.of(params))
            ask = Submission(request_id, prompt, seeded, priority)
            _, salt = split_prompt(prompt)
            return partial(self._send, ask, self._tokens(prompt), params.n, salt)

        return self._outputs(request_id, prepare)

    async def embed(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        request_id: str,
    ) -> EmbeddingOutput:
        self._enter_loop()
        self._check_unused(request_id)
        tokens = self._tokens(prompt)
        self._open(request_id)
        vector: asyncio.Future[EmbeddingOutput] = asyncio.get_running_loop().create_future()
        self._vectors[request_id] = vector
        try:
            self._send(Submission(request_id, prompt, params or PoolingParams()), tokens, 1)
            return await vector
        finally:
            self._vectors.pop(request_id, None)
            self._give_up(request_id)

    def stats(self) -> EngineStats:
        return merged([member.stats for member in self._replicas.members])

    def shutdown(self) -> None:
        self._is_closed = True
        self._is_over.set()
        self._replicas.stop()
        self._thread.join()
        self._replicas.close()

    # In the event loop

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        content, _ = split_prompt(prompt)
        return self.tokenizer.encode(content) if isinstance(content, str) else as_ids(content)

    def _send(
        self, ask: Submission, tokens: Sequence[int], answers: int, cache_salt: str | None = None
    ) -> None:
        if not (able := self._replicas.able):  # the last replica has just died
            self._fail([ask.request_id], self._why_not())
            return
        chosen = self._router.choose(tokens, answers, able, cache_salt)
        self._owed[ask.request_id] = self._replicas.members[chosen], answers
        self._replicas.ask(chosen, ask)

    def _give_up(self, request_id: str) -> None:
        if (vector := self._vectors.get(request_id)) is not None:
            vector.cancel()
        if (owed := self._owed.get(request_id)) is not None:
            self._replicas.abort(owed[0].number, request_id)

    def _take(self, report: ReplicaReport) -> None:
        for answer in report.answers:
            if isinstance(answer, RequestFailure):
                self._fail([answer.request_id], answer.error)
            elif isinstance(answer, EmbeddingOutput):
                vector = self._vectors.get(answer.request_id)
                if vector is not None and not vector.done():
                    vector.set_result(answer)
                self._close(answer.request_id)
            elif answer.request_id in self._owed:
                self._receive([answer])
                if answer.request_id not in self._streams:
                    # It has no reader: an abort may have overtaken its own request.
                    self._give_up(answer.request_id)

    def _lose(self, member: ReplicaHandle) -> None:
        assert member.failure is not None, "it has died"
        error = EngineDeadError(f"The engine died: {member.failure}")
        error.__cause__ = member.failure
        self._router.forget(member.number)
        self._fail([name for name, owed in self._owed.items() if owed[0] is member], error)

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        names = list(request_ids)
        for vector in (self._vectors[name] for name in names if name in self._vectors):
            if not vector.done():
                vector.set_exception(error)
        super()._fail(names, error)

    def _forget_readers(self) -> None:
        super()._forget_readers()
        self._vectors.clear()

    def _close(self, request_id: str) -> None:
        super()._close(request_id)
        if (owed := self._owed.pop(request_id, None)) is not None:
            member, answers = owed
            self._router.release(member.number, answers)

    # In the thread

    def _pass_on(self, report: ReplicaReport) -> None:
        if report.answers:
            self._tell(partial(self._take, report))

    def _listen(self) -> None:
        try:
            while not self._is_over.is_set():
                self._replicas.hear()
        except BaseException as error:  # all readers must be released, regardless of the error
            self._dead_with = error
            _log.critical("the replicas cannot be heard any more", exc_info=error)
        finally:
            self._tell(lambda: self._fail(self._unfinished, self._why_not()))
