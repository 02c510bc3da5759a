"""One rank: a worker, and its communicator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch.distributed.distributed_c10d import Store

from opweave.layers import tensor_parallel
from opweave.platforms import Platform
from opweave.plugins import resolve_obj_by_qualname
from opweave_engine.cache.plan import CachePlan
from opweave_engine.errors import NonFiniteLogitsError
from opweave_engine.loading.checkpoint import Progress
from opweave_engine.parallel.communicators import Communicator, RankGroup
from opweave_engine.parallel.executor.messages import Start
from opweave_engine.runner.step import SequenceStep
from opweave_engine.runner.worker import ModelFacts, Worker
from opweave_engine.sampling.sampling_request import Sampled


class RankWorker:
    """The worker of a rank, in the engine's process or in another one.

    Args:
        start: its identity and configuration.
        platform: names the worker and the communicator.
        store: the rendezvous store.

    Attributes:
        worker: the worker of this rank.
        communicator: collectives with the other ranks; None before :meth:`join`.
    """

    def __init__(self, start: Start, platform: Platform, store: Store) -> None:
        self._start, self._platform, self._store = start, platform, store
        self.communicator: Communicator | None = None
        worker: type[Worker] = resolve_obj_by_qualname(platform.get_worker_cls(start.config))
        self.worker = worker(start.model, start.config, platform, start.local_rank)
        self._threads = torch.get_num_threads()
        if start.threads is not None:
            torch.set_num_threads(start.threads)

    def join(self) -> None:
        """Initialize the device, and connect to the other ranks."""
        self.worker.init_device()
        kind: type[Communicator] = resolve_obj_by_qualname(
            self._platform.get_device_communicator_cls()
        )
        self.communicator = kind(
            RankGroup(
                self._start.rank,
                self._start.size,
                self.worker.device,
                self._platform.dist_backend,
                self._store,
                self._start.timeout,
            )
        )

    def load_model(self, progress: Progress | None = None) -> None:
        """Load this rank's part of the model."""
        assert self.communicator is not None, "join() comes first"
        with tensor_parallel(self.communicator.tensor_parallel()):
            self.worker.load_model(progress)

    def facts(self) -> ModelFacts:
        """Return the facts about the model that the engine needs."""
        return self.worker.facts()

    def allocate(self, plan: CachePlan) -> None:
        """Make the cache."""
        self.worker.allocate(plan)

    def warm_up(self) -> None:
        """Compile, and select every op."""
        self.worker.warm_up()

    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        """Compute one step."""
        return self.worker.execute(steps)

    def follow(self, steps: Sequence[SequenceStep]) -> None:
        """Compute one step with the other ranks, without returning the tokens."""
        with suppress(NonFiniteLogitsError):  # all ranks find them, and the first one tells
            self.worker.execute(steps)

    def abort(self) -> None:
        """Make a waiting collective raise; called from another thread."""
        if self.communicator is not None:
            self.communicator.abort()

    def close(self) -> None:
        """Leave the group."""
        if self.communicator is not None:
            self.communicator.close()
        torch.set_num_threads(self._threads)
