"""Runs a plugin's function with a time limit, and reports where it hangs.

Import time has a separate limit: importing a package from a cold disk may take seconds, while a
plugin's own code takes milliseconds.

In the main thread, a signal ends the function, even if it waits for a lock, a socket or a child
process. A function that ignores the signal, in C code or by catching every exception, is reported
while it runs. Other threads do not receive signals: there the function runs in a helper thread,
which is abandoned if it does not end.
"""

from __future__ import annotations

import ctypes
import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import copy_context
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

_TICK = 0.02  # seconds between two samples of the function
_MOST_PER_LOOK = 0.1  # seconds; longer gaps mean that the process was suspended
_MANY_ALARMS = 50  # of which one comes with each tick
_IMPORTER = "<frozen importlib._bootstrap>"
_ALARM = getattr(signal, "SIGALRM", None)


@dataclass(frozen=True)
class Limits:
    """Time limits of a function in seconds: its own code, and imports."""

    running: float
    importing: float


class OvertimeError(Exception):
    """A function took longer than its limit.

    Attributes:
        seconds: the limit.
        doing: ``"import"`` or ``"run"``.
        where: its position, as ``file:line, in function: source``.
    """

    def __init__(self, seconds: float, doing: str, where: str) -> None:
        super().__init__(f"takes more than {seconds:g} s; it is at {where}")
        self.seconds, self.doing, self.where = seconds, doing, where


class _Stop(BaseException):
    """Raised inside the function to end it; not an Exception, so that plugins do not catch it."""

    def __init__(self, watch: _Watch | None = None) -> None:
        super().__init__()
        self.watch = watch


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
        if in_main and _takes_alarms():
            return _run_here(limits, function, when_stuck)
        return _run_in_helper(limits, function)


class _Watch:
    """Samples a thread, and accumulates the time of its activities."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.ident = threading.get_ident()
        self.ended = threading.Event()
        self.overtime: OvertimeError | None = None
        self._spent = {"run": 0.0, "import": 0.0}
        self._last = time.monotonic()

    def look(self) -> bool:
        """Add the time since the last sample; return whether a limit is exceeded."""
        now = time.monotonic()
        frame = sys._current_frames().get(self.ident)
        doing, where = _activity(frame)
        self._spent[doing] += min(now - self._last, _MOST_PER_LOOK)
        self._last = now
        limit = self.limits.importing if doing == "import" else self.limits.running
        if self.overtime is None and where and self._spent[doing] > limit:
            self.overtime = OvertimeError(limit, doing, where)
        return self.overtime is not None


def _run_here(
    limits: Limits, function: Callable[[], T], when_stuck: Callable[[OvertimeError], None]
) -> T:
    watch = _Watch(limits)
    watcher = threading.Thread(target=_alarm_when_late, args=(watch, when_stuck), daemon=True)
    with _alarms_stop(watch, sys._getframe()):
        watcher.start()
        try:
            return _call(function)
        except _Stop as stop:
            if stop.watch is not watch or watch.overtime is None:
                raise  # it ends a function that this one is part of
            raise watch.overtime from None
        finally:
            watch.ended.set()
            watcher.join()


def _run_in_helper(limits: Limits, function: Callable[[], T]) -> T:
    watch = _Watch(limits)
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        watch.ident = threading.get_ident()
        try:
            results.append(_call(function))
        except BaseException as error:  # raised again in the waiting thread
            errors.append(error)
        finally:
            watch.ended.set()

    threading.Thread(target=copy_context().run, args=(work,), daemon=True).start()
    while not watch.ended.wait(_TICK):
        if watch.look():
            _stop_thread(watch.ident)
            assert watch.overtime is not None
            raise watch.overtime
    if errors:
        raise errors[0]
    return results[0]


def _call(function: Callable[[], T]) -> T:
    """Call *function*; later frames belong to it."""
    return function()


def _activity(frame: FrameType | None) -> tuple[str, str]:
    """Return the activity and the position of the function, or None if it does not run."""
    innermost, doing = frame, "run"
    while frame is not None:
        if frame.f_code is _call.__code__:
            return doing, _place(innermost, frame)
        if frame.f_code.co_filename == _IMPORTER:
            doing = "import"
        frame = frame.f_back
    return "run", ""


def _place(frame: FrameType | None, bottom: FrameType) -> str:
    """Return the innermost frame outside the standard library."""
    found = frame
    while frame is not None and frame is not bottom:
        if not is_standard(frame.f_code.co_filename):
            found = frame
            break
        frame = frame.f_back
    if found is None:
        return ""
    code = found.f_code
    line = found.f_lineno or code.co_firstlineno  # between two lines a frame is in none
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


def _takes_alarms() -> bool:
    # A handler that C code has set could not be put back.
    return _ALARM is not None and signal.getsignal(_ALARM) is not None


@contextmanager
def _alarms_stop(watch: _Watch, caller: FrameType) -> Iterator[None]:
    """Let an alarm end the function that *caller* runs, if *watch* says so.

    Other alarms go to the previous handler.
    """
    assert _ALARM is not None
    previous = signal.getsignal(_ALARM)

    def stop(number: int, frame: FrameType | None) -> None:
        if watch.overtime is None:
            if callable(previous):
                previous(number, frame)
        elif _is_inside(frame, caller):  # it may have just ended
            raise _Stop(watch)

    signal.signal(_ALARM, stop)
    try:
        yield
    finally:
        signal.signal(_ALARM, previous)


def _is_inside(frame: FrameType | None, caller: FrameType) -> bool:
    while frame is not None:
        if frame.f_code is _call.__code__ and frame.f_back is caller:
            return True
        frame = frame.f_back
    return False


def _alarm_when_late(watch: _Watch, when_stuck: Callable[[OvertimeError], None]) -> None:
    assert _ALARM is not None
    alarms = 0
    while not watch.ended.wait(_TICK):
        if watch.look():  # repeatedly: the function may catch the first
            signal.pthread_kill(watch.ident, _ALARM)
            alarms += 1
            if alarms == _MANY_ALARMS:
                assert watch.overtime is not None
                when_stuck(watch.overtime)


def _stop_thread(ident: int) -> None:
    """Raise :class:`_Stop` in another thread, as soon as it runs Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_Stop))
