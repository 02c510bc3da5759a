"""Compiles grammars in processes, which may crash, hang or run out of memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from opweave.config.child_process import ChildWorker, ending
from opweave.config.daemon_threads import DaemonThreads
from opweave_engine.errors import EngineDeadError, EngineError
from opweave_engine.structured import grammar_program
from opweave_engine.structured.vocabulary import VocabularyArguments

_CLOSING_SECONDS = 5.0  # to finish a grammar that the engine's own process compiles


class GrammarProcess(ChildWorker):
    """A process that compiles grammars, and the queue and the thread that give it work.

    Both start with the first grammar. After a crash or a timeout, the next grammar gets a new
    process.

    Args:
        seconds: time limit of a grammar.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(Path(grammar_program.__file__), None)
        self.seconds = seconds
        self._is_closed = False
        self._jobs = DaemonThreads(1, "opweave-grammars")
        self._busy = threading.Lock()

    def environment(self) -> Mapping[str, str]:
        # glibc reserves address space for each arena, which is what the process has to save.
        return {"MALLOC_ARENA_MAX": "1"}

    def start_error(self, code: int) -> Exception:
        self.check_open()
        return EngineError(f"the process that compiles grammars ended with {ending(code)}.")

    def submit(self, job: Callable[[], None]) -> None:
        """Run *job* in the thread, after those submitted before."""
        self._jobs.submit(self._run, job)

    def check_open(self) -> None:
        """Raise EngineDeadError if :meth:`close` was called."""
        if self._is_closed:
            raise EngineDeadError("The engine is shut down, and compiles no grammars.")

    def check(self, vocabulary: VocabularyArguments, grammar: str) -> None:
        """Compile *grammar* in the process, and compute its first mask; only a job may call this.

        Raises:
            TimeoutError: the time limit has passed.
            ValueError: the grammar does not compile, or ended the process.
            EngineDeadError: :meth:`close` was called.
        """
        self.check_open()
        self._task = vocabulary, self.seconds
        process = self.running()
        try:
            process.connection.send(grammar)
            why = process.receive(self.seconds)
        except TimeoutError:
            self.end()
            raise
        except (EOFError, OSError):
            code = self.end()
            self.check_open()
            raise ValueError(
                f"it is too complex: compiling it ended a process with {ending(code)}"
            ) from None
        if why:
            raise ValueError(why)

    def close(self) -> None:
        """Kill the process; jobs that have not finished fail."""
        self._is_closed = True
        self.kill()
        if self._busy.acquire(timeout=_CLOSING_SECONDS):
            self.end()
            self._busy.release()

    def _run(self, job: Callable[[], None]) -> None:
        with self._busy:
            job()
