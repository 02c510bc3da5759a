"""What an engine asks of the workers, wherever they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from opweave.config import EngineConfig
from opweave.engine.cache.plan import CachePlan
from opweave.engine.loading.loader import Progress
from opweave.engine.runner.step import SequenceStep
from opweave.engine.runner.worker import ModelFacts
from opweave.engine.sampling.sampling_request import Sampled
from opweave.platforms import Platform


class Executor(ABC):
    """The workers of one engine. Building one loads the model on each.

    Args:
        model: the directory of a checkpoint.
        config: of the engine.
        platform: names the worker.
        progress: called while loading, with the number of tensors loaded so far and in total.

    Attributes:
        facts: what they say of the model; memory is that of the one with the least.

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
        """Make the caches of all workers, and warm them up."""

    @abstractmethod
    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        """Compute one step on all workers; return the next token of each that samples."""

    def check(self) -> None:  # noqa: B027 - a worker in this process fails in a call
        """Raise what a worker died of while nobody called it.

        Raises:
            RankFailedError: one did.
        """

    def watch(self, call: Callable[[], None]) -> None:  # noqa: B027 - as above
        """Call *call*, in another thread, when a worker dies."""

    def interrupt(self) -> None:  # noqa: B027 - nothing interrupts a worker in this process
        """Let a step that waits for other workers raise; called in another thread.

        The workers are of no use afterwards.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers, and free what they hold. A second call does nothing."""
