"""A plugin in this process: it is imported and called once, with a time limit."""

from __future__ import annotations

import inspect
import linecache
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import copy_context
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType
from typing import Any, TypeGuard, TypeVar

from opweave import transaction
from opweave.ir.errors import OpweaveError, described
from opweave.plugins.discovery import PLUGINS, STRICT, TIMEOUT, PluginPolicy
from opweave.plugins.entry import (
    GENERAL_PLUGINS,
    GROUPS,
    PLATFORM_PLUGINS,
    PluginEntry,
    PluginError,
    PluginFailedError,
    PluginHookError,
    PluginImportError,
    PluginTimeoutError,
    PluginTypeError,
)
from opweave.registration import note_absence, note_way_out, owned_by

# The state of each plugin in this process.


class State(StrEnum):
    """The state of a plugin."""

    FOUND = "found"
    """Installed, not used yet."""
    EXCLUDED = "excluded"
    """Disabled by the environment."""
    LOADED = "loaded"
    """Imported, and called if its group requires it."""
    DECLINED = "declined"
    """A platform whose device is not present."""
    CLAIMED = "claimed"
    """A platform whose device is present."""
    ACTIVE = "active"
    """The current platform."""
    FAILED = "failed"
    """It ended with an error."""


@dataclass(frozen=True)
class PluginRecord:
    """A plugin, as :func:`opweave.plugins.plugin_report` shows it.

    Attributes:
        name: its name in settings.
        group: the group of its entry point.
        value: the imported object, ``"package.module:function"``.
        distribution: its distribution.
        version: version of the distribution.
        state: its state.
        seconds: duration of import and call.
        error: the message of its error, or None.
        detail: why it was disabled, or why its device is present.
        registered: its registrations, such as ``"op acme_scale"``.
    """

    name: str
    group: str
    value: str
    distribution: str
    version: str
    state: State
    seconds: float
    error: str | None
    detail: str
    registered: tuple[str, ...]


# Runs a plugin's function with a time limit, and reports where it hangs.
#
# Import time has a separate limit: importing a package from a cold disk may take seconds, while
# a plugin's own code takes milliseconds.
#
# In the main thread, a signal ends the function, even if it waits for a lock, a socket or a
# child process. A function that ignores the signal, in C code or by catching every exception, is
# reported while it runs. Other threads do not receive signals: there the function runs in a
# helper thread, which is abandoned if it does not end.


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
            self.overtime = OvertimeError(limit, doing, _place_in(stack))
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


def _place_in(stack: list[FrameType]) -> str:
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


# A plugin in this process: it is imported and called once, and its state is kept.


# Errors about taken names in these hooks are bugs of the plugin, not of the user.
_REGISTERING_HOOKS = frozenset({"import_kernels", "extend_cli"})

_log = logging.getLogger(__name__)

_LAZY = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)

IMPORT_SECONDS = 30.0  # importing a package from a cold disk may take ten


class Plugin:
    """A plugin and its state. A failed plugin can be retried.

    Attributes:
        entry: the declaration of its distribution.
        state: its state.
        error: the error it failed with, including a workaround.
        loaded: the object of its entry point, once imported.
        returned: the return value of its function, once called.
        detail: why it was disabled, or why its device is present.
    """

    def __init__(self, entry: PluginEntry, policy: PluginPolicy) -> None:
        self.entry, self.policy = entry, policy
        self.state, self.detail = State.FOUND, ""
        self.error: PluginError | None = None
        self.loaded: Any = None
        self.returned: Any = None
        self._called, self._seconds = False, 0.0
        self._transactions: list[transaction.Transaction] = []
        self._modules: frozenset[str] = frozenset()  # those there before it was imported
        note_way_out(entry.owner, policy.leaving_out(entry.name))
        if not policy.permits(entry.name):
            self.state, self.detail = State.EXCLUDED, f"left out by {PLUGINS}"
            self.note_absence(f"{PLUGINS} leaves out")
        elif entry.fault is not None:
            self.fail(entry.fault)

    def __repr__(self) -> str:
        return f"<Plugin {self.entry.name} {self.state}>"

    @property
    def record(self) -> PluginRecord:
        """Its state as plain data."""
        entry = self.entry
        return PluginRecord(
            entry.name,
            entry.group,
            entry.value,
            entry.owner.distribution,
            entry.owner.version,
            self.state,
            round(self._seconds, 6),
            None if self.error is None else str(self.error),
            self.detail,
            tuple(what for entered in self._transactions for what in entered.registered),
        )

    def load(self) -> Any:
        """Import the object of the entry point once, and return it; a failure registers nothing.

        Raises:
            PluginError: the import failed or exceeded its time limit.
        """
        if self.loaded is None:
            with self._attempt():
                self.loaded = self._limited("imported", PluginImportError, self.entry.load)
            if self.entry.group not in (GENERAL_PLUGINS, PLATFORM_PLUGINS):
                self._succeed()
        return self.loaded

    def call(self) -> Any:
        """Import and call the entry point's function once; return its result.

        Its registrations belong to the plugin, and are rolled back if the import or the call fails.

        Raises:
            PluginError: it cannot be imported, is not a function, raises, or exceeds its time
            limit.
        """
        if not self._called:
            self.load()
            with self._attempt():
                self._check_function()
                self.returned = self._limited("called", PluginFailedError, self.loaded)
            self._called = True
            self._succeed()
        return self.returned

    @contextmanager
    def hook(self, name: str) -> Iterator[None]:
        """Run a hook of the plugin in the block; registrations belong to the plugin.

        Raises:
            PluginHookError: the block raised; its registrations were rolled back.
            OpweaveError: the block raised it for the user, for example to reject a configuration.
        """
        before = frozenset(sys.modules)
        try:
            with self._failing(name, PluginHookError), self._registering():
                yield
        except BaseException as error:
            self._forget_modules(before)
            if not isinstance(error, PluginHookError):
                raise
            cause = error.__cause__
            if _is_for_the_user(cause) and name not in _REGISTERING_HOOKS:
                raise cause from None
            self.error = self._with_remedy(error)
            raise self.error from cause
        self.error = None

    def fail(self, error: PluginError) -> PluginError:
        """Mark the plugin as failed; return the error, with a workaround."""
        self.state, self.error = State.FAILED, self._with_remedy(error)
        cause = error.__cause__
        short = f"{error}".rstrip(".").removeprefix(f"{self.entry} ")
        self.note_absence(f"failed to load: {short if cause is None else described(cause)}")
        return self.error

    def reject(self, error: PluginError) -> PluginError:
        """Roll back the plugin's registrations, and :meth:`fail`."""
        self._undo(self._modules)
        return self.fail(error)

    def _with_remedy(self, error: PluginError) -> PluginError:
        may_warn = self.policy.strict and not isinstance(error, PluginHookError)
        warned = f"; {STRICT}=0 makes this a warning" if may_warn else ""
        full = type(error)(
            f"{f'{error}'.rstrip('.')}. To go on without it: "
            f"{self.policy.leaving_out(self.entry.name)}, or pip uninstall "
            f"{self.entry.owner.distribution}{warned}."
        )
        full.__cause__ = error.__cause__
        return full.with_traceback(error.__traceback__)

    def note_absence(self, why: str | None) -> None:
        """Record why the plugin registers nothing, for error messages; None: it does."""
        note_absence(f"{GROUPS[self.entry.group].kind} {self.entry.owner}", why)

    def _check_function(self) -> None:
        wanted = f"{self.entry} is {self.loaded!r}; it should be {self._contract}"
        if not callable(self.loaded):
            raise PluginTypeError(wanted)
        if any(is_lazy(self.loaded) for is_lazy in _LAZY):
            raise PluginTypeError(
                f"{wanted}. Calling an async function or a generator runs nothing of it"
            )
        try:
            inspect.signature(self.loaded).bind()
        except TypeError:
            raise PluginTypeError(wanted) from None
        except ValueError:
            return  # a C function without a signature

    @property
    def _contract(self) -> str:
        return GROUPS[self.entry.group].entry_point

    def _limited(self, verb: str, kind: type[PluginError], step: Callable[[], Any]) -> Any:
        seconds = self.policy.timeout
        limits = Limits(seconds, max(seconds, IMPORT_SECONDS))
        try:
            with self._failing(verb, kind):
                return run_within(limits, step, self._report_stuck)
        except kind as error:
            if isinstance(late := error.__cause__, OvertimeError):
                raise self._overtime(late) from None
            raise

    def _overtime(self, late: OvertimeError) -> PluginTimeoutError:
        what = "importing it" if late.doing == "import" else "its function"
        return PluginTimeoutError(
            f"{self.entry} hangs: {what} takes more than {late.seconds:g} s. It is at "
            f"{late.where}. If it needs longer, set {TIMEOUT} to more seconds"
        )

    def _report_stuck(self, late: OvertimeError) -> None:
        _log.error("It cannot be ended, and goes on: %s", self._with_remedy(self._overtime(late)))

    @contextmanager
    def _failing(self, verb: str, kind: type[PluginError]) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # errors of plugins must not end the program
            how = "failed" if kind is PluginFailedError else f"could not be {verb}"
            how = f"failed in {verb}" if kind is PluginHookError else how
            raise kind(f"{self.entry} {how}: {described(error)}{_place_of(error)}") from error

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        if self.loaded is None:
            self._seconds = 0.0
        start, modules = time.perf_counter(), self._modules or frozenset(sys.modules)
        try:
            with self._registering():
                yield
        except BaseException as error:
            self._undo(modules)
            if isinstance(error, PluginError):
                raise self.fail(error) from error.__cause__
            raise
        finally:
            self._seconds += time.perf_counter() - start
        self._modules = modules

    @contextmanager
    def _registering(self) -> Iterator[None]:
        # Detached: a plugin keeps its registrations, even if another plugin triggered its load.
        with owned_by(self.entry.owner), transaction.detached(), transaction.begin() as entered:
            yield
        self._transactions.append(entered)

    def _succeed(self) -> None:
        self.state, self.error = State.LOADED, None
        self.note_absence(None)

    def _undo(self, modules: Collection[str]) -> None:
        """Roll back everything, so that the next attempt starts from scratch."""
        while self._transactions:
            self._transactions.pop().roll_back()
        self.loaded, self._modules, self._called = None, frozenset(), False
        self._forget_modules(modules)

    def _forget_modules(self, before: Collection[str]) -> None:
        """Let the next attempt import the plugin's modules again."""
        package = self.entry.package
        for name in sys.modules.keys() - before:
            if name == package or name.startswith(f"{package}."):
                del sys.modules[name]


def _is_for_the_user(error: BaseException | None) -> TypeGuard[OpweaveError]:
    return isinstance(error, OpweaveError) and not isinstance(error, PluginError)


def _place_of(error: BaseException) -> str:
    """Return the position in the plugin's code where *error* was raised, if any."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OWN) and not is_standard(frame.filename)
    ]
    return f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


_OWN = __file__.removesuffix("plugins/plugin.py")
