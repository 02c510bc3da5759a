"""The registries of layers: classes by name, and replacements.

``CustomOp`` and ``PluggableLayer`` share both, so a name belongs to one layer of either kind.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from torch import nn

from opweave.base import transaction
from opweave.base.owner import Owner, current_owner
from opweave.layers.errors import (
    DuplicateLayerError,
    InvalidLayerError,
    LayerNameError,
    ReplacementError,
)
from opweave.plugins import load_general_plugins

L = TypeVar("L", bound=nn.Module)
T = TypeVar("T")

op_registry: dict[str, type[nn.Module]] = {}
"""The layers by registered name."""

op_registry_oot: dict[str, type[Any]] = {}
"""The replacements, by the class name or the registered name of what they replace."""

_owners: WeakKeyDictionary[type[Any], Owner] = WeakKeyDictionary()

_RESERVED = ("all", "none")  # what `custom_ops` says of every op at once


def register(kind: type[nn.Module], name: str, layer: type[L]) -> type[L]:
    """Register *layer* under *name*, and set its ``name``.

    Raises:
        LayerNameError: *name* is not an identifier, or reserved.
        InvalidLayerError: (a TypeError) *layer* is not a class, or not derived from *kind*.
        DuplicateLayerError: (a ValueError) the name is taken.
    """
    _check_name(name)
    _check_layer(kind, layer)
    taken = op_registry.get(name)
    if taken is not None:
        raise DuplicateLayerError(
            f"Duplicate op name: {name!r} is {full_name(taken)} already, so it cannot be "
            f"{full_name(layer)}. Choose another name, or replace that layer with register_oot."
        )
    layer.name = name  # type: ignore[attr-defined]
    _enter(op_registry, name, layer, f"layer {name}")
    return layer


def register_oot(key: str, layer: type[T]) -> type[T]:
    """Make *layer* replace the class whose class name or registered name is *key*.

    It may be any class: code that does not build layers calls :func:`replacement` itself. The
    replacement keeps the inherited ``name``, so entries of ``custom_ops`` apply to it.

    Raises:
        InvalidLayerError: (a TypeError) *layer* is not a class.
        DuplicateLayerError: (a ValueError) the layer already has a replacement.
        ReplacementError: (a TypeError) *layer* is not a subclass of the layer.
    """
    _check_name(key)
    _check_class(layer)
    if (taken := op_registry_oot.get(key)) is not None:
        advice = "Install one of the two only."
        if full_name(taken) == full_name(layer):
            advice = "The same is registered twice: do so once, or in a module of its own."
        raise DuplicateLayerError(
            f"Duplicate replacement: {full_name(taken)} replaces {key!r} already, so "
            f"{full_name(layer)} cannot. {advice}"
        )
    for replaced in op_registry.values():
        if _stands_for(key, replaced):
            check_replacement(replaced, layer)
    _enter(op_registry_oot, key, layer, f"replacement of {key}")
    return layer


def owner_of(layer: type[nn.Module]) -> Owner | None:
    """Return the plugin that registered exactly this class, if any."""
    return _owners.get(layer)


def replacement(layer: type[T]) -> type[T]:
    """Return the replacement of the class *layer*, or *layer* itself.

    Subclasses of a replaced class are not replaced. Use this function to call a class method on the
    class that will be built.

    Raises:
        DuplicateLayerError: different replacements are registered for the class name and the
            registered name.
        ReplacementError: the replacement is not a subclass.
        PluginError: a plugin, which may register a replacement, failed to load.
    """
    load_general_plugins()
    by_class = _by_class_name(layer)
    by_name = op_registry_oot.get(layer.__dict__.get("name", ""))
    found = by_class or by_name
    if found is None or found is layer:
        return layer
    if by_class is not None and by_name is not None and by_class is not by_name:
        raise DuplicateLayerError(
            f"{full_name(layer)} has two replacements: {full_name(by_class)} by its class name, "
            f"and {full_name(by_name)} by its registered name. Install one of the two only."
        )
    check_replacement(layer, found)
    return cast(type[T], found)


def _by_class_name(layer: type[Any]) -> type[Any] | None:
    """Return the replacement for the class name, unless it is for another class of that name."""
    key = layer.__name__
    found = op_registry_oot.get(key)
    if found is None or issubclass(found, layer):
        return found
    others = (each for each in op_registry.values() if each is not layer)
    return None if any(_stands_for(key, each) for each in others) else found


def check_replacement(replaced: type[Any], layer: type[Any]) -> None:
    """Raise :class:`ReplacementError` unless *layer* can replace *replaced*."""
    if not issubclass(layer, replaced):
        raise ReplacementError(
            f"{full_name(layer)} cannot replace {full_name(replaced)}: it is not a subclass, so "
            f"Python would not initialize it. Derive it from {full_name(replaced)}, or register it "
            "for the class that it does derive from."
        )


def _enter(table: dict[str, type[Any]], key: str, layer: type[Any], what: str) -> None:
    table[key] = layer
    if (owner := current_owner()) is not None:
        _owners[layer] = owner
    transaction.enter(what, lambda: _remove(table, key, layer))


def _remove(table: dict[str, type[Any]], key: str, layer: type[Any]) -> None:
    if table.get(key) is layer:
        del table[key]
    _owners.pop(layer, None)


def full_name(layer: type[object]) -> str:
    """Return module and name of a class."""
    return f"{layer.__module__}.{layer.__qualname__}"


def _stands_for(key: str, layer: type[nn.Module]) -> bool:
    return key in (layer.__name__, layer.__dict__.get("name"))


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
        raise LayerNameError(
            f"{name!r} cannot name a layer: it should be an identifier, such as 'rms_norm', and "
            "not 'all' or 'none', so that custom_ops can speak of it."
        )


def _check_class(layer: object) -> None:
    if not isinstance(layer, type):
        raise InvalidLayerError(
            f"Decorator can only be applied to classes. It was applied to {layer!r}."
        )


def _check_layer(kind: type[nn.Module], layer: type[Any]) -> None:
    _check_class(layer)
    if not issubclass(layer, kind):
        raise InvalidLayerError(
            f"{full_name(layer)} is not a {kind.__name__}. Derive it from {kind.__name__}, or "
            "register it with the base class that it does derive from."
        )
