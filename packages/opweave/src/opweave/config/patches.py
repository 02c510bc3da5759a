"""Changes of a configuration by a platform, with reasons."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from opweave.config.values import DEFAULT, Config, Origin
from opweave.ir.errors import OpweaveError, SettingError, did_you_mean

C = TypeVar("C", bound=Config)
_log = logging.getLogger(__name__)


class PatchError(OpweaveError, ValueError):
    """A patch does not name a value of the configuration, or contradicts another patch."""


@dataclass(frozen=True)
class ConfigPatch:
    """A change of one value of the configuration.

    Args:
        path: the attribute path in the :class:`opweave.config.EngineConfig`:
            ``"cache.block_size"``.
        value: the new value.
        reason: the reason for the log: ``"kernel alignment"``.
        force: override a value that the user set.
    """

    path: str
    value: Any
    reason: str
    force: bool = False


def apply_patches(config: C, patches: Iterable[ConfigPatch], source: str) -> C:
    """Return *config* with all *patches* applied together, and log each.

    Values set by the user stay unless the patch has ``force``. The origin of a new value is
    recorded: ``config.cache.origin("block_size")``.

    Args:
        config: the configuration.
        patches: the changes.
        source: the origin of the patches: ``"platform acme"``.

    Raises:
        PatchError: an item is not a patch, does not name a value or lacks a reason; or two patches
            contradict each other.
        SettingError: a value is malformed, or the values do not fit together.
    """
    by_path: dict[str, ConfigPatch] = {}
    for patch in patches:
        _check(config, patch, source)
        before = by_path.setdefault(patch.path, patch)
        if before.value != patch.value:
            raise PatchError(
                f"{source} sets {patch.path} to {before.value!r} ({before.reason}) and to "
                f"{patch.value!r} ({patch.reason}). Return one of the two patches."
            )
    changes: dict[tuple[str, ...], dict[str, Origin]] = {}
    for patch in by_path.values():
        *parents, name = patch.path.split(".")
        if _is_due(config, patch, source):
            origin = Origin(source, patch.value, patch.reason, by_user=False)
            changes.setdefault(tuple(parents), {})[name] = origin
    try:
        return _changed(config, changes)
    except SettingError as error:
        raise SettingError(f"{source}: {error}") from error


def _is_due(config: Config, patch: ConfigPatch, source: str) -> bool:
    """Return whether *patch* applies and changes a value, and log the outcome."""
    section, name = _section(config, patch.path)
    old, origin = getattr(section, name), section.origin(name)
    if old == patch.value:
        return False
    if origin.by_user and not patch.force:
        _log.info(
            "%s would set %s %s→%s: %s. The value is kept: %s",
            source, patch.path, old, patch.value, patch.reason, origin.source,
        )  # fmt: skip
        return False
    level = logging.WARNING if origin.by_user else logging.INFO
    _log.log(level, "%s set %s %s→%s: %s", source, patch.path, old, patch.value, patch.reason)
    return True


def _changed(config: C, changes: Mapping[tuple[str, ...], Mapping[str, Origin]]) -> C:
    origins = dict(changes.get((), {}))
    for part in dict.fromkeys(path[0] for path in changes if path):
        below = {path[1:]: values for path, values in changes.items() if path[:1] == (part,)}
        value = _changed(getattr(config, part), below)
        origins[part] = Origin(DEFAULT, value, by_user=False)
    return config.with_values(origins) if origins else config


def _check(config: Config, patch: object, source: str) -> None:
    if not isinstance(patch, ConfigPatch):
        raise PatchError(f"{source} returned {patch!r}, which is not a ConfigPatch.")
    if not patch.reason.strip():
        raise PatchError(f"{source} sets {patch.path} without a reason. Give one for the log.")
    try:
        _section(config, patch.path)
    except PatchError as error:
        raise PatchError(f"{source}: {error}") from None


def _section(config: Config, path: str) -> tuple[Config, str]:
    """Return the section that has the value at *path*, and the value's name in it."""
    section, value = config, config
    for index, name in enumerate(path.split(".")):
        section = value
        if not isinstance(section, Config) or name not in section.names():
            known = section.names() if isinstance(section, Config) else ()
            where = ".".join(path.split(".")[:index]) or type(config).__name__
            raise PatchError(
                f"{path!r} is not a value of the configuration: {where} has no {name!r}. "
                f"{did_you_mean(name, known)}"
            )
        value = getattr(section, name)
    if isinstance(value, Config):
        raise PatchError(
            f"{path!r} is a section of the configuration. Name a value in it, such as "
            f"'{path}.{value.names()[0]}'."
        )
    return section, name


def origins(config: Config, path: str = "") -> dict[str, Origin]:
    """Return the origin of every value of *config* by path, in the order of the tree."""
    found: dict[str, Origin] = {}
    for name in config.names():
        value = getattr(config, name)
        if isinstance(value, Config):
            found |= origins(value, f"{path}{name}.")
        else:
            found[f"{path}{name}"] = config.origin(name)
    return found
