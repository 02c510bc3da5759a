"""Find a platform, and verify it with every check."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points

import torch

from opweave.conformance.platform.checks import CHECKS
from opweave.conformance.platform.subject import PlatformSubject
from opweave.conformance.subject import (
    NonconformingError,
    Outcome,
    UnknownCheckError,
    UnknownPlatformError,
    raised,
)
from opweave.ir.errors import OpweaveError, did_you_mean
from opweave.platforms import Platform, resolution
from opweave.platforms.builtin import BUILTIN
from opweave.plugins import PLATFORM_PLUGINS, Claim, resolve_obj_by_qualname

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
    found = resolution()
    return next(each.name for each in found.candidates if each.claim is found.claim)


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


# Verifies a platform with every check.


@dataclass(frozen=True)
class PlatformResult:
    """The result of verifying a platform."""

    subject: PlatformSubject
    outcomes: tuple[Outcome, ...]

    @property
    def status(self) -> str:
        """``passed``, ``failed``, or ``none`` without anything to check."""
        if any(outcome.problems for outcome in self.outcomes):
            return "failed"
        return "passed" if any(outcome.passed for outcome in self.outcomes) else "none"

    def raise_if_failed(self) -> None:
        """Raise NonconformingError with every problem, if there is one."""
        if self.status == "failed":
            lines = [f"{o.check}: {problem}" for o in self.outcomes for problem in o.problems]
            raise NonconformingError("\n".join([f"{self.subject} fails:", *lines]))


def verify_platform(subject: PlatformSubject, checks: Iterable[str] = ()) -> PlatformResult:
    """Run every check, or those named, on a platform.

    Raises:
        UnknownCheckError: a check does not exist.
    """
    names = list(checks)
    for name in names:
        if name not in CHECKS:
            raise UnknownCheckError(f"unknown check {name!r}. {did_you_mean(name, CHECKS)}")
    chosen = [check for name, check in CHECKS.items() if not names or name in names]
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PlatformResult(subject, tuple(check.outcome(subject) for check in chosen))
