"""vLLM's modules, as opweave provides them.

============================================  ==================================================
import                                        gives
============================================  ==================================================
``vllm.X``                                    ``opweave_vllm.vllm_api.X``, if it exists
a name of ``vllm.model_executor``             that of ``opweave.layers``, as the guide says
a pass of ``vllm.compilation.passes``         a stand-in that runs opweave's pass, see ``passes``
``torch.ops.vllm_ir``                         ``torch.ops.opweave``
any other name                                an object that fails the test that uses it
============================================  ==================================================
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from opweave import layers

OWN = "opweave_vllm.vllm_api"


class NoCounterpart(BaseException):
    """A test uses a name that opweave lacks. Not an Exception: a test may expect one."""


class Missing:
    """A name of vLLM that opweave lacks."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NoCounterpart(f"opweave does not have {self._name}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks for some while it collects tests
            raise AttributeError(name)
        raise NoCounterpart(f"opweave does not have {self._name}.{name}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class Finder(MetaPathFinder, Loader):
    """Imports vLLM's modules.

    Args:
        stand_ins: objects by full name.
    """

    def __init__(self, stand_ins: Mapping[str, Any]) -> None:
        self._stand_ins = stand_ins

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_vllm = fullname.partition(".")[0] == "vllm"
        return ModuleSpec(fullname, self, is_package=True) if is_vllm else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Use a new module; :meth:`exec_module` replaces it by opweave's, if there is one."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        own = _own_module(OWN + name.removeprefix("vllm"))
        if own is not None:
            sys.modules[name] = own
            if not hasattr(own, "__path__"):
                own.__path__ = []  # vLLM has a package here
        found = own or module
        if "__getattr__" not in vars(found):
            vars(found)["__getattr__"] = lambda attribute: self._find(name, attribute)

    def _find(self, module: str, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        full = f"{module}.{attribute}"
        if full in self._stand_ins:
            return self._stand_ins[full]
        if module.startswith("vllm.model_executor.") and attribute in layers.__all__:
            return getattr(layers, attribute)
        return Missing(full)


def _own_module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name) if importlib.util.find_spec(name) else None
    except ModuleNotFoundError:  # a parent is missing
        return None


def install(stand_ins: Mapping[str, Any]) -> None:
    """Let ``import vllm`` give opweave's modules in this process."""
    sys.meta_path.insert(0, Finder(stand_ins))
    torch.ops.vllm_ir = torch.ops.opweave  # type: ignore[attr-defined]
