"""The installed plugins of a process; each is loaded once, under one policy."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from opweave.ir.errors import OpweaveError, did_you_mean
from opweave.plugins.discovery import (
    PLATFORM,
    PLUGINS,
    PluginPolicy,
    find,
    in_order,
    misspelled_groups,
)
from opweave.plugins.entry import (
    GENERAL_PLUGINS,
    GROUPS,
    PLATFORM_PLUGINS,
    Claim,
    PlatformAbsentError,
    PlatformReentryError,
    PluginError,
    PluginRequirementError,
    PluginsFailedError,
    PluginWarning,
    UnknownGroupError,
    UnknownPluginError,
)
from opweave.plugins.platform import Choice, PlatformCandidate, choose, claim_of
from opweave.plugins.plugin import Plugin, PluginRecord, State
from opweave.registration import Owner

_loading: ContextVar[bool] = ContextVar("loading", default=False)
_asked: ContextVar[list[str] | None] = ContextVar("asked", default=None)


class Loader:
    """Every installed plugin, and its state.

    Args:
        points: the entry points of everything that is installed.
        policy: the user's settings about plugins.

    Raises:
        PluginPolicyError: the policy names a plugin that is not installed.
    """

    def __init__(self, points: Iterable[EntryPoint], policy: PluginPolicy) -> None:
        points = list(points)
        self.policy = policy
        self.misspelled = misspelled_groups(points)
        self.plugins = [Plugin(entry, policy) for entry in find(points)]
        for plugin in self._not_selected():
            plugin.detail = f"{PLATFORM}={policy.platform} selects another"
            plugin.note_absence(f"{PLATFORM}={policy.platform} leaves out")
        policy.check(plugin.entry.name for plugin in self.plugins)
        # Two locks: a general plugin may access the current platform while it loads.
        self._general_lock, self._platform_lock = threading.RLock(), threading.RLock()
        self._general_done = False
        for message in self.misspelled:
            warnings.warn(message, PluginWarning, stacklevel=3)

    def of_group(self, group: str) -> list[Plugin]:
        """Return the plugins of a group that the policy permits, by name.

        Raises:
            UnknownGroupError: there is no such group.
        """
        if group not in GROUPS:
            raise UnknownGroupError(
                f"unknown plugin group {group!r}. {did_you_mean(group, GROUPS)}"
            )
        found = [plugin for plugin in self.plugins if plugin.entry.group == group]
        return [plugin for plugin in found if plugin.state is not State.EXCLUDED]

    def find(self, group: str, name: str) -> Plugin:
        """Return a usable plugin.

        Raises:
            UnknownPluginError: no plugin has that name, or the policy disables it.
            PluginError: it cannot be used; the message says why.
        """
        for plugin in self.of_group(group):
            if plugin.entry.name == name:
                if plugin.entry.fault is not None and plugin.error is not None:
                    raise plugin.error
                return plugin
        known = [plugin.entry.name for plugin in self.of_group(group)]
        out = f" {PLUGINS} leaves it out." if not self.policy.permits(name) else ""
        raise UnknownPluginError(
            f"no {GROUPS[group].kind} {name!r} is installed or permitted.{out} "
            f"{did_you_mean(name, known)}"
        )

    def platform_of(self, owner: Owner) -> Plugin | None:
        """Return the platform plugin of that owner."""
        return next((p for p in self._platform_plugins() if p.entry.owner == owner), None)

    def load_group(self, group: str) -> dict[str, Any]:
        """Import every plugin of a group; return the objects of the entry points, uncalled.

        Raises:
            UnknownGroupError: there is no such group.
            PluginError: a plugin failed, in strict mode; all were tried.
        """
        errors: dict[str, PluginError] = {}
        for plugin in self.of_group(group):
            with _collected(plugin, errors):
                plugin.load()
        self._settle(errors)
        return {p.entry.name: p.loaded for p in self.of_group(group) if p.loaded is not None}

    def load_general(self) -> None:
        """Load every general plugin that is not loaded yet, requirements first.

        No-op if called by a plugin that is loading.

        Raises:
            PluginError: a plugin failed, in strict mode; all were tried, and the next call tries
                those that failed again.
        """
        if _loading.get():
            return
        with self._general_lock:
            if self._general_done:
                return
            token = _loading.set(True)
            try:
                errors = self._load_general()
            finally:
                _loading.reset(token)
            self._settle(errors)
            self._general_done = True

    def platform_claims(self) -> list[PlatformCandidate]:
        """Ask each platform plugin once whether its device is present.

        If ``OPWEAVE_PLATFORM`` is set, only the plugin of that name is imported and asked.

        Raises:
            PlatformReentryError: called by a platform plugin. PluginError: a plugin failed, in
            strict mode; all were tried.
        """
        self.refuse_reentry()
        errors: dict[str, PluginError] = {}
        found: list[PlatformCandidate] = []
        with self._platform_lock:
            for plugin in self._platform_plugins():
                with _collected(plugin, errors):
                    self._ask(plugin)
                if plugin.state in (State.CLAIMED, State.ACTIVE):
                    owner = plugin.entry.owner
                    found.append(PlatformCandidate(plugin.entry.name, plugin.returned, owner))
        self._settle(errors)
        return found

    def refuse_reentry(self) -> None:
        """Raise an error if a platform plugin asks for the platform during its resolution.

        Raises:
            PlatformReentryError: called by such a plugin.
        """
        asked = _asked.get()
        if asked is not None:
            asked.append("current_platform")
            raise PlatformReentryError(
                "current_platform is asked for by the function of a platform plugin, which is "
                "called to find out what it is"
            )

    def _not_selected(self) -> list[Plugin]:
        if self.policy.platform is None:
            return []
        selected = self._platform_plugins()
        return [plugin for plugin in self.of_group(PLATFORM_PLUGINS) if plugin not in selected]

    def _platform_plugins(self) -> list[Plugin]:
        selected = self.policy.platform
        if selected is None:
            return self.of_group(PLATFORM_PLUGINS)
        everything = [p for p in self.plugins if p.entry.group == PLATFORM_PLUGINS]
        return [plugin for plugin in everything if plugin.entry.name == selected]

    def _ask(self, plugin: Plugin) -> None:
        if plugin.state in (State.DECLINED, State.CLAIMED, State.ACTIVE):
            return
        _refuse_fault(plugin)
        reentered: list[str] = []
        token = _asked.set(reentered)
        try:
            returned = plugin.call()
        except PluginError:
            if not reentered:
                raise
        finally:
            _asked.reset(token)
        if reentered:  # even if the plugin caught the error
            problem = (
                f"{plugin.entry} asks for current_platform, which its function is called to find "
                "out. Do that in a method of the platform instead, such as import_kernels"
            )
            raise plugin.reject(PlatformReentryError(problem))
        try:
            claim = claim_of(plugin.entry, returned)
        except PluginError as error:
            raise plugin.reject(error) from None
        plugin.returned, plugin.detail = claim, "" if claim is None else claim.why
        plugin.state = State.DECLINED if claim is None else State.CLAIMED
        plugin.note_absence("says that its device is not here" if claim is None else None)

    def _load_general(self) -> dict[str, PluginError]:
        plugins = self.of_group(GENERAL_PLUGINS)
        usable = {p.entry.name: p for p in plugins if p.entry.fault is None}
        order = in_order([plugin.entry for plugin in usable.values()])
        errors: dict[str, PluginError] = {}
        for plugin in plugins:
            with _collected(plugin, errors):
                _refuse_fault(plugin)
        for name, error in order.errors.items():
            errors[name] = usable[name].fail(error)
        for entry in order.entries:
            plugin = usable[entry.name]
            with _collected(plugin, errors):
                self._check_requirements(plugin)
                plugin.call()
        return errors

    def _check_requirements(self, plugin: Plugin) -> None:
        group = [p for p in self.plugins if p.entry.group == plugin.entry.group]
        states = {p.entry.name: p.state for p in group}
        for name in plugin.entry.requires:
            state = states.get(name)
            if state is State.LOADED:
                continue
            missing = {
                None: f"which is not installed. {did_you_mean(name, states)}".rstrip("."),
                State.EXCLUDED: f"which {PLUGINS} leaves out",
            }.get(state, "which failed to load")
            raise plugin.fail(
                PluginRequirementError(f"{plugin.entry} requires {name!r}, {missing}")
            )

    def _settle(self, errors: dict[str, PluginError]) -> None:
        """Raise the errors, or warn about them."""
        found = list(errors.values())
        if not found:
            return
        if self.policy.strict:
            raise found[0] if len(found) == 1 else PluginsFailedError(tuple(found))
        for error in found:
            warnings.warn(str(error), PluginWarning, stacklevel=3)


@contextmanager
def _collected(plugin: Plugin, errors: dict[str, PluginError]) -> Iterator[None]:
    """Collect an error, and continue with the next plugin."""
    try:
        yield
    except PluginError as error:
        errors.setdefault(plugin.entry.name, error)


def _refuse_fault(plugin: Plugin) -> None:
    if plugin.entry.fault is not None:
        raise plugin.error or plugin.fail(plugin.entry.fault)


# The loader of this process.


_lock = threading.Lock()
_loader: Loader | None = None


def loader() -> Loader:
    """Return the plugins of this process; the first call searches the environment.

    Raises:
        PluginPolicyError: a setting names a plugin that is not installed.
    """
    global _loader
    with _lock:
        if _loader is None:
            points = entry_points()
            every = [point for group in points.groups for point in points.select(group=group)]
            _loader = Loader(every, PluginPolicy.from_environment())
        return _loader


def load_general_plugins() -> None:
    """Load every general plugin that is installed, once in this process.

    opweave does so itself before it parses its command line, before an op is first used, and in
    every process of an engine. Registrations of a plugin that fails are rolled back.

    Raises:
        PluginError: a plugin failed; all were tried. ``OPWEAVE_PLUGINS_STRICT=0`` makes it a
            :class:`PluginWarning`. The next call tries again those that failed.
    """
    loader().load_general()


def load_plugins_by_group(group: str) -> dict[str, Callable[..., Any]]:
    """Import the plugins of a group, and return the objects of their entry points by name.

    Nothing is called. Plugins that the environment disables are not imported.

    Raises:
        UnknownGroupError: (a LookupError) there is no such group.
        PluginError: a plugin failed; all were tried.
    """
    return loader().load_group(group)


def choose_platform(builtin: Mapping[str, Callable[[], Claim | None]]) -> Choice:
    """Choose the platform with the highest claim among *builtin* platforms and plugins.

    If ``OPWEAVE_PLATFORM`` is set, only the platform of that name is asked.

    Args:
        builtin: by name, what returns the claim of each platform that comes with opweave.

    Raises:
        PlatformConflictError: two claim it with the same score.
        PlatformAbsentError: the selected platform, or every one, does not find its device.
        PlatformReentryError: called by a platform plugin. PluginError: a plugin failed.
    """
    selected = loader().policy.platform
    candidates = loader().platform_claims()
    for name, ask in builtin.items():
        if selected in (None, name) and (claim := ask()) is not None:
            candidates.append(PlatformCandidate(name, claim, None))
    if not candidates:
        raise PlatformAbsentError(_absent(selected))
    chosen = choose(candidates)
    if chosen.owner is not None and (plugin := loader().platform_of(chosen.owner)) is not None:
        plugin.state = State.ACTIVE
    return Choice(chosen, tuple(candidates), selected)


def refuse_reentry() -> None:
    """Raise an error if a platform plugin asks for the platform while it is being resolved.

    Does not wait for a lock. A plugin that catches the error still counts as failed.

    Raises:
        PlatformReentryError: called by such a plugin.
    """
    loader().refuse_reentry()


@contextmanager
def hook(owner: Owner | None, name: str) -> Iterator[None]:
    """Run a hook of the platform of *owner*, such as ``"import_kernels"``, in the block.

    Registrations in the block belong to the owner and are rolled back if it raises. None is opweave
    itself.

    Raises:
        PluginHookError: the block raised; the message names the plugin and a workaround. An
            :class:`opweave.ir.errors.OpweaveError`, which is for the user, passes as it is.
    """
    plugin = None if owner is None else loader().platform_of(owner)
    with nullcontext() if plugin is None else plugin.hook(name):
        yield


def plugin_report() -> list[PluginRecord]:
    """Return the state of every installed plugin, without loading any.

    Raises:
        PluginPolicyError: a setting names a plugin that is not installed.
    """
    return [plugin.record for plugin in loader().plugins]


def plugin_problems() -> list[str]:
    """Return a message for each problem of plugins: failures, misspelled groups, settings."""
    try:
        found = loader()
    except OpweaveError as error:
        return [str(error)]
    errors = [str(plugin.error) for plugin in found.plugins if plugin.error is not None]
    return [*errors, *found.misspelled]


def _absent(selected: str | None) -> str:
    if selected is None:
        return "no platform claims this machine."
    return (
        f"{PLATFORM}={selected} selects a platform whose device is not here. Unset {PLATFORM} to "
        "use the one that is."
    )
