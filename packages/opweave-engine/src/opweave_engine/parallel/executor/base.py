"""The interface of executors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from opweave.config import EngineConfig
from opweave.platforms import Platform
from opweave_engine.cache.plan import CachePlan
from opweave_engine.loading.checkpoint import Progress
from opweave_engine.runner.step import SequenceStep
from opweave_engine.runner.worker import ModelFacts
from opweave_engine.sampling.sampling_request import Sampled


class Executor(ABC):
    """Runs the workers of one engine. The constructor loads the model on each worker.

    Args:
        model: the directory of a checkpoint.
        config: the engine's configuration.
        platform: names the worker.
        progress: called while loading, with the number of tensors loaded so far and in total.

    Attributes:
        facts: facts about the model; the memory is the minimum over all workers.

    Raises:
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.
    """

    facts: ModelFacts

    @abstractmethod
    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        platform: Platform,
        progress: Progress | None = None,
    ) -> None: ...

    @abstractmethod
    def allocate(self, plan: CachePlan) -> None:
        """Allocate the caches of all workers, and warm the workers up."""

    @abstractmethod
    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        """Compute one step on all workers, and return the token of each sequence that samples."""

    def check(self) -> None:  # noqa: B027 - a worker in this process fails in a call
        """Raise the error of a worker that died between calls.

        Raises:
            RankFailedError: a worker died.
        """

    def watch(self, call: Callable[[], None]) -> None:  # noqa: B027 - as above
        """Call *call*, in another thread, when a worker dies."""

    def interrupt(self) -> None:  # noqa: B027 - nothing interrupts a worker in this process
        """Make a step that waits for other workers raise; called from another thread.

        The workers cannot be used afterwards.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers, and free their resources. A second call is a no-op."""
