"""opweave: the kernel layer for LLM inference in PyTorch.

Declare an operation once, in plain PyTorch; plug in kernels for it; opweave runs the right one and
shows why. Start with :mod:`opweave.ir`.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from opweave import ir
from opweave._first_use import load_plugins as _load_plugins
from opweave._first_use import prepare as _prepare
from opweave.ir.explain import explain_model as explain
from opweave.packages import __version__
from opweave.torch_compat import before_loading_packages as _before_loading_packages

if _TYPE_CHECKING:
    from opweave.optimization import optimize, restore

__all__ = ["__version__", "explain", "ir", "optimize", "restore"]

_registry = ir.current_registry()
_registry.on_first_use(_prepare, _load_plugins)
_before_loading_packages(_registry.ensure_ready)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> _Any:
    if name in ("optimize", "restore"):  # imported when they are first used
        from opweave import optimization

        return getattr(optimization, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
