"""Loads the driver, which makes ``acme`` a device of torch, and asks it questions."""

from __future__ import annotations

import threading
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import requires
from pathlib import Path

import torch

from opweave.ir.errors import OpweaveError

_lock = threading.Lock()
_loaded = False


class AcmeError(OpweaveError, RuntimeError):
    """The device cannot do what was asked, or its driver cannot be loaded."""


def init() -> None:
    """Give torch the device ``acme``. Once in a process; later calls do nothing.

    Raises:
        AcmeError: the driver is missing, was built for another torch, or another package has taken
            the place that torch has for one device from outside.
    """
    global _loaded
    with _lock:
        if _loaded:
            return
        _check_torch()
        try:
            torch.ops.load_library(str(_library()))
        except OSError as error:
            raise AcmeError(f"The driver of acme does not load: {error}. {_REINSTALL}") from error
        torch.utils.rename_privateuse1_backend("acme")
        torch._register_device_module("acme", import_module("acme_device.torch_acme"))
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        import_module("acme_device.fakes")
        import_module("acme_device.inductor_switches")
        _loaded = True


def fallbacks() -> dict[str, int]:
    """Return how often each operator of torch ran on the host, for want of a kernel."""
    init()
    return dict(sorted(torch.ops.acme.fallbacks().items()))


def reset_fallbacks() -> None:
    """Count from zero again."""
    init()
    torch.ops.acme.reset_fallbacks()


_REINSTALL = "Install acme-device again, so that it is built for this torch."


def _check_torch() -> None:
    found = torch._C._get_privateuse1_backend_name()
    if found != "privateuseone":
        raise AcmeError(
            f"torch has room for one device from outside, and {found!r} has taken it. Uninstall "
            "one of the two packages."
        )
    for requirement in requires("acme-device") or ():
        name, _, version = requirement.partition("==")
        if name == "torch" and not torch.__version__.startswith(version.removesuffix("*")):
            raise AcmeError(
                f"The driver of acme was built for torch {version}; this is {torch.__version__}. "
                f"{_REINSTALL}"
            )


def _library() -> Path:
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_driver{suffix}")
        if path.is_file():
            return path
    raise AcmeError(f"{Path(__file__).parent} has no driver. {_REINSTALL}")
