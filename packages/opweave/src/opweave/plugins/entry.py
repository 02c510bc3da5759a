"""Plugins as declared by their distributions: groups, claims, qualified names, errors."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Any

from opweave.ir.errors import OpweaveError, did_you_mean
from opweave.registration import Owner

# Errors of plugins, one class per condition.
#
# Messages name the entry point, its group, its distribution, the cause and a workaround.


class PluginError(OpweaveError, RuntimeError):
    """Base class of the errors of :mod:`opweave.plugins`."""


class PluginPolicyError(PluginError, ValueError):
    """``OPWEAVE_PLUGINS``, ``OPWEAVE_PLATFORM`` or another setting is not valid."""


class UnknownGroupError(PluginError, LookupError):
    """The plugin group does not exist."""


class UnknownPluginError(PluginError, LookupError):
    """The group does not have a plugin of that name."""


class DuplicatePluginError(PluginError, ValueError):
    """Two distributions declare a plugin of the same group and name."""


class ReservedPluginNameError(PluginError, ValueError):
    """A platform plugin has the name of one of opweave's platforms."""


class PluginImportError(PluginError):
    """The entry point of a plugin cannot be imported."""


class PluginFailedError(PluginError):
    """The function of a plugin raised."""


class PluginHookError(PluginError):
    """A hook of a plugin's platform raised."""


class PluginsFailedError(PluginError):
    """Several plugins failed; the message has the error of each, and so has ``errors``."""

    def __init__(self, errors: tuple[PluginError, ...]) -> None:
        super().__init__("\n".join([f"{len(errors)} plugins failed:", *map(str, errors)]))
        self.errors = errors

    def __reduce__(self) -> tuple[type[PluginsFailedError], tuple[tuple[PluginError, ...]]]:
        return type(self), (self.errors,)


class PluginRequirementError(PluginError):
    """A plugin's requirement is not installed, disabled, failed, or part of a cycle."""


class PluginTypeError(PluginError, TypeError):
    """An entry point or its return value has the wrong type for its group."""


class ClaimApiError(PluginError):
    """A platform plugin's claim is for another version of the platform interface."""


class PlatformConflictError(PluginError):
    """Several platforms claim the device with the same score."""


class PlatformAbsentError(PluginError):
    """The device of the platform selected by ``OPWEAVE_PLATFORM`` is not present."""


class PlatformReentryError(PluginError):
    """A platform plugin's function accessed the current platform during its resolution."""


class ReferenceNameError(PluginError, ImportError):
    """A qualified name, such as ``package.module.Class``, cannot be resolved."""


class PluginWarning(UserWarning):
    """A plugin failed or its declaration has no effect; opweave continues without it."""


# The entry point groups and their contracts.


PREFIX = "opweave."
PLATFORM_PLUGINS = "opweave.platform_plugins"
"""Plugins that provide a platform."""
GENERAL_PLUGINS = "opweave.general_plugins"
"""Plugins that register ops, kernels, layers, models and options."""
IO_PROCESSOR_PLUGINS = "opweave.io_processor_plugins"
"""Plugins that process requests with their own input and output formats."""
STAT_LOGGER_PLUGINS = "opweave.stat_logger_plugins"
"""Plugins that log engine statistics."""
ENGINE_PARTS = "opweave.conformance"
"""The group through which an engine contributes to the checks of platforms."""
COMPANION_GROUPS = (
    "opweave.commands", "opweave.model_runner", "opweave.option_hints", ENGINE_PARTS,
)  # fmt: skip
"""Groups of packages that extend opweave; their entry points are not plugins."""


@dataclass(frozen=True, slots=True)
class PluginGroup:
    """The contract of a plugin group.

    Attributes:
        name: the name of the group in a distribution's entry points.
        kind: the name for a plugin of the group in messages.
        entry_point: the required type of the entry point, and its return value if it is called.
        when: when opweave imports and calls it, and in which process.
    """

    name: str
    kind: str
    entry_point: str
    when: str


GROUPS = {
    group.name: group
    for group in (
        PluginGroup(
            PLATFORM_PLUGINS,
            "platform plugin",
            "a function without arguments that returns the qualified name of a platform class, a "
            "Claim, or None where its device is absent",
            "in every process, once, when the current platform is first asked for",
        ),
        PluginGroup(
            GENERAL_PLUGINS,
            "general plugin",
            "a function without arguments that registers things; what it returns is ignored",
            "in every process, once, before the command line is parsed or an op is first used",
        ),
        PluginGroup(
            IO_PROCESSOR_PLUGINS,
            "I/O processor plugin",
            "a function without arguments that returns the qualified name of an I/O processor",
            "in the process that takes requests, when a model or an option names it",
        ),
        PluginGroup(
            STAT_LOGGER_PLUGINS,
            "stat logger plugin",
            "a class that logs the statistics of an engine",
            "in the process that takes requests, when an engine starts",
        ),
    )
}
"""Every group, by the name that entry points have."""


# The return value of a platform plugin whose device is present.


PLATFORM_API = 1
"""Version of the platform interface of this opweave."""

BUILTIN_PLATFORMS = ("cpu", "cuda", "rocm", "tpu", "xpu")
"""Names of opweave's own platforms, which are reserved."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A platform plugin's claim to the device of this process.

    Attributes:
        platform: the qualified name of the platform's class, ``"package.module.Class"`` or
            ``"package.module:Class"``; imported only if the claim is chosen.
        api: the version of the platform interface that the class is written for.
        score: the highest claim is chosen. The CPU claims 0, the other platforms of opweave 50.
        why: why the device is considered present, for ``opweave doctor``.
    """

    platform: str
    api: int
    score: int = 100
    why: str = ""


# Resolves qualified names to objects.


def resolve_obj_by_qualname(name: str) -> Any:
    """Return the object named ``"package.module.Class"`` or ``"package.module:Class"``.

    Raises:
        ReferenceNameError: (an ImportError) the name is malformed, or there is no such module or
            no such object in it. Errors of the import are not caught.
    """
    module_name, attributes = split_qualname(name)
    value: Any = _import(module_name, name)
    for attribute in attributes:
        try:
            value = getattr(value, attribute)
        except AttributeError:
            public = [name for name in vars(value) if not name.startswith("_")]
            raise ReferenceNameError(
                f"{name!r} names nothing: {module_name} has no {attribute!r}. "
                f"{did_you_mean(attribute, public)}"
            ) from None
    return value


def split_qualname(name: str) -> tuple[str, list[str]]:
    """Split a qualified name into module and attributes, without importing.

    Raises:
        ReferenceNameError: (an ImportError) the name is malformed.
    """
    text = name if isinstance(name, str) else ""
    module, _, attributes = text.partition(":") if ":" in text else text.rpartition(".")
    parts = [*module.split("."), *attributes.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise ReferenceNameError(
            f"{name!r} is not a qualified name; expected 'package.module.Class' or "
            "'package.module:Class'."
        )
    return module, attributes.split(".")


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a dependency of the module is missing
        raise ReferenceNameError(
            f"{name!r} names nothing: there is no module {error.name!r}. Install the package that "
            "has it, or mend the name."
        ) from None


# A plugin as declared by its distribution.


_BRACKETS = re.compile(r"\[(.*)\]\s*$")
_RELATIONS = ("requires", "after")


@dataclass(frozen=True)
class PluginEntry:
    """An installed plugin, which is not imported.

    Attributes:
        name: its name in settings.
        group: its group, one of :data:`opweave.plugins.GROUPS`.
        value: the object to import, ``"package.module:function"``.
        owner: plugin, distribution and version.
        requires: plugins of the group that must be loaded before.
        after: plugins of the group that are loaded before if they are installed.
        fault: why it cannot be used, or an empty string.
    """

    name: str
    group: str
    value: str
    owner: Owner
    requires: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    fault: PluginError | None = None
    _point: EntryPoint | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, point: EntryPoint) -> PluginEntry:
        """Parse an entry point."""
        distribution = point.dist
        owner = Owner(
            point.name,
            "unknown distribution" if distribution is None else distribution.name,
            "?" if distribution is None else distribution.version,
        )
        value = _BRACKETS.sub("", point.value).strip()
        entry = cls(point.name, point.group, value, owner, _point=point)
        if point.pattern.match(point.value) is None:
            problem = f"{point.value!r} is not a package.module:function"
            return replace(entry, fault=PluginTypeError(f"{entry} cannot be imported: {problem}"))
        try:
            relations = _relations(entry, point.value)
        except PluginTypeError as error:
            return replace(entry, fault=error)
        return replace(entry, requires=relations["requires"], after=relations["after"])

    def __str__(self) -> str:
        return (
            f"{GROUPS[self.group].kind} {self.name!r} ({self.value}, of {self.owner.distribution} "
            f"{self.owner.version})"
        )

    @property
    def package(self) -> str:
        """The top-level package to import."""
        return self.value.partition(":")[0].partition(".")[0].strip()

    def load(self) -> Any:
        """Import the object of the entry point."""
        assert self._point is not None, self
        return self._point.load()


def _relations(entry: PluginEntry, value: str) -> dict[str, tuple[str, ...]]:
    relations: dict[str, tuple[str, ...]] = dict.fromkeys(_RELATIONS, ())
    brackets = _BRACKETS.search(value)
    for token in filter(None, map(str.strip, brackets[1].split(",") if brackets else ())):
        relation, _, name = token.partition(".")
        if relation not in _RELATIONS or not name:
            raise PluginTypeError(
                f"{entry}: its entry point says [{token}]. Expected requires.NAME or after.NAME, "
                "where NAME is another plugin of its group."
            )
        relations[relation] = (*relations[relation], name)
    return relations
