"""Triton, or stand-ins with which modules can be imported without it."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

__all__ = ["HAS_TRITON", "tl", "tldevice", "triton"]

HAS_TRITON = find_spec("triton") is not None


class _Missing:
    """A member of Triton, or a decorated kernel, where Triton is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(self)(f"{self._name}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        is_decorator = len(args) == 1 and callable(args[0]) and not options
        return _Missing(getattr(args[0], "__name__", self._name)) if is_decorator else self

    def __getitem__(self, grid: Any) -> Any:
        raise ModuleNotFoundError(f"{self._name} needs Triton, which is not installed")


if HAS_TRITON:
    triton: Any = import_module("triton")
    tl: Any = import_module("triton.language")
    tldevice: Any = import_module("triton.language.extra.libdevice")
else:
    triton, tl, tldevice = map(_Missing, ("triton", "triton.language", "triton.libdevice"))
