"""The data-parallel engine: routes each request to one of several replicas."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from opweave import platforms
from opweave.config import EngineConfig
from opweave_engine.async_engine import AsyncEmbedder, AsyncEngine, engine_class
from opweave_engine.client import StreamingClient
from opweave_engine.core import engine_priorities
from opweave_engine.errors import EngineDeadError
from opweave_engine.kv_cache import extend_hashes
from opweave_engine.load.checkpoint import Checkpoint, Progress, sampling_defaults
from opweave_engine.load.loader import check_ranks
from opweave_engine.metrics import EngineStats, merged
from opweave_engine.outputs import EmbeddingOutput, PoolingParams, RequestOutput
from opweave_engine.parallel.rank import Agreement
from opweave_engine.parallel.ray import RayGroup
from opweave_engine.parallel.replicas import (
    LoadOrder,
    ReplicaGroup,
    ReplicaHandle,
    ReplicaReport,
    Replicas,
    RequestFailure,
    Submission,
)
from opweave_engine.prompts import Prompt, as_ids, split_prompt
from opweave_engine.sampling.params import RequestSeeds, SamplingParams, check_params
from opweave_engine.tokenizer import Tokenizer, tokenizer_of

# Routes requests to replicas.


_BLOCK = 64  # tokens; computing a shorter prefix is faster than looking for it
_REMEMBERED = 16_384  # blocks for each replica: a million tokens
_SLACK = 4  # extra load that a replica may have for the sake of a cached prefix


class ReplicaRouter:
    """Chooses a replica by load and by cached prefix.

    The load of a replica is its number of unfinished outputs. Among replicas with nearly the lowest
    load, the one that got the longest prefix of the prompt before is chosen, because it probably
    has it cached. Ties go to the lowest load, then to the least recently used replica.

    Args:
        size: the number of replicas.
        finds_prefixes: whether replicas have a prefix cache.
    """

    def __init__(self, size: int, *, finds_prefixes: bool = True) -> None:
        self._finds_prefixes = finds_prefixes
        self._loads = [0] * size
        self._turns, self._last = count(1), [0] * size
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(size)]

    @property
    def loads(self) -> tuple[int, ...]:
        """The number of unfinished outputs of each replica."""
        return tuple(self._loads)

    def choose(
        self,
        token_ids: Sequence[int],
        answers: int,
        able: Collection[int],
        cache_salt: str | None = None,
    ) -> int:
        """Return one of *able*, and add *answers* to its load.

        Args:
            token_ids: the prompt.
            answers: the number of outputs of the request.
            able: the replicas that take requests; at least one.
            cache_salt: of the prompt; prefixes with other salts do not count.
        """
        hashes = self._hashes(token_ids, cache_salt)
        least = min(self._loads[each] for each in able)
        near = [each for each in able if self._loads[each] <= least + _SLACK]
        chosen = max(near, key=lambda r: (self._length(r, hashes), -self._loads[r], -self._last[r]))
        self._loads[chosen] += answers
        self._last[chosen] = next(self._turns)
        self._remember(chosen, hashes)
        return chosen

    def release(self, replica: int, answers: int) -> None:
        """Subtract finished outputs from the load of a replica."""
        self._loads[replica] -= answers

    def forget(self, replica: int) -> None:
        """Forget the prefixes of a replica whose cache is lost."""
        self._known[replica].clear()

    def _hashes(self, token_ids: Sequence[int], cache_salt: str | None) -> list[bytes]:
        hashes: list[bytes] = []
        if self._finds_prefixes:
            with suppress(
                OverflowError, TypeError
            ):  # invalid tokens: the replica reports the error
                extend_hashes(hashes, token_ids, _BLOCK, cache_salt)
        return hashes

    def _length(self, replica: int, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks that the replica got before."""
        known = self._known[replica]
        return next((i for i, each in enumerate(hashes) if each not in known), len(hashes))

    def _remember(self, replica: int, hashes: Sequence[bytes]) -> None:
        known = self._known[replica]
        # The end first: as in the replica's cache, the end of a prompt is evicted first.
        for each in reversed(hashes):
            known[each] = None
            known.move_to_end(each)
        while len(known) > _REMEMBERED:
            known.popitem(last=False)


# The engine.


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


# Opens the engine that fits a checkpoint and a configuration.


def open_engine(
    model: str | Path,
    *,
    config: EngineConfig | None = None,
    model_name: str | None = None,
    progress: Progress | None = None,
) -> AsyncEngine | AsyncEmbedder | DataParallelEngine:
    """Return an :class:`AsyncEngine`, or an :class:`AsyncEmbedder` for an encoder.

    If ``data_parallel_size`` is above 1, return a :class:`DataParallelEngine` with that many
    replicas. Arguments and errors are those of the three classes.
    """
    make = engine_class(model)  # first: it reports a bad checkpoint before any replica starts
    if config is not None and config.parallel.data_parallel_size > 1:
        return DataParallelEngine(model, config=config, model_name=model_name, progress=progress)
    return make(model, config=config, model_name=model_name, progress=progress)
