"""The platform to verify, how it is found, and code that runs in new processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from opweave.config.child_process import inherited_environment
from opweave.conformance.subject import Check, UnknownPlatformError, raised
from opweave.ir.errors import OpweaveError, did_you_mean
from opweave.platforms import Platform, resolution
from opweave.platforms.builtin import BUILTIN
from opweave.plugins import PLATFORM_PLUGINS, Claim, resolve_obj_by_qualname
from opweave.plugins.entry import ENGINE_PARTS

# The subject of verification: a platform, and how a process finds it.


@dataclass(frozen=True)
class PlatformSubject:
    """A platform.

    Attributes:
        platform: the object, as opweave builds it.
        claim: the function that claims the device, ``"package.module:function"``; None if no
            installed plugin claims it, and the platform is given by its class.
        claimant: the name by which ``OPWEAVE_PLATFORM`` selects it.
        current: whether this process runs on it.
    """

    platform: Platform
    claim: str | None = None
    claimant: str | None = None
    current: bool = False

    def __str__(self) -> str:
        return f"platform {self.platform.name}"

    @property
    def qualname(self) -> str:
        """Module and name of its class."""
        cls = type(self.platform)
        return f"{cls.__module__}.{cls.__qualname__}"


# Finding the platform to verify: by its name, by its class, or the one of this process.


_BUILTIN = "opweave.platforms.builtin"


def find_platform(name: str | None = None) -> PlatformSubject:
    """Return the platform of that name, or of this process.

    A platform that this process does not run on gets its kernels imported, so that they can be
    verified in addition to those of the current one.

    Args:
        name: a value of ``OPWEAVE_PLATFORM`` (a platform of opweave, or the entry point of a
            plugin), or the qualified name of a class.

    Raises:
        UnknownPlatformError: the platform is unknown, or its device is not present.
        ReferenceNameError: the class does not exist.
        PlatformContractError: it violates the contract of ``Platform``.
    """
    claims, current = _claims(), resolution().chosen.name
    if name is None or name == current:
        return PlatformSubject(resolution().platform, claims.get(current), current, current=True)
    if name in claims:
        return _subject(_claimed(name, claims[name]), claims[name], name)
    if "." not in name and ":" not in name:
        raise UnknownPlatformError(f"unknown platform {name!r}. {did_you_mean(name, claims)}")
    cls = resolve_obj_by_qualname(name)
    claimant = getattr(cls, "name", None)
    return _subject(cls, claims.get(str(claimant)), claimant if claimant in claims else None)


def _claims() -> dict[str, str]:
    """Return the reference of every claiming function by the name that selects it."""
    points = entry_points(group=PLATFORM_PLUGINS)
    plugins = {point.name: point.value.partition("[")[0].strip() for point in points}
    return {**plugins, **{name: f"{_BUILTIN}:{name}" for name in BUILTIN}}


def _claimed(name: str, reference: str) -> object:
    """Return the class that the platform of that name claims to be."""
    try:
        claim: Claim | str | None = resolve_obj_by_qualname(reference)()
        if claim is not None:
            return resolve_obj_by_qualname(claim.platform if isinstance(claim, Claim) else claim)
    except OpweaveError:
        raise
    except Exception as error:
        raise UnknownPlatformError(
            f"platform {name!r} cannot be found: {reference} {raised(error)}."
        ) from error
    raise UnknownPlatformError(f"platform {name!r} says that its device is not here.")


def _subject(cls: object, claim: str | None, claimant: str | None) -> PlatformSubject:
    if not isinstance(cls, type) or not issubclass(cls, Platform):
        raise UnknownPlatformError(f"{cls!r} is not a subclass of opweave.platforms.Platform.")
    if cls is type(resolution().platform):
        return PlatformSubject(resolution().platform, claim, claimant, current=True)
    platform = cls()
    platform.import_kernels()
    return PlatformSubject(platform, claim, claimant)


PlatformCheck = Check[PlatformSubject]


# The engine that a platform's classes are for.


class EngineParts(Protocol):
    """The parts of an engine that the checks of platforms use."""

    def own_part(self, platform: Platform, method: str, *arguments: Any) -> type:
        """Return the engine's class for a method of *platform* that returns None."""

    def default_request(self) -> object:
        """Return the sampling parameters of a request that sets none."""


def engine_parts() -> EngineParts | None:
    """Return the parts of the installed engine, or None without one."""
    return next((point.load() for point in entry_points(group=ENGINE_PARTS)), None)


# Python code that runs in new processes, several at a time.


_TIMEOUT_SECONDS = 120.0


class ProcessFailedError(RuntimeError):
    """A new process did not print JSON; the message is the last line on its standard error."""


def ask(code: str, *environments: Mapping[str, str]) -> list[Any]:
    """Run *code* in a new process for each environment, concurrently; return the results.

    Args:
        code: Python code whose last line of output is a JSON document.
        environments: variables of each process in addition to those of this one.

    Raises:
        ProcessFailedError: a process did not print one.
    """
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**inherited_environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    return [_answer(*process.communicate(timeout=_TIMEOUT_SECONDS)) for process in running]


def _answer(stdout: str, stderr: str) -> Any:
    lines: Sequence[str] = stdout.splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        words = stderr.strip().splitlines() or ["it wrote nothing"]
        raise ProcessFailedError(words[-1]) from None
