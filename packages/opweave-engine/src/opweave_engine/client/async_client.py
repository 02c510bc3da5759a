"""Base class for asyncio clients: their name, event loop and end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Lock

from opweave_engine.errors import EngineDeadError, InvalidArgumentError
from opweave_engine.loading.checkpoint import checkpoint_path


class AsyncClient:
    """Base class of :class:`~opweave_engine.EngineClient` implementations.

    Args:
        model: the directory of a checkpoint.
        model_name: by default the name of the directory.
    """

    def __init__(self, model: str | Path, model_name: str | None) -> None:
        self._model_name = model_name or checkpoint_path(model).resolve().name
        self._dead_with: BaseException | None = None
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._enters = Lock()

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def is_running(self) -> bool:
        return not self._is_closed and self.dead_with is None

    @property
    def dead_with(self) -> BaseException | None:
        return self._dead_with

    def _enter_loop(self) -> asyncio.AbstractEventLoop | None:
        """Use the running event loop from now on, and return the previous one.

        Raises:
            InvalidArgumentError: the previous loop still runs, in another thread.
        """
        running = asyncio.get_running_loop()
        with self._enters:
            before = self._loop
            if before is not None and before is not running and before.is_running():
                raise InvalidArgumentError(
                    "The engine is in use by an event loop that runs in another thread. Use it "
                    "from that loop (asyncio.run_coroutine_threadsafe), or share an LLM between "
                    "threads."
                )
            self._loop = running
        return before

    def _why_not(self) -> EngineDeadError:
        """Return the error for a request while the engine does not run."""
        if (reason := self.dead_with) is None:
            return EngineDeadError("The engine is shut down, and takes no requests.")
        error = EngineDeadError(f"The engine died: {reason!r}.")
        error.__cause__ = reason
        return error
