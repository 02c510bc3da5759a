"""Resolution of the platform of this process, once, on first use."""

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
        qualname: the qualified name of its class.
        claim: the claim of the plugin, or of opweave.
        owner: the plugin that provides it, or None if it comes with opweave.
        why: the reason for the choice.
        trace: the stack of the first access, formatted as in a traceback.
        candidates: all platforms that claim the machine, including the chosen one.
    """

    platform: Platform
    qualname: str
    claim: Claim
    owner: Owner | None
    why: str
    trace: str
    candidates: tuple[PlatformCandidate, ...]

    def to_json(self) -> str:
        """Return the resolution as JSON for a child process.

        Pass it to :func:`impose` there, or set it as ``OPWEAVE_PLATFORM_RESOLUTION``.
        """
        name = next(each.name for each in self.candidates if each.claim is self.claim)
        return handover.Handover.of(name, self.claim, self.owner).to_json()


def resolution() -> Resolution:
    """Return the resolution of this process; the first call resolves the platform.

    Raises:
        PluginError: a platform plugin failed, or several claim the device.
        PlatformContractError: the chosen class is not a platform, or violates the contract.
        PlatformMismatchError: the parent process has another platform or other versions.
    """
    return _process.resolution()


def resolve_current_platform_cls_qualname() -> str:
    """Return the qualified name of the current platform's class; see :func:`resolution`."""
    return resolution().qualname


def is_resolved() -> bool:
    """Whether the platform of this process is resolved; does not resolve it."""
    return _process.is_resolved


def impose(text: str) -> Resolution:
    """Use the platform of the parent process; *text* is the result of its ``to_json``.

    Args:
        text: the result of ``to_json`` in the parent process.

    Raises:
        PlatformMismatchError: this process has resolved another platform, or has other versions.
        PlatformContractError, PluginError: as :func:`resolution`.
    """
    return _process.impose(handover.Handover.from_json(text))


class _Process:
    """The platform state of a process."""

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
        # A context variable, because a plugin's function may run in another thread, with a copy of
        # the context.
        if _resolving.get():
            refuse_reentry()
            raise PlatformReentryError(
                "current_platform is used by the code that resolves it. The function of a platform "
                "plugin and the constructor of a platform must not use it, nor import a module "
                "that does."
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
    """Resolve the platform again inside the block; for tests."""
    global _process
    before, _process = _process, _Process()
    try:
        yield
    finally:
        _process = before


def _check_same(found: Resolution, parent: handover.Handover) -> None:
    if found.qualname != parent.claim.platform or found.owner != parent.owner:
        raise PlatformMismatchError(
            f"the parent process runs on {parent.claim.platform}, but this process has resolved "
            f"{found.qualname} ({found.why}), here:\n{found.trace}"
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
