"""Providers: one folder for each, registering implementations of ops when it is imported."""

from __future__ import annotations

import importlib
import sys

from opweave.base import transaction
from opweave.base.owner import owned_by
from opweave.ir import Registry
from opweave.ir.names import OWN_PROVIDERS

__all__ = ["load"]


def load(registry: Registry) -> None:
    """Import every provider that comes with opweave. One that fails leaves nothing behind.

    They are opweave's own, whoever calls: the platform of a plugin, usually.
    """
    for provider in OWN_PROVIDERS:
        name = f"{__name__}.{provider}"
        with owned_by(None), transaction.detached(), registry.transaction():
            try:
                importlib.import_module(name)
            except BaseException:
                _forget(name)
                raise


def _forget(package: str) -> None:
    """Let the next import of *package* run its modules again."""
    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}."):
            del sys.modules[name]
