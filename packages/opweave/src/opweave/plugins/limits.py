"""Runs a plugin's function with a time limit, and reports where it hangs.

Import time has a separate limit: importing a package from a cold disk may take seconds, while a
plugin's own code takes milliseconds.

In the main thread, a signal ends the function, even if it waits for a lock, a socket or a child
process. A function that ignores the signal, in C code or by catching every exception, is reported
while it runs. Other threads do not receive signals: there the function runs in a helper thread,
which is abandoned if it does not end.
"""

from __future__ import annotations

import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext, redirect_stdout
from contextvars import copy_context
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

_TICK = 0.02  # seconds between two samples of the function
_MOST_PER_LOOK = 0.1  # seconds; longer gaps mean that the process was suspended
_MANY_ALARMS = 50  # of which one comes with each tick
_IMPORTER = "<frozen importlib._bootstrap>"
_ALARM = signal.SIGALRM


@dataclass(frozen=True)
class Limits:
    """Time limits of a function in seconds: its own code, and imports."""

    running: float
    importing: float


class OvertimeError(BaseException):
    """A function took longer than its limit; not an Exception, so that it does not catch it.

    Attributes:
        seconds: the limit.
        doing: ``"import"`` or ``"run"``.
        where: its position, as ``file:line, in function: source``.
    """

    def __init__(self, seconds: float, doing: str, where: str) -> None:
        super().__init__(f"takes more than {seconds:g} s; it is at {where}")
        self.seconds, self.doing, self.where = seconds, doing, where


def run_within(
    limits: Limits,
    function: Callable[[], T],
    when_stuck: Callable[[OvertimeError], None] = lambda late: None,
) -> T:
    """Return ``function()``.

    Its output goes to standard error: standard output is for the results of a command.

    Args:
        when_stuck: called in a separate thread if the function cannot be ended.

    Raises:
        OvertimeError: it takes longer than *limits*.
    """
    in_main = threading.current_thread() is threading.main_thread()
    with redirect_stdout(sys.stderr) if sys.stderr is not None else nullcontext():
        # A handler that C code has set is None, and could not be put back.
        if in_main and signal.getsignal(_ALARM) is not None:
            return _run_here(limits, function, when_stuck)
        return _run_in_helper(limits, function)


class _Watch:
    """Samples a thread, and accumulates the time of its activities."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.ident = threading.get_ident()
        self.overtime: OvertimeError | None = None
        self._spent = {"run": 0.0, "import": 0.0}
        self._last = time.monotonic()

    def look(self) -> OvertimeError | None:
        """Add the time since the last sample; return the error if a limit is exceeded."""
        now = time.monotonic()
        stack = _stack(sys._current_frames().get(self.ident))
        imports = any(frame.f_code.co_filename == _IMPORTER for frame in stack)
        doing, limit = "run", self.limits.running
        if imports:
            doing, limit = "import", self.limits.importing
        self._spent[doing] += min(now - self._last, _MOST_PER_LOOK)
        self._last = now
        if self.overtime is None and stack and self._spent[doing] > limit:
            self.overtime = OvertimeError(limit, doing, _place(stack))
        return self.overtime


def _run_here(
    limits: Limits, function: Callable[[], T], when_stuck: Callable[[OvertimeError], None]
) -> T:
    watch, ended, here = _Watch(limits), threading.Event(), sys._getframe()
    previous = signal.getsignal(_ALARM)

    def stop(number: int, frame: FrameType | None) -> None:
        if watch.overtime is None:  # the alarm is of others, such as the caller of this
            if callable(previous):
                previous(number, frame)
        elif _stack(frame, here):  # it may have just ended
            raise watch.overtime from None

    def send_alarms() -> None:
        alarms = 0
        while not ended.wait(_TICK):
            if (late := watch.look()) is not None:  # repeatedly: the function may catch the first
                signal.pthread_kill(watch.ident, _ALARM)
                alarms += 1
                if alarms == _MANY_ALARMS:
                    when_stuck(late)

    watcher = threading.Thread(target=send_alarms, daemon=True)
    signal.signal(_ALARM, stop)
    try:
        watcher.start()
        return _call(function)
    finally:
        ended.set()
        watcher.join()
        signal.signal(_ALARM, previous)


def _run_in_helper(limits: Limits, function: Callable[[], T]) -> T:
    watch, outcome = _Watch(limits), Future[T]()

    def work() -> None:
        watch.ident = threading.get_ident()
        try:
            outcome.set_result(_call(function))
        except BaseException as error:  # raised again in the waiting thread
            outcome.set_exception(error)

    threading.Thread(target=copy_context().run, args=(work,), daemon=True).start()
    while not wait([outcome], _TICK).done:
        if (late := watch.look()) is not None:
            raise late
    return outcome.result()


def _call(function: Callable[[], T]) -> T:
    """Call *function*; later frames belong to it."""
    return function()


def _stack(frame: FrameType | None, caller: FrameType | None = None) -> list[FrameType]:
    """Return the frames down to that of :func:`_call`, innermost first; none if it does not run.

    Args:
        caller: of the :func:`_call` that is meant; None: the innermost.
    """
    frames = []
    while frame is not None:
        frames.append(frame)
        if frame.f_code is _call.__code__ and caller in (None, frame.f_back):
            return frames
        frame = frame.f_back
    return []


def _place(stack: list[FrameType]) -> str:
    """Return the position of the innermost frame outside the standard library."""
    own = (frame for frame in stack[:-1] if not is_standard(frame.f_code.co_filename))
    frame = next(own, stack[0])
    code = frame.f_code
    line = frame.f_lineno or code.co_firstlineno  # between two lines a frame is in none
    return f"{code.co_filename}:{line}, in {code.co_name}{_source(code.co_filename, line)}"


def _source(filename: str, line: int) -> str:
    try:
        source = linecache.getline(filename, line).strip()
    except Exception:  # file names of code are arbitrary, and must not stop the watch
        return ""
    return f": {source}" if source else ""


def is_standard(filename: str) -> bool:
    """Return whether a source file belongs to the standard library."""
    if "-packages" in filename:  # which may lie below the standard library
        return False
    return filename.startswith(("<frozen", _STANDARD))


_STANDARD = threading.__file__.removesuffix("threading.py")
