"""The data-parallel engine: routes each request to one of several replicas."""

import asyncio
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from opweave import platforms
from opweave.config import EngineConfig
from opweave.ir.errors import OpweaveError
from opweave_engine.async_engine import AsyncEmbedder, AsyncEngine, engine_class
from opweave_engine.client import StreamingClient, Submission
from opweave_engine.core import engine_priorities
from opweave_engine.errors import EngineDeadError, ReplicaFailedError
from opweave_engine.kv_cache import extend_hashes
from opweave_engine.load.checkpoint import Checkpoint, Progress, sampling_defaults
from opweave_engine.load.loader import check_ranks
from opweave_engine.metrics import NOTHING, EngineStats, after_death, merged
from opweave_engine.outputs import EmbeddingOutput, PoolingParams
from opweave_engine.parallel.rank import Agreement
from opweave_engine.parallel.ray import (
    LoadOrder,
    RayGroup,
    ReplicaGroup,
    ReplicaLocation,
    ReplicaReport,
    RequestFailure,
)
from opweave_engine.prompts import Prompt, as_ids, split_prompt
from opweave_engine.sampling.params import RequestSeeds, check_params
from opweave_engine.tokenizer import tokenizer_of

# Routes requests to replicas.


_BLOCK_TOKENS = 64  # computing a shorter prefix is faster than looking for it
_MAX_BLOCKS = 16_384  # remembered for each replica: a million tokens
_MAX_EXTRA_LOAD = 4  # outputs that a replica with a cached prefix may have above the lowest load


class ReplicaRouter:
    """Chooses a replica by load and by cached prefix.

    The load of a replica is its number of unfinished outputs. Among replicas with nearly the lowest
    load, the one that got the longest prefix of the prompt before is chosen, because it probably
    has it cached. Ties go to the lowest load, then to the least recently used replica.

    Args:
        size: the number of replicas.
        finds_prefixes: whether replicas have a prefix cache.

    Attributes:
        loads: the number of unfinished outputs of each replica.
    """

    def __init__(self, size: int, *, finds_prefixes: bool = True) -> None:
        self._finds_prefixes = finds_prefixes
        self.loads = [0] * size
        self._turns, self._last = count(1), [0] * size
        self._prefixes: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(size)]

    def choose(
        self, token_ids: Sequence[int], answers: int, able: Collection[int], salt: str | None = None
    ) -> int:
        """Return one of *able*, and add *answers* to its load.

        Args:
            token_ids: the prompt.
            answers: the number of outputs of the request.
            able: the replicas that take requests; at least one.
            salt: the cache salt of the prompt; prefixes with other salts do not count.
        """
        hashes: list[bytes] = []
        if self._finds_prefixes:
            with suppress(OverflowError, TypeError):  # the replica reports invalid tokens
                extend_hashes(hashes, token_ids, _BLOCK_TOKENS, salt)
        least = min(self.loads[replica] for replica in able)
        near = [r for r in able if self.loads[r] <= least + _MAX_EXTRA_LOAD]
        chosen = max(near, key=lambda r: (self._length(r, hashes), -self.loads[r], -self._last[r]))
        self.loads[chosen] += answers
        self._last[chosen] = next(self._turns)
        prefixes = self._prefixes[chosen]
        # The end first: as in the replica's cache, the end of a prompt is evicted first.
        for block_hash in reversed(hashes):
            prefixes[block_hash] = None
            prefixes.move_to_end(block_hash)
        while len(prefixes) > _MAX_BLOCKS:
            prefixes.popitem(last=False)
        return chosen

    def release(self, replica: int, answers: int) -> None:
        """Subtract finished outputs from the load of a replica."""
        self.loads[replica] -= answers

    def forget(self, replica: int) -> None:
        """Forget the prefixes of a replica whose cache is lost."""
        self._prefixes[replica].clear()

    def _length(self, replica: int, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks that the replica got before."""
        prefixes = self._prefixes[replica]
        return next((i for i, h in enumerate(hashes) if h not in prefixes), len(hashes))


# The engine's view of one replica.


_START_SECONDS = 300.0  # to import opweave and its plugins on a busy machine


@dataclass(slots=True, eq=False)
class ReplicaHandle:
    """The state of a replica: its process, whether it has loaded, and its statistics.

    Attributes:
        number: its number.
        timeout: seconds without a report after which it counts as dead.
        past: the statistics of its predecessors.
        place: its process; None: not started yet.
        is_ordered: whether its load order was sent.
        max_model_len: the limit of its engine; None: not loaded yet.
        vocab_size: the size of its vocabulary; 0: not loaded yet.
        failure: the error that it died of; None: it is alive.
        current: the statistics of its engine.
        last_report: when it reported last, by ``time.monotonic``.
    """

    number: int
    timeout: float
    past: EngineStats = NOTHING
    place: ReplicaLocation | None = None
    is_ordered: bool = False
    max_model_len: int | None = None
    vocab_size: int = 0
    failure: ReplicaFailedError | None = None
    current: EngineStats = NOTHING
    last_report: float = field(default_factory=time.monotonic)

    @property
    def is_loaded(self) -> bool:
        """Whether it takes requests."""
        return self.max_model_len is not None and self.failure is None

    @property
    def stats(self) -> EngineStats:
        """Its statistics, with those of its predecessors."""
        return merged([self.past, self.current])

    @property
    def silence(self) -> str | None:
        """How it missed its timeout; None: it did not."""
        if self.failure is not None:
            return None
        silent = time.monotonic() - self.last_report
        if self.place is None and silent > _START_SECONDS:
            return f"did not start within {_START_SECONDS:g} s: Ray has no room, or does not answer"
        if self.place is not None and silent > self.timeout:
            return f"has not reported for {self.timeout:g} s"
        return None


# Supervises the replicas: starts them, reads their reports, and replaces dead ones.


_log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0  # to wait for messages


class Replicas:
    """The replicas of one engine. Only one thread at a time may call :meth:`receive`.

    A replica that dies is replaced, unless it dies before it has loaded: its replacement would not
    load either.

    Args:
        group: the processes of the replicas.
        size: the number of replicas.
        order: the model and configuration of each.
        on_report: called with each report.
        on_loss: called with the handle of a replica that has died.
        progress: called while the first replica loads, with the number of tensors loaded so far and
            in total.

    Attributes:
        members: the handles of the current replicas, by number.
        last_failure: the error of the replica that died last; None: no replica has died.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        size: int,
        order: LoadOrder,
        on_report: Callable[[ReplicaReport], None],
        on_loss: Callable[[ReplicaHandle], None],
        progress: Progress | None = None,
    ) -> None:
        timeout = order.config.parallel.timeout
        self.members = [ReplicaHandle(number, timeout) for number in range(size)]
        self.last_failure: ReplicaFailedError | None = None
        self._group, self._order, self._progress = group, order, progress
        self._on_report, self._on_loss = on_report, on_loss

    @property
    def able(self) -> list[int]:
        """The numbers of the replicas that take requests."""
        return [member.number for member in self.members if member.is_loaded]

    def load(self) -> None:
        """Wait until all replicas have loaded.

        Raises:
            ReplicaFailedError: a replica failed.
        """
        while not all(member.is_loaded for member in self.members):
            self.receive()
            for member in self.members:
                if member.failure is not None:
                    raise member.failure
        self._progress = None

    def receive(self) -> None:
        """Process new messages; wait for them for at most a second."""
        for number, news in self._group.receive(_POLL_SECONDS):
            member = self.members[number]
            if isinstance(news, ReplicaFailedError):
                self._replace(member, news)
            elif isinstance(news, ReplicaLocation):
                member.place, member.last_report = news, time.monotonic()
                _log.info("replica %d: process %d on %s", number, news.pid, news.node)
            else:
                self._take(member, news)
        self._send_orders()
        for member in list(self.members):
            if (reason := member.silence) is not None:
                self._replace(member, ReplicaFailedError(f"replica {member.number} {reason}."))

    def _take(self, member: ReplicaHandle, report: ReplicaReport) -> None:
        for record in report.records:
            record.msg = f"replica {member.number}: {record.msg}"
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        if report.progress is not None and self._progress is not None and member.number == 0:
            self._progress(*report.progress)
        was_loaded = member.is_loaded
        member.last_report, member.vocab_size = time.monotonic(), report.vocab_size
        member.max_model_len = report.max_model_len
        if report.stats is not None:
            member.current = report.stats
        if member.is_loaded and not was_loaded:
            _log.info("replica %d: loaded", member.number)
        self._on_report(report)
        if (error := report.failure) is not None:
            shown = error if isinstance(error, OpweaveError) else repr(error)
            failure = ReplicaFailedError(f"replica {member.number} failed: {shown}")
            failure.__cause__ = error
            self._replace(member, failure)

    def _send_orders(self) -> None:
        """Let replicas load, once the number of replicas on each machine is known."""
        alive = [member for member in self.members if member.failure is None]
        places = [member.place for member in alive if member.place is not None]
        if len(places) < len(alive):
            return
        nodes = Counter(place.node for place in places)
        for member, place in zip(alive, places, strict=True):
            if not member.is_ordered:
                member.is_ordered = True
                order = replace(self._order, replicas_on_node=nodes[place.node])
                self._group.send(member.number, "start", order)

    def _replace(self, member: ReplicaHandle, failure: ReplicaFailedError) -> None:
        was_loaded = member.is_loaded
        self._group.kill(member.number)
        self.last_failure = member.failure = failure
        member.current = after_death(member.current)
        self._on_loss(member)
        if not was_loaded:
            _log.error("%s", failure)
            return
        try:
            self._group.renew(member.number)
        except ReplicaFailedError as error:
            _log.critical("%s None takes its place: %s Start the server again.", failure, error)
        else:
            _log.error("%s Another one takes its place.", failure)
            handle = ReplicaHandle(member.number, member.timeout, past=member.stats)
            self.members[member.number] = handle


# The engine.


class _Assignment(NamedTuple):
    member: ReplicaHandle
    answers: int


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
        self.tokenizer, self._seeds = tokenizer_of(checkpoint, fitted), RequestSeeds(fitted.seed)
        self.sampling_defaults = sampling_defaults(checkpoint, fitted.generation_config)
        order = LoadOrder(
            agreement=Agreement.here().to_json(),
            model=checkpoint.path.resolve(),
            config=config,
            model_name=self.model_name,
            replicas_on_node=1,
            log_level=logging.getLogger("opweave_engine").getEffectiveLevel(),
        )
        size = config.parallel.data_parallel_size
        self._router = ReplicaRouter(size, finds_prefixes=fitted.cache.enable_prefix_caching)
        self._assignments: dict[str, _Assignment] = {}
        self._vectors: dict[str, asyncio.Future[EmbeddingOutput]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="opweave-replicas", daemon=True)
        self._group = group or RayGroup(config.parallel)
        self._replicas = Replicas(
            self._group,
            size,
            order,
            self._pass_on,
            lambda member: self._call_in_loop(partial(self._lose, member)),
            progress,
        )
        try:
            self._replicas.load()
        except BaseException:
            self._group.close()
            raise
        members = self._replicas.members
        self.max_model_len = min(m.max_model_len for m in members if m.max_model_len is not None)
        self.vocab_size = max(member.vocab_size for member in members)
        self._thread.start()

    @property
    def dead_with(self) -> BaseException | None:
        return self._dead_with or (None if self._replicas.able else self._replicas.last_failure)

    async def embed(
        self, prompt: Prompt, params: PoolingParams | None = None, *, request_id: str
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
            self._abort_request(request_id)

    def stats(self) -> EngineStats:
        return merged([member.stats for member in self._replicas.members])

    def shutdown(self) -> None:
        self._is_closed = True
        self._is_over.set()
        for number in self._replicas.able:
            self._group.send(number, "stop")
        self._thread.join()
        self._group.close()

    # In the event loop

    async def _prepare(self, submission: Submission) -> Callable[[], None]:
        params: Any = submission.params
        check_params(params)
        seeded = replace(submission, params=replace(params, seed=self._seeds.of(params)))
        _, salt = split_prompt(submission.prompt)
        return partial(self._send, seeded, self._tokens(submission.prompt), params.n, salt)

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        content, _ = split_prompt(prompt)
        return self.tokenizer.encode(content) if isinstance(content, str) else as_ids(content)

    def _send(
        self, submission: Submission, tokens: Sequence[int], answers: int, salt: str | None = None
    ) -> None:
        if not (able := self._replicas.able):  # the last replica has just died
            self._fail([submission.request_id], self._dead_error())
            return
        chosen = self._router.choose(tokens, answers, able, salt)
        member = self._replicas.members[chosen]
        self._assignments[submission.request_id] = _Assignment(member, answers)
        self._group.send(chosen, "submit", submission)

    def _abort_request(self, request_id: str) -> None:
        if (vector := self._vectors.get(request_id)) is not None:
            vector.cancel()
        if (assignment := self._assignments.get(request_id)) is not None:
            self._group.send(assignment.member.number, "abort", request_id)

    def _take(self, report: ReplicaReport) -> None:
        for answer in report.answers:
            if isinstance(answer, RequestFailure):
                self._fail([answer.request_id], answer.error)
            elif isinstance(answer, EmbeddingOutput):
                vector = self._vectors.get(answer.request_id)
                if vector is not None and not vector.done():
                    vector.set_result(answer)
                self._close(answer.request_id)
            elif answer.request_id in self._assignments:
                self._receive([answer])
                if answer.request_id not in self._streams:
                    # It has no reader: an abort may have overtaken its own request.
                    self._abort_request(answer.request_id)

    def _lose(self, member: ReplicaHandle) -> None:
        assert member.failure is not None, "it has died"
        error = EngineDeadError(f"The engine died: {member.failure}")
        error.__cause__ = member.failure
        self._router.forget(member.number)
        names = [name for name, request in self._assignments.items() if request.member is member]
        self._fail(names, error)

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
        if (assignment := self._assignments.pop(request_id, None)) is not None:
            self._router.release(assignment.member.number, assignment.answers)

    # In the thread

    def _pass_on(self, report: ReplicaReport) -> None:
        if report.answers:
            self._call_in_loop(partial(self._take, report))

    def _listen(self) -> None:
        try:
            while not self._is_over.is_set():
                self._replicas.receive()
        except BaseException as error:  # all readers must be released, regardless of the error
            self._dead_with = error
            if not isinstance(error, SystemExit):  # Ray raises it when the program ends
                _log.critical("the messages of the replicas cannot be read", exc_info=error)
        finally:
            self._call_in_loop(lambda: self._fail(self._unfinished, self._dead_error()))


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
