"""The platform to verify and how it is found, its checks, and questions to fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from opweave.config.child_process import inherited_environment
from opweave.conformance.subject import (
    Findings,
    Outcome,
    UnknownPlatformError,
    outcome_of,
    raised,
)
from opweave.ir.errors import OpweaveError, did_you_mean
from opweave.platforms import Platform, resolution
from opweave.platforms.builtin import BUILTIN
from opweave.plugins import PLATFORM_PLUGINS, Claim, resolve_obj_by_qualname

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
    claims, current = _claims(), _current_name()
    if name is None or name == current:
        return PlatformSubject(resolution().platform, claims.get(current), current, current=True)
    if name in claims:
        return _subject(_claimed(name, claims[name]), claims[name], name)
    if "." not in name and ":" not in name:
        raise UnknownPlatformError(f"unknown platform {name!r}. {did_you_mean(name, claims)}")
    cls = resolve_obj_by_qualname(name)
    claimant = getattr(cls, "name", None)
    return _subject(cls, claims.get(str(claimant)), claimant if claimant in claims else None)


def _current_name() -> str:
    return resolution().chosen.name


def _claims() -> dict[str, str]:
    """Return the reference of every claiming function by the name that selects it."""
    found = entry_points(group=PLATFORM_PLUGINS)
    plugins = {point.name: point.value.partition("[")[0].strip() for point in found}
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


# Checks of platforms.


_MAX_PROBLEMS = 5  # of one check; more of them say no more


@dataclass(frozen=True)
class PlatformCheck:
    """A check of platforms.

    Attributes:
        name: the name in tables and options.
        promise: the property that a passing platform has, in one line.
        run: yields the problem of each case, or None.
    """

    name: str
    promise: str
    run: Callable[[PlatformSubject], Findings]

    def outcome(self, subject: PlatformSubject) -> Outcome:
        """Run the check, until a few problems are found."""
        return outcome_of(self.name, lambda: self.run(subject), _MAX_PROBLEMS)


# Questions to fresh processes, several at a time.


_TIMEOUT = 120.0


class ProcessFailedError(RuntimeError):
    """A fresh process did not answer; the message is the last line of what it wrote instead."""


def ask(code: str, *environments: Mapping[str, str]) -> list[Any]:
    """Run *code* in a fresh process for each of the environments, all at once; return the answers.

    Args:
        code: Python that prints one JSON document last.
        environments: variables that each process has in addition to this one's.

    Raises:
        ProcessFailedError: one of them did not print it.
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
    return [_answer(*process.communicate(timeout=_TIMEOUT)) for process in running]


def _answer(stdout: str, stderr: str) -> Any:
    lines: Sequence[str] = stdout.splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        words = stderr.strip().splitlines() or ["it wrote nothing"]
        raise ProcessFailedError(words[-1]) from None
