"""Finding the platform to verify: by its name, by its class, or the one of this process."""

from __future__ import annotations

from importlib.metadata import entry_points

from opweave.conformance.check import raised
from opweave.conformance.errors import UnknownPlatformError
from opweave.conformance.platform.subject import PlatformSubject
from opweave.ir.errors import OpweaveError, did_you_mean
from opweave.platforms import Platform, resolution
from opweave.platforms.builtin import BUILTIN
from opweave.plugins import PLATFORM_PLUGINS, Claim, resolve_obj_by_qualname

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
