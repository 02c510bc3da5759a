"""Selection and construction of the platform of a process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from opweave.base.owner import Owner
from opweave.config.plugin_options import PluginOptions, set_plugin_options
from opweave.ir.errors import OpweaveError
from opweave.platforms import contract, handover
from opweave.platforms.base import Platform
from opweave.platforms.builtin import BUILTIN
from opweave.platforms.errors import PlatformContractError
from opweave.plugins import (
    BUILTIN_PLATFORMS,
    PLATFORM_API,
    Choice,
    PlatformCandidate,
    PluginWarning,
    choose_platform,
    hook,
    resolve_obj_by_qualname,
)
from opweave.plugins.errors import ReferenceNameError
from opweave.plugins.installed import loader
from opweave.plugins.platform import choose as best_candidate


class Found(NamedTuple):
    """A usable platform, and the candidates that it was chosen from."""

    platform: Platform
    chosen: PlatformCandidate
    candidates: tuple[PlatformCandidate, ...]
    why: str


def choose() -> Found:
    """Choose the platform of this process: that of its parent, or the claim with the best score.

    Raises:
        PluginError, PlatformError: see :func:`opweave.platforms.resolution`.
    """
    text = os.environ.get(handover.VARIABLE)
    if text:
        return imposed(handover.Handover.from_json(text))
    return _first_usable(choose_platform(BUILTIN))


def imposed(parent: handover.Handover) -> Found:
    """Return the platform of the parent process.

    Raises:
        PlatformMismatchError: a package has another version than in the parent.
        PluginError, PlatformError: the class cannot be used here.
    """
    parent.check_versions()
    contract.check_api(parent.claim.api, parent.claim.platform, PLATFORM_API)
    set_plugin_options(parent.options)
    chosen = PlatformCandidate(parent.name, parent.claim, parent.owner)
    platform = _made(chosen)
    return Found(platform, chosen, (chosen,), "the parent process runs on it")


def _first_usable(choice: Choice) -> Found:
    """Return the chosen platform, or the next best if it is broken and plugins are not strict."""
    chosen = choice.chosen
    try:
        return Found(_made(chosen), chosen, choice.candidates, _why(choice))
    except OpweaveError as error:
        others = tuple(each for each in choice.candidates if each is not chosen)
        if chosen.owner is None or choice.selected or not others or loader().policy.strict:
            raise
        warnings.warn(str(error), PluginWarning, stacklevel=2)
    return _first_usable(Choice(best_candidate(others), others, None))


def _why(choice: Choice) -> str:
    if choice.selected is not None:
        return f"OPWEAVE_PLATFORM={choice.selected}"
    return choice.chosen.claim.why or "its plugin claims this machine"


def _made(chosen: PlatformCandidate) -> Platform:
    _, claim, owner = chosen
    with _way_out(owner), hook(owner, "__init__"):
        platform = _object(claim.platform, owner)
    with hook(owner, "extend_cli"):
        platform.extend_cli(PluginOptions(platform.name))
    return platform


@contextmanager
def _way_out(owner: Owner | None) -> Iterator[None]:
    """Add to errors about a plugin's class how to disable the plugin."""
    try:
        yield
    except (PlatformContractError, ReferenceNameError) as error:
        if owner is None:
            raise
        setting = loader().policy.leaving_out(owner.plugin)
        message = f"{error}\nTo go on without plugin {owner}: {setting}"
        raise type(error)(message) from error


def _object(qualname: str, owner: Owner | None) -> Platform:
    cls = resolve_obj_by_qualname(qualname)
    if not (isinstance(cls, type) and issubclass(cls, Platform)):
        raise PlatformContractError(
            f"{qualname} is {cls!r}; it should be a class derived from Platform."
        )
    platform = cls()
    contract.check_object(platform, Platform, qualname)
    if owner is not None and platform.name in BUILTIN_PLATFORMS:
        raise PlatformContractError(
            f"{qualname}.name is {platform.name!r}, which is a platform of opweave. Choose another."
        )
    return platform
