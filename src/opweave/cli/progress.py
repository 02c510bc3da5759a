"""Progress on stderr, where somebody looks at it."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from opweave.cli.output import err


class ProgressBar:
    """A bar that goes away when it is done.

    Call it with ``(done, total)``, and with what is at work if that is worth knowing; or never.
    """

    def __init__(self, what: str, *, counts: bool = True) -> None:
        self._what = what
        counter = (MofNCompleteColumn(),) if counts else ()
        columns = (TextColumn("{task.description}"), BarColumn(), *counter, TimeElapsedColumn())
        self._bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int, item: str = "") -> None:
        described = f"{self._what} {item}".rstrip()
        self._bar.update(self._task, completed=done, total=total, description=described)
