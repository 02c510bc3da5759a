"""The installed plugins of a process; each is loaded once, under one policy.

The rollback of a failed plugin is in :mod:`opweave.plugins.plugin`.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from opweave.ir.errors import OpweaveError, did_you_mean
from opweave.plugins import entry as entries
from opweave.plugins.discovery import (
    PLATFORM,
    PLUGINS,
    PluginPolicy,
    find,
    in_order,
    misspelled_groups,
)
from opweave.plugins.plugin import Plugin, PluginRecord, State
from opweave.registration import Owner, bound

# Claims of platform plugins, and the choice of a platform.


class PlatformCandidate(NamedTuple):
    """A platform whose device is present.

    Attributes:
        name: its name.
        claim: its claim.
        owner: the plugin that provides it, or None for opweave's own.
    """

    name: str
    claim: entries.Claim
    owner: Owner | None


class Choice(NamedTuple):
    """The platform of this machine.

    Attributes:
        chosen: that platform.
        candidates: all platforms that claim the machine, including the chosen one.
        selected: the value of ``OPWEAVE_PLATFORM``, or None.
    """

    chosen: PlatformCandidate
    candidates: tuple[PlatformCandidate, ...]
    selected: str | None


def claim_of(entry: entries.PluginEntry, returned: object) -> entries.Claim | None:
    """Convert the return value of a platform plugin to a claim.

    Raises:
        PluginTypeError: it is not a claim, a qualified name or None, or its score or ``why`` has
        the wrong type.
        ClaimApiError: the claim is for another version of the platform interface.
    """
    if returned is None:
        return None
    if isinstance(returned, str):  # the class declares its version itself
        returned = entries.Claim(returned, entries.PLATFORM_API)
    try:
        entries.split_qualname(returned.platform if isinstance(returned, entries.Claim) else "")
    except entries.ReferenceNameError:
        contract = entries.GROUPS[entries.PLATFORM_PLUGINS].entry_point
        raise entries.PluginTypeError(
            f"{entry} returned {returned!r}; it should be {contract}"
        ) from None
    assert isinstance(returned, entries.Claim)
    if returned.api != entries.PLATFORM_API:
        api: object = returned.api  # plugins may return any type
        is_newer = isinstance(api, int) and api > entries.PLATFORM_API
        remedy = "Upgrade opweave, or install an older" if is_newer else "Install a newer"
        raise entries.ClaimApiError(
            f"{entry} is for version {returned.api} of the platform interface, and this opweave "
            f"has version {entries.PLATFORM_API}. {remedy} {entry.owner.distribution}"
        )
    _check_fields(entry, returned)
    return returned


def _check_fields(entry: entries.PluginEntry, claim: entries.Claim) -> None:
    score: object = claim.score  # plugins may return any type
    why: object = claim.why
    is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
    if not (is_number and math.isfinite(claim.score)):
        raise entries.PluginTypeError(
            f"{entry} returned a claim with the score {score!r}; it should be a finite number, "
            f"such as {entries.Claim('', entries.PLATFORM_API).score}"
        )
    if not isinstance(why, str):
        raise entries.PluginTypeError(
            f"{entry} returned a claim with why={why!r}; it should be a string, such as "
            "'the driver is loaded'"
        )


def choose(candidates: Sequence[PlatformCandidate]) -> PlatformCandidate:
    """Return the candidate with the highest score; *candidates* are not empty.

    Raises:
        PlatformConflictError: two have the highest score.
    """
    highest = max(candidate.claim.score for candidate in candidates)
    best = [candidate for candidate in candidates if candidate.claim.score == highest]
    if len(best) > 1:
        claims = "; ".join(sorted(map(_describe, best)))
        raise entries.PlatformConflictError(
            f"{len(best)} platforms claim this machine: {claims}. Choose one with "
            f"{PLATFORM}={min(candidate.name for candidate in best)}, or uninstall the others."
        )
    return best[0]


def _describe(candidate: PlatformCandidate) -> str:
    who = "opweave" if candidate.owner is None else str(candidate.owner)
    why = f", because {candidate.claim.why}" if candidate.claim.why else ""
    return f"{candidate.name} of {who}{why}"


# The installed plugins, and their states.


_loading: ContextVar[bool] = ContextVar("loading", default=False)
# The names that the function of a platform plugin must not access; None outside such a function.
_reentered: ContextVar[list[str] | None] = ContextVar("reentered", default=None)


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
        for plugin in self.of_group(entries.PLATFORM_PLUGINS):
            if policy.platform not in (None, plugin.entry.name):
                plugin.detail = f"{PLATFORM}={policy.platform} selects another"
                plugin.note_absence(f"{PLATFORM}={policy.platform} leaves out")
        policy.check(plugin.entry.name for plugin in self.plugins)
        # Two locks: a general plugin may access the current platform while it loads.
        self._general_lock, self._platform_lock = threading.RLock(), threading.RLock()
        self._general_done = False
        for message in self.misspelled:
            warnings.warn(message, entries.PluginWarning, stacklevel=3)

    def of_group(self, group: str) -> list[Plugin]:
        """Return the plugins of a group that the policy permits, by name.

        Raises:
            UnknownGroupError: there is no such group.
        """
        if group not in entries.GROUPS:
            raise entries.UnknownGroupError(
                f"unknown plugin group {group!r}. {did_you_mean(group, entries.GROUPS)}"
            )
        plugins = [plugin for plugin in self.plugins if plugin.entry.group == group]
        return [plugin for plugin in plugins if plugin.state is not State.EXCLUDED]

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
        names = [plugin.entry.name for plugin in self.of_group(group)]
        out = f" {PLUGINS} leaves it out." if not self.policy.permits(name) else ""
        raise entries.UnknownPluginError(
            f"no {entries.GROUPS[group].kind} {name!r} is installed or permitted.{out} "
            f"{did_you_mean(name, names)}"
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
        errors: dict[str, entries.PluginError] = {}
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
            with bound(_loading, True):
                errors = self._load_general()
            self._settle(errors)
            self._general_done = True

    def platform_claims(self) -> list[PlatformCandidate]:
        """Ask each platform plugin once whether its device is present.

        If ``OPWEAVE_PLATFORM`` is set, only the plugin of that name is imported and asked.

        Raises:
            PlatformReentryError: called by a platform plugin. PluginError: a plugin failed, in
            strict mode; all were tried.
        """
        refuse_reentry()
        errors: dict[str, entries.PluginError] = {}
        candidates: list[PlatformCandidate] = []
        with self._platform_lock:
            for plugin in self._platform_plugins():
                with _collected(plugin, errors):
                    self._ask(plugin)
                if plugin.state in (State.CLAIMED, State.ACTIVE):
                    owner = plugin.entry.owner
                    candidates.append(PlatformCandidate(plugin.entry.name, plugin.returned, owner))
        self._settle(errors)
        return candidates

    def _platform_plugins(self) -> list[Plugin]:
        """Return the selected platform plugin, even if it is excluded; by default, all."""
        selected = self.policy.platform
        if selected is None:
            return self.of_group(entries.PLATFORM_PLUGINS)
        platforms = [p for p in self.plugins if p.entry.group == entries.PLATFORM_PLUGINS]
        return [plugin for plugin in platforms if plugin.entry.name == selected]

    def _ask(self, plugin: Plugin) -> None:
        if plugin.state in (State.DECLINED, State.CLAIMED, State.ACTIVE):
            return
        _refuse_fault(plugin)
        reentered: list[str] = []
        try:
            with bound(_reentered, reentered):
                returned = plugin.call()
        except entries.PluginError:
            if not reentered:
                raise
        if reentered:  # even if the plugin caught the error
            problem = (
                f"{plugin.entry} asks for current_platform, which its function is called to find "
                "out. Do that in a method of the platform instead, such as import_kernels"
            )
            raise plugin.reject(entries.PlatformReentryError(problem))
        try:
            claim = claim_of(plugin.entry, returned)
        except entries.PluginError as error:
            raise plugin.reject(error) from None
        plugin.returned, plugin.detail = claim, "" if claim is None else claim.why
        plugin.state = State.DECLINED if claim is None else State.CLAIMED
        plugin.note_absence("says that its device is not here" if claim is None else None)

    def _load_general(self) -> dict[str, entries.PluginError]:
        plugins = self.of_group(entries.GENERAL_PLUGINS)
        usable = {p.entry.name: p for p in plugins if p.entry.fault is None}
        order = in_order([plugin.entry for plugin in usable.values()])
        errors: dict[str, entries.PluginError] = {}
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
                entries.PluginRequirementError(f"{plugin.entry} requires {name!r}, {missing}")
            )

    def _settle(self, errors: dict[str, entries.PluginError]) -> None:
        """Raise the errors, or warn about them."""
        if errors and self.policy.strict:
            first, *others = errors.values()
            raise entries.PluginsFailedError((first, *others)) if others else first
        for error in errors.values():
            warnings.warn(str(error), entries.PluginWarning, stacklevel=3)


@contextmanager
def _collected(plugin: Plugin, errors: dict[str, entries.PluginError]) -> Iterator[None]:
    """Collect an error, and continue with the next plugin."""
    try:
        yield
    except entries.PluginError as error:
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


def choose_platform(builtin: Mapping[str, Callable[[], entries.Claim | None]]) -> Choice:
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
        raise entries.PlatformAbsentError(
            "no platform claims this machine."
            if selected is None
            else f"{PLATFORM}={selected} selects a platform whose device is not here. Unset "
            f"{PLATFORM} to use the one that is."
        )
    chosen = choose(candidates)
    if chosen.owner is not None and (plugin := loader().platform_of(chosen.owner)) is not None:
        plugin.state = State.ACTIVE
    return Choice(chosen, tuple(candidates), selected)


def refuse_reentry() -> None:
    """Raise an error if a platform plugin asks for the platform while it is being resolved.

    A plugin that catches the error still counts as failed.

    Raises:
        PlatformReentryError: called by such a plugin.
    """
    reentered = _reentered.get()
    if reentered is not None:
        reentered.append("current_platform")
        raise entries.PlatformReentryError(
            "current_platform is asked for by the function of a platform plugin, which is called "
            "to find out what it is"
        )


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
        plugins, misspelled = loader().plugins, loader().misspelled
    except OpweaveError as error:
        return [str(error)]
    return [*(str(plugin.error) for plugin in plugins if plugin.error is not None), *misspelled]
