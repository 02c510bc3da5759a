"""The built-in providers. Importing one registers its implementations."""

from __future__ import annotations

import importlib
import sys

from opweave import transaction
from opweave.ir import Registry
from opweave.ir.schema import ADAPTERS, OWN_PROVIDERS
from opweave.registration import owned_by

__all__ = ["load"]


def load(registry: Registry) -> None:
    """Import every built-in provider, and adapters of libraries that are installed.

    The implementations belong to opweave, even if a plugin's platform calls this function. If an
    import fails, its registrations are rolled back.
    """
    names = [*OWN_PROVIDERS, *(f"libraries.{provider}" for provider in ADAPTERS)]
    for name in (f"{__name__}.{name}" for name in names):
        with owned_by(None), transaction.detached(), registry.transaction():
            try:
                importlib.import_module(name)
            except BaseException:
                _forget(name)
                raise


def _forget(package: str) -> None:
    """Remove *package* from ``sys.modules``, so that the next import executes it again."""
    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}."):
            del sys.modules[name]
