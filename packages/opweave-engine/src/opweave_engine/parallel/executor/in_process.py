"""Executor with a single worker in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from opweave.config import EngineConfig
from opweave.platforms import Platform
from opweave.plugins import resolve_obj_by_qualname
from opweave_engine.cache.plan import CachePlan
from opweave_engine.errors import EngineDeadError, InvalidArgumentError
from opweave_engine.loading.checkpoint import Progress
from opweave_engine.parallel.executor.base import Executor
from opweave_engine.runner.cpu_threads import cpu_threads
from opweave_engine.runner.step import SequenceStep
from opweave_engine.runner.worker import Worker
from opweave_engine.sampling.sampling_request import Sampled


class InProcessExecutor(Executor):
    """Runs a single worker in this process.

    Attributes:
        worker: the worker; None after :meth:`shutdown`.

    Raises:
        InvalidArgumentError: *config* asks for more ranks.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        platform: Platform,
        progress: Progress | None = None,
    ) -> None:
        if config.parallel.tensor_parallel_size > 1:
            raise InvalidArgumentError(
                f"tensor_parallel_size={config.parallel.tensor_parallel_size}, but "
                f"{type(self).__name__} runs one rank. The platform {platform.name!r} chose it."
            )
        worker: type[Worker] = resolve_obj_by_qualname(platform.get_worker_cls(config))
        with ExitStack() as stack:
            stack.enter_context(cpu_threads(config.cpu_threads))
            self.worker: Worker | None = worker(model, config, platform)
            self.worker.init_device()
            self.worker.load_model(progress)
            self.facts = self.worker.facts()
            self._threads = stack.pop_all()  # until the engine shuts down

    def allocate(self, plan: CachePlan) -> None:
        worker = self._running()
        worker.allocate(plan)
        worker.warm_up()

    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        return self._running().execute(steps)

    def shutdown(self) -> None:
        self.worker = None
        self._threads.close()

    def _running(self) -> Worker:
        if self.worker is None:
            raise EngineDeadError("The engine is shut down.")
        return self.worker
