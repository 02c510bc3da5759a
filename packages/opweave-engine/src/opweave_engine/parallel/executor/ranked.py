"""Executor with several ranks: the first in this process, each other one in its own."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from opweave import platforms
from opweave.config import EngineConfig
from opweave.ir.errors import OpweaveError, described
from opweave.platforms import Platform
from opweave_engine.cache.plan import CachePlan
from opweave_engine.errors import (
    CommunicatorError,
    EngineDeadError,
    InvalidArgumentError,
    NonFiniteLogitsError,
)
from opweave_engine.loading.checkpoint import Progress
from opweave_engine.loading.loader import check_ranks
from opweave_engine.parallel.executor.agreement import Agreement
from opweave_engine.parallel.executor.base import Executor
from opweave_engine.parallel.executor.follower import follow
from opweave_engine.parallel.executor.launch import Launch
from opweave_engine.parallel.executor.messages import Start
from opweave_engine.parallel.executor.peers import Peers
from opweave_engine.parallel.executor.processes import HOST, Process
from opweave_engine.parallel.executor.rank import RankWorker
from opweave_engine.runner.step import SequenceStep
from opweave_engine.runner.worker import ModelFacts
from opweave_engine.sampling.sampling_request import Sampled

_log = logging.getLogger(__name__)

_LAST_WORDS = 2.0  # seconds in which a rank that fails is heard


class RankedExecutor(Executor):
    """Runs a worker for each rank of a tensor-parallel model.

    The first rank is in this process. It starts the others, unless ``torchrun`` has. With
    ``torchrun``, every process runs the same program; in the other ranks, the constructor follows
    the first rank, and raises ``SystemExit`` when that shuts down.

    A failure of one rank ends all ranks within the configured timeout. Every method then raises
    :class:`~opweave_engine.errors.RankFailedError`, which names the rank.

    Raises:
        InvalidArgumentError: the number of launched processes differs, or *platform* is not the
            current one, which the other ranks use.
        ShardingError: the model cannot be divided over the ranks; no process is started.
        RankFailedError: a rank does not start, or would run on another platform, with other
            plugins, versions or priorities.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        platform: Platform,
        progress: Progress | None = None,
    ) -> None:
        _check_platform(platform)
        launch, timeout = Launch.from_environment(), config.parallel.timeout
        size = config.parallel.tensor_parallel_size
        local = size
        if launch is not None:
            launch.check_size(size)
        check_ranks(model, size, config.model_impl)
        if launch is None:
            store: Store = _own_store()
            processes = {rank: Process(_port(store)) for rank in range(1, size)}
            peers = Peers({rank: each.connection for rank, each in processes.items()}, processes)
        else:
            store, local = launch.store(timeout, platform.dist_backend), launch.local_size
            if launch.rank:
                sys.exit(follow(launch.connect(store), lambda: store))
            peers = Peers(launch.accept(store, timeout), {})
        start = Start(0, size, 0, Path(model), config, timeout, _threads(config, platform, local))
        self._rank: RankWorker | None = None
        self._peers, self._is_interrupted = peers, False
        try:
            self._rank = RankWorker(start, platform, store)
            self._stop = weakref.finalize(self, _shut_down, peers, self._rank)
            peers.start(
                Agreement.here(),
                {r: replace(start, rank=r, local_rank=r % local) for r in range(1, size)},
            )
            self.facts = self._load(progress, local)
        except BaseException:
            peers.kill()
            self.shutdown()
            raise

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the ranks that this process has started, by rank."""
        return self._peers.pids

    def allocate(self, plan: CachePlan) -> None:
        rank = self._running()
        with self._together():
            numbers = [self._peers.call("allocate", plan), self._peers.call("warm_up")]
            rank.allocate(plan)
            rank.warm_up()
            for number in numbers:
                self._peers.replies(number)

    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        rank = self._running()
        with self._together():
            self._peers.call("execute", steps)
            return rank.execute(steps)

    def check(self) -> None:
        self._peers.check()

    def watch(self, call: Callable[[], None]) -> None:
        self._peers.watch(call)

    def interrupt(self) -> None:
        silent = ", ".join(map(str, self._peers.silent()))
        self._peers.fail(f"the engine shuts down, and ranks have not finished the step: {silent}.")

    def shutdown(self) -> None:
        if self._rank is not None:
            self._rank = None
            self._stop()

    def _load(self, progress: Progress | None, local: int) -> ModelFacts:
        rank, peers = self._running(), self._peers
        # Here the ranks wait for each other without a collective: who fails must be heard first.
        peers.watch(rank.abort)
        with self._together():
            joined, loaded = peers.call("join"), peers.call("load_model")
            rank.join()
            peers.replies(joined)
            rank.load_model(progress)
            peers.replies(loaded)
            told = peers.replies(peers.call("facts"))
            facts = rank.facts()
        memory = min(facts.memory, *(each.memory for each in told))
        free = min(facts.free, *(each.free for each in told))
        if rank.worker.platform.capabilities.unified_memory:  # all have found the same
            free //= local
            if rank.worker.config.cache.memory_bytes is None:
                memory //= local
        return replace(facts, memory=memory, free=free)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """End all ranks if the block, which runs on all of them, raises."""
        try:
            yield
        except NonFiniteLogitsError:
            raise
        except (CommunicatorError, RuntimeError) as error:
            raise self._why(error) from error
        except BaseException as error:
            # Wherever the others are now, they are no longer where this one is.
            self._peers.fail(f"rank 0 stopped in the middle of a step: {type(error).__name__}")
            raise

    def _why(self, error: Exception) -> Exception:
        """Return the error of the rank that failed first, which may not be this one's."""
        failure = self._peers.failure(_LAST_WORDS)
        if failure is not None:
            return failure
        if isinstance(error, CommunicatorError | distributed.DistError):
            silent = ", ".join(map(str, self._peers.silent()))
            return self._peers.fail(f"{error} Ranks that have not finished the step: {silent}.")
        self._peers.fail(f"rank 0 failed: {described(error)}")
        return error

    def _running(self) -> RankWorker:
        if self._rank is None:
            raise EngineDeadError("The engine is shut down.")
        return self._rank


def _check_platform(platform: Platform) -> None:
    current = platforms.current_platform
    if platform is not current:
        raise InvalidArgumentError(
            f"platform {platform.name!r} was given, but the current one is {current.name!r}, on "
            "which the processes of the other ranks are. Choose it with OPWEAVE_PLATFORM."
        )


def _own_store() -> TCPStore:
    if distributed.is_initialized():
        raise InvalidArgumentError(
            "This process is in a group of torch.distributed already, and an engine with several "
            "ranks makes one: shut the other engine down, or launch all ranks with torchrun."
        )
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def _port(store: Store) -> int:
    assert isinstance(store, TCPStore), store
    return store.port


def _threads(config: EngineConfig, platform: Platform, local: int) -> int | None:
    """Return the number of threads for each rank on this machine; None: unchanged."""
    if config.cpu_threads is not None:
        return config.cpu_threads
    if platform.device_type != "cpu" or os.environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, torch.get_num_threads() // local)


def _shut_down(peers: Peers, rank: RankWorker) -> None:
    peers.stop()
    try:
        rank.close()
    except OpweaveError as error:
        _log.warning("leaving the group of ranks: %s", error)
    finally:
        peers.close()
