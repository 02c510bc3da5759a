"""A plugin in this process: imported and called once, and rolled back if that fails."""

from __future__ import annotations

import inspect
import os
import sys
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from opweave import transaction
from opweave.ir.errors import OpweaveError, described
from opweave.plugins import entry as entries
from opweave.plugins.discovery import PLUGINS, STRICT, PluginPolicy
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


# A plugin in this process: it is imported and called once, and its state is kept.


# Errors about taken names in these hooks are bugs of the plugin, not of the user.
_REGISTERING_HOOKS = frozenset({"import_kernels", "extend_cli"})

_LAZY = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


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

    def __init__(self, entry: entries.PluginEntry, policy: PluginPolicy) -> None:
        self.entry, self.policy = entry, policy
        self.state, self.detail = State.FOUND, ""
        self.error: entries.PluginError | None = None
        self.loaded: Any = None
        self.returned: Any = None
        self._called, self._seconds = False, 0.0
        self._transactions: list[transaction.Transaction] = []
        self._modules: frozenset[str] = frozenset()  # before it was imported
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
            tuple(label for entered in self._transactions for label in entered.registered),
        )

    def load(self) -> Any:
        """Import the object of the entry point once, and return it; a failure registers nothing.

        Raises:
            PluginError: the import failed.
        """
        if self.loaded is None:
            with self._attempt(), self._failing("could not be imported", entries.PluginImportError):
                self.loaded = self.entry.load()
            if self.entry.group not in (entries.GENERAL_PLUGINS, entries.PLATFORM_PLUGINS):
                self._succeed()
        return self.loaded

    def call(self) -> Any:
        """Import and call the entry point's function once; return its result.

        Its registrations belong to the plugin, and are rolled back if the import or the call fails.

        Raises:
            PluginError: it cannot be imported, is not a function, or raises.
        """
        if not self._called:
            self.load()
            with self._attempt():
                self._check_function()
                with self._failing("failed", entries.PluginFailedError):
                    self.returned = self.loaded()
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
            with self._failing(f"failed in {name}", entries.PluginHookError), self._registering():
                yield
        except BaseException as error:
            self._forget_modules(before)
            if not isinstance(error, entries.PluginHookError):
                raise
            cause = error.__cause__
            is_for_the_user = isinstance(cause, OpweaveError) and not isinstance(
                cause, entries.PluginError
            )
            if cause is not None and is_for_the_user and name not in _REGISTERING_HOOKS:
                raise cause from None
            self.error = self._with_remedy(error)
            raise self.error from cause
        self.error = None

    def fail(self, error: entries.PluginError) -> entries.PluginError:
        """Mark the plugin as failed; return the error, with a workaround."""
        self.state, self.error = State.FAILED, self._with_remedy(error)
        cause = error.__cause__
        short = f"{error}".rstrip(".").removeprefix(f"{self.entry} ")
        self.note_absence(f"failed to load: {short if cause is None else described(cause)}")
        return self.error

    def reject(self, error: entries.PluginError) -> entries.PluginError:
        """Roll back the plugin's registrations, and :meth:`fail`."""
        self._undo(self._modules)
        return self.fail(error)

    def _with_remedy(self, error: entries.PluginError) -> entries.PluginError:
        may_warn = self.policy.strict and not isinstance(error, entries.PluginHookError)
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
        note_absence(f"{entries.GROUPS[self.entry.group].kind} {self.entry.owner}", why)

    def _check_function(self) -> None:
        contract = entries.GROUPS[self.entry.group].entry_point
        problem = f"{self.entry} is {self.loaded!r}; it should be {contract}"
        if not callable(self.loaded):
            raise entries.PluginTypeError(problem)
        if any(is_lazy(self.loaded) for is_lazy in _LAZY):
            raise entries.PluginTypeError(
                f"{problem}. Calling an async function or a generator runs nothing of it"
            )
        try:
            inspect.signature(self.loaded).bind()
        except TypeError:
            raise entries.PluginTypeError(problem) from None
        except ValueError:
            return  # a C function without a signature

    @contextmanager
    def _failing(self, problem: str, kind: type[entries.PluginError]) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # errors of plugins must not end the program
            absent = isinstance(error, ModuleNotFoundError) and error.name == self.entry.package
            hint = (
                ". Restart Python if it was installed after this process started" if absent else ""
            )
            message = f"{self.entry} {problem}: {described(error)}{_place_of(error)}{hint}"
            raise kind(message) from error

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        if self.loaded is None:
            self._seconds = 0.0
        start, modules = time.perf_counter(), self._modules or frozenset(sys.modules)
        try:
            # The plugin's output goes to standard error: stdout is for the results of a command.
            with redirect_stdout(sys.stderr or sys.stdout), self._registering():
                yield
        except BaseException as error:
            self._undo(modules)
            if isinstance(error, entries.PluginError):
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


_STANDARD_LIBRARY = os.__file__.removesuffix("os.py")
_OPWEAVE = __file__.removesuffix("plugins/plugin.py")


def _place_of(error: BaseException) -> str:
    """Return the position in the plugin's code where *error* was raised, if any."""
    files = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    places = [
        f" (at {file}:{line})"
        for file, line in files
        if not file.startswith((_OPWEAVE, "<frozen"))
        # Other packages may be in a folder of the standard library.
        and ("-packages" in file or not file.startswith(_STANDARD_LIBRARY))
    ]
    return places[-1] if places else ""
