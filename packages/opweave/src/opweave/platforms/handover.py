"""The platform of a process in a form that its child processes read, so that they use the same."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

from opweave.base.owner import Owner
from opweave.config.plugin_options import given_plugin_options
from opweave.platforms.errors import PlatformMismatchError
from opweave.plugins import Claim, State, plugin_report

VARIABLE = "OPWEAVE_PLATFORM_RESOLUTION"
_IN_USE = (State.LOADED, State.ACTIVE)
_ALWAYS = ("opweave", "torch")


@dataclass(frozen=True)
class Handover:
    """A platform and its environment.

    Attributes:
        name: the plugin's name, as in ``OPWEAVE_PLATFORM``.
        claim: the claim of the platform.
        owner: the plugin that provides it, or None if it comes with opweave.
        versions: versions of opweave, torch and every distribution whose plugins are in use.
        options: the values of ``--plugin.<plugin>.<key>`` options.
    """

    name: str
    claim: Claim
    owner: Owner | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, claim: Claim, owner: Owner | None) -> Self:
        """Return the handover of this process."""
        used = {r.distribution for r in plugin_report() if r.state in _IN_USE}
        if owner is not None:
            used.add(owner.distribution)
        versions = {name: _version(name) for name in (*_ALWAYS, *sorted(used))}
        return cls(name, claim, owner, versions, given_plugin_options())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of :meth:`to_json`.

        Raises:
            PlatformMismatchError: *text* is malformed.
        """
        try:
            data = json.loads(text)
            claim, owner = Claim(**data.pop("claim")), data.pop("owner")
            return cls(claim=claim, owner=None if owner is None else Owner(**owner), **data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlatformMismatchError(
                f"{VARIABLE} must be the result of Resolution.to_json() in the parent process; "
                f"found {text!r}."
            ) from error

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def check_versions(self) -> None:
        """Raise :class:`PlatformMismatchError` if a version differs in this process."""
        for name, expected in self.versions.items():
            found = _version(name)
            if found != expected:
                raise PlatformMismatchError(
                    f"the parent process runs on {self.claim.platform} with {name} {expected}; "
                    f"this process finds {_shown(name, found)}. Both must use one environment."
                )


def _shown(name: str, found: str | None) -> str:
    return f"no {name}" if found is None else f"{name} {found}"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
