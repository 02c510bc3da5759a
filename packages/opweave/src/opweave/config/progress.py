"""Progress bars on terminals."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ProgressBar:
    """A transient progress bar, shown on terminals only.

    Call it with ``(done, total)`` and, optionally, the name of the current item.

    Args:
        what: description of the work.
        then: description of uncounted work that follows; shown when ``done`` reaches ``total``.
        counts: whether to show numbers.
        console: the console, by default standard error.
    """

    def __init__(
        self, what: str, *, then: str = "", counts: bool = True, console: Console | None = None
    ) -> None:
        self._what, self._then = what, then
        console = console or Console(stderr=True)
        counter = (MofNCompleteColumn(),) if counts else ()
        columns = (TextColumn("{task.description}"), BarColumn(), *counter, TimeElapsedColumn())
        is_shown = console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=not is_shown)
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, what: str) -> ProgressBar:
        """Begin counted work after that of the bar, and return the bar to call for it."""
        self._bar.remove_task(self._task)
        self._task, self._what, self._then = self._bar.add_task(what, total=None), what, ""
        return self

    def __call__(self, done: int, total: int, item: str = "") -> None:
        if done >= total and self._then:
            self._bar.remove_task(self._task)
            self._task, self._what, self._then = self._bar.add_task(self._then, total=None), "", ""
        if not self._what:  # the uncounted work has begun
            return
        described = f"{self._what} {item}".rstrip()
        self._bar.update(self._task, completed=done, total=total, description=described)
