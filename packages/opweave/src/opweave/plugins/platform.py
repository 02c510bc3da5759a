"""Claims of platform plugins, and the choice of a platform."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from opweave.plugins.discovery import PLATFORM
from opweave.plugins.entry import (
    GROUPS,
    PLATFORM_API,
    PLATFORM_PLUGINS,
    Claim,
    ClaimApiError,
    PlatformConflictError,
    PluginEntry,
    PluginTypeError,
    ReferenceNameError,
    split_qualname,
)
from opweave.registration import Owner


class PlatformCandidate(NamedTuple):
    """A platform whose device is present.

    Attributes:
        name: its name.
        claim: its claim.
        owner: the plugin that provides it, or None for opweave's own.
    """

    name: str
    claim: Claim
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


def claim_of(entry: PluginEntry, returned: object) -> Claim | None:
    """Convert the return value of a platform plugin to a claim.

    Raises:
        PluginTypeError: it is not a claim, a qualified name or None, or its score or ``why`` has
        the wrong type.
        ClaimApiError: the claim is for another version of the platform interface.
    """
    if returned is None:
        return None
    if isinstance(returned, str):
        returned = Claim(returned, PLATFORM_API)  # the class declares its version itself
    try:
        split_qualname(returned.platform if isinstance(returned, Claim) else "")
    except ReferenceNameError:
        raise PluginTypeError(
            f"{entry} returned {returned!r}; it should be {GROUPS[PLATFORM_PLUGINS].entry_point}"
        ) from None
    assert isinstance(returned, Claim)
    if returned.api != PLATFORM_API:
        raise ClaimApiError(
            f"{entry} is for version {returned.api} of the platform interface, and this opweave "
            f"has version {PLATFORM_API}. {_remedy(returned.api, entry.owner)}"
        )
    _check_fields(entry, returned)
    return returned


def _check_fields(entry: PluginEntry, claim: Claim) -> None:
    score: object = claim.score  # plugins may return any type
    why: object = claim.why
    is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
    if not (is_number and math.isfinite(claim.score)):
        raise PluginTypeError(
            f"{entry} returned a claim with the score {score!r}; it should be a finite number, "
            f"such as {Claim('', PLATFORM_API).score}"
        )
    if not isinstance(why, str):
        raise PluginTypeError(
            f"{entry} returned a claim with why={why!r}; it should be a string, such as "
            "'the driver is loaded'"
        )


def choose(candidates: Sequence[PlatformCandidate]) -> PlatformCandidate:
    """Return the candidate with the highest score; *candidates* are not empty.

    Raises:
        PlatformConflictError: two have the highest score.
    """
    highest = max(each.claim.score for each in candidates)
    best = [each for each in candidates if each.claim.score == highest]
    if len(best) > 1:
        claims = "; ".join(sorted(map(_describe, best)))
        raise PlatformConflictError(
            f"{len(best)} platforms claim this machine: {claims}. Choose one with "
            f"{PLATFORM}={min(each.name for each in best)}, or uninstall the others."
        )
    return best[0]


def _describe(candidate: PlatformCandidate) -> str:
    who = "opweave" if candidate.owner is None else str(candidate.owner)
    why = f", because {candidate.claim.why}" if candidate.claim.why else ""
    return f"{candidate.name} of {who}{why}"


def _remedy(api: object, owner: Owner) -> str:
    if isinstance(api, int) and api > PLATFORM_API:
        return f"Upgrade opweave, or install an older {owner.distribution}"
    return f"Install a newer {owner.distribution}"
