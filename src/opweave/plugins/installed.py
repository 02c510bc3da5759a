"""The plugins that are installed where this process runs; each is loaded once in it."""

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
    """Return the plugins of this process; the environment is read and searched at the first call.

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
    every process of an engine. What a plugin registers that fails is taken back.

    Raises:
        PluginError: a plugin failed; all were tried. ``OPWEAVE_PLUGINS_STRICT=0`` makes it a
            :class:`PluginWarning`. The next call tries again those that failed.
    """
    loader().load_general()


def load_plugins_by_group(group: str) -> dict[str, Callable[..., Any]]:
    """Import the plugins of a group, and return what their entry points name, by plugin.

    Nothing is called. Plugins that the environment leaves out are not imported.

    Raises:
        UnknownGroupError: (a LookupError) there is no such group.
        PluginError: a plugin failed; all were tried.
    """
    return loader().load_group(group)


def choose_platform(builtin: Mapping[str, Callable[[], Claim | None]]) -> Choice:
    """Find the platform of this machine: the highest claim of *builtin* platforms and plugins.

    Where ``OPWEAVE_PLATFORM`` is set, only the platform of that name is asked.

    Args:
        builtin: by name, what returns the claim of each platform that comes with opweave.

    Raises:
        PlatformConflictError: two claim it with the same score.
        PlatformAbsentError: the platform that is selected, or every one, says its device is not
            here.
        PlatformReentryError: it is a platform plugin that asks.
        PluginError: a plugin failed.
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
    """Refuse to find the platform for a platform plugin that is being asked for its claim.

    It need not wait for a lock. A plugin that catches the error has failed all the same.

    Raises:
        PlatformReentryError: that is the case.
    """
    loader().refuse_reentry()


@contextmanager
def hook(owner: Owner | None, name: str) -> Iterator[None]:
    """Run a hook of the platform of *owner* in the block, such as ``"import_kernels"``.

    What the block registers is the owner's; if it raises, none of it stays. For None, which is
    opweave's own, nothing is special.

    Raises:
        PluginHookError: the block raised; the message names the plugin and the way out. An
            :class:`opweave.ir.errors.OpweaveError`, which is for the user, passes as it is.
    """
    plugin = None if owner is None else loader().platform_of(owner)
    with nullcontext() if plugin is None else plugin.hook(name):
        yield


def plugin_report() -> list[PluginRecord]:
    """Return what became of every plugin that is installed; loads none.

    Raises:
        PluginPolicyError: a setting names a plugin that is not installed.
    """
    return [plugin.record for plugin in loader().plugins]


def plugin_problems() -> list[str]:
    """Return what is wrong with plugins, one message each: failures, misspelt groups, settings."""
    try:
        found = loader()
    except OpweaveError as error:
        return [str(error)]
    errors = [str(plugin.error) for plugin in found.plugins if plugin.error is not None]
    return [*errors, *found.misspelt]


def _absent(selected: str | None) -> str:
    if selected is None:
        return "no platform claims this machine."
    return (
        f"{PLATFORM}={selected} selects a platform whose device is not here. Unset {PLATFORM} to "
        "use the one that is."
    )
