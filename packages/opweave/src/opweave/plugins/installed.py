"""The installed plugins; each is loaded once per process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.metadata import entry_points
from typing import Any

from opweave.base.owner import Owner
from opweave.ir.errors import OpweaveError
from opweave.plugins.claim import Claim
from opweave.plugins.errors import PlatformAbsentError
from opweave.plugins.loader import Loader
from opweave.plugins.platform import Choice, PlatformCandidate, choose
from opweave.plugins.policy import PLATFORM, PluginPolicy
from opweave.plugins.record import PluginRecord, State

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
