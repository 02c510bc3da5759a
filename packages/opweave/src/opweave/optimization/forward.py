"""Modules with a replaced ``forward``, which stay instances of their class."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from opweave import torch_compat

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Replacement:
    """A ``forward`` for modules of a certain structure.

    Attributes:
        name: a unique name, which is in pickled modules.
        ops: the ops that it calls.
        forward: a function of the module and the arguments of its ``forward``; returns None for
            unsupported arguments.
        kept: returns attributes that a module with this replacement gets.
        settings: attributes, besides parameters and children, that ``forward`` reads in each call.
    """

    name: str
    ops: tuple[str, ...]
    forward: Forward
    kept: Callable[[nn.Module], Mapping[str, Any]] = lambda module: {}
    settings: tuple[str, ...] = ()


class Replaced:
    """Mixed into the class of a module that runs a :class:`Replacement`."""

    _opweave_replacement: Replacement
    _opweave_original: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Replaced):  # a bound method that was kept before put_back
            return type(self).forward(self, *args, **kwargs)
        result = self._opweave_replacement.forward(self, *args, **kwargs)
        if result is None:
            return self._opweave_original.forward(self, *args, **kwargs)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made at run time; pickle stores what it was made of.
        return _new, (self._opweave_original, self._opweave_replacement.name), self.__getstate__()


def is_covered(tensor: Any) -> bool:
    """Whether the ops take *tensor*.

    False for nested, distributed and other wrapped tensors, which know PyTorch's operators only.
    """
    return type(tensor) in _TENSOR_TYPES or (
        isinstance(tensor, Tensor) and not torch_compat.is_wrapper(tensor)
    )


_TENSOR_TYPES = (Tensor, nn.Parameter)
_replacements: dict[str, Replacement] = {}


def register(name: str, *ops: str, **options: Any) -> Callable[[Forward], Replacement]:
    """Register the decorated function as a replacement that pickled modules refer to by name.

    Args:
        name, ops, options: attributes of :class:`Replacement`.
    """

    def decorate(forward: Forward) -> Replacement:
        replacement = _replacements[name] = Replacement(name, ops, forward, **options)
        return replacement

    return decorate


def replace(module: nn.Module, replacement: Replacement) -> None:
    """Make *module* run *replacement*."""
    module.__class__ = class_of(type(module), replacement)


def is_put_back_possible(module: Replaced) -> bool:
    """Whether *module* still has the class that :func:`replace` gave it.

    Others derive a class from it: parametrizations of torch, FSDP.
    """
    expected: type = class_of(module._opweave_original, module._opweave_replacement)
    return type(module) is expected


def put_back(module: Replaced) -> None:
    """Restore the original class of *module*."""
    for name in module._opweave_replacement.kept(module):  # type: ignore[arg-type]
        vars(module).pop(name, None)
    module.__class__ = module._opweave_original  # type: ignore[assignment]


_classes: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}


def class_of(original: type[nn.Module], replacement: Replacement) -> type[nn.Module]:
    """Return the subclass of *original* that runs *replacement*, the same for every module."""
    key = original, replacement.name
    if key not in _classes:
        members = {
            "_opweave_replacement": replacement,
            "_opweave_original": original,
            "__module__": original.__module__,
            "__doc__": original.__doc__,
        }
        _classes[key] = type(original.__name__, (Replaced, original), members)
    return _classes[key]


def _new(original: type[nn.Module], name: str) -> nn.Module:
    cls = class_of(original, _replacements[name])
    return copyreg.__newobj__(cls)  # type: ignore[attr-defined, no-any-return]
