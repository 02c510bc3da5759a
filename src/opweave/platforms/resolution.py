"""Which platform this process runs on: found out once, when somebody first asks."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from opweave.base.owner import Owner
from opweave.platforms import choice, handover
from opweave.platforms.base import Platform
from opweave.platforms.errors import PlatformMismatchError
from opweave.plugins import Claim, PlatformCandidate
from opweave.plugins.errors import PlatformReentryError
from opweave.plugins.installed import refuse_reentry

_PACKAGE = os.path.dirname(__file__)


@dataclass(frozen=True)
class Resolution:
    """The platform of this process, and why it was chosen.

    Attributes:
        platform: the platform.
        qualname: of its class.
        claim: what the plugin, or opweave, claimed.
        owner: the plugin that brings it; None: it comes with opweave.
        why: why this one.
        trace: the stack of whoever asked first, as in a traceback.
        candidates: all that claim the machine, the chosen one among them.
    """

    platform: Platform
    qualname: str
    claim: Claim
    owner: Owner | None
    why: str
    trace: str
    candidates: tuple[PlatformCandidate, ...]

    def to_json(self) -> str:
        """Return what a process that this one starts needs to be on the same platform.

        Give it to :func:`impose` there, or put it into its environment as
        ``OPWEAVE_PLATFORM_RESOLUTION``.
        """
        name = next(each.name for each in self.candidates if each.claim is self.claim)
        return handover.Handover.of(name, self.claim, self.owner).to_json()


def resolution() -> Resolution:
    """Return the platform of this process and how it was found; the first call finds it.

    Raises:
        PluginError: a platform plugin failed, or several claim the device.
        PlatformContractError: the class that was chosen is no platform, or breaks the contract.
        PlatformMismatchError: the parent process runs on another platform, or other versions.
    """
    return _process.resolution()


def resolve_current_platform_cls_qualname() -> str:
    """Return the qualified name of the current platform's class; see :func:`resolution`."""
    return resolution().qualname


def is_resolved() -> bool:
    """Return whether the platform of this process is known; asking does not resolve it."""
    return _process.is_resolved


def impose(text: str) -> Resolution:
    """Use the platform of the parent process; *text* is the result of its ``to_json``.

    No plugin is asked whether its device is here; what differs from the parent is an error.

    Raises:
        PlatformMismatchError: this process has resolved another one, or has other versions.
        PlatformContractError, PluginError: as :func:`resolution`.
    """
    return _process.impose(handover.Handover.from_json(text))


class _Process:
    """What one process knows about its platform."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._found: Resolution | None = None

    @property
    def is_resolved(self) -> bool:
        return self._found is not None

    def resolution(self) -> Resolution:
        found = self._found
        return found if found is not None else self._once(choice.choose)

    def impose(self, parent: handover.Handover) -> Resolution:
        found = self._found
        if found is None:
            found = self._once(lambda: choice.imposed(parent))
        _check_same(found, parent)
        return found

    def _once(self, find: Callable[[], choice.Found]) -> Resolution:
        # A plugin's function may run in a thread of its own, which has a copy of the context.
        if _resolving.get():
            refuse_reentry()
            raise PlatformReentryError(
                "current_platform is asked for by the code that is to decide which one it is. A "
                "platform plugin's function, and the constructor of a platform, must not use it, "
                "nor import what does."
            )
        with self._lock:
            if self._found is None:
                token, trace = _resolving.set(True), _trace()
                try:
                    self._found = _described(find(), trace)
                finally:
                    _resolving.reset(token)
            return self._found


_resolving: ContextVar[bool] = ContextVar("resolving_platform", default=False)
_process = _Process()


@contextmanager
def isolated_resolution() -> Iterator[None]:
    """Let the platform be resolved anew inside the block; for tests."""
    global _process
    before, _process = _process, _Process()
    try:
        yield
    finally:
        _process = before


def _check_same(found: Resolution, parent: handover.Handover) -> None:
    if found.qualname != parent.claim.platform or found.owner != parent.owner:
        raise PlatformMismatchError(
            f"the parent process runs on {parent.claim.platform}; this process runs on "
            f"{found.qualname} already ({found.why}). It was resolved here:\n{found.trace}"
        )


def _described(found: choice.Found, trace: str) -> Resolution:
    _, claim, owner = found.chosen
    return Resolution(
        found.platform, claim.platform, claim, owner, found.why, trace, found.candidates
    )


def _trace() -> str:
    frames = traceback.extract_stack()
    while frames and os.path.dirname(frames[-1].filename) == _PACKAGE:
        frames.pop()
    return "".join(traceback.format_list(frames))
