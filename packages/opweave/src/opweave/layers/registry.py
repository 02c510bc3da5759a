"""The registries of layers: classes by name, replacements, and warnings about unused ones."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, ClassVar, Self, TypeVar, cast, overload
from weakref import WeakKeyDictionary

from torch import nn

from opweave import transaction
from opweave.config import CompilationConfig
from opweave.ir.errors import OpweaveError, did_you_mean
from opweave.packages import is_in_project
from opweave.plugins import load_general_plugins
from opweave.registration import Owner, current_owner

# Errors of the layers, one class per condition.
#
# Each message says what failed, what was given, what is accepted and how to fix it.


class LayerError(OpweaveError):
    """Base class of the errors of :mod:`opweave.layers`."""


class LayerNameError(LayerError, ValueError):
    """The name for a layer is not an identifier, or is reserved."""


class DuplicateLayerError(LayerError, ValueError):
    """The name or index of a layer is taken, or a class already has a replacement."""


class InvalidLayerError(LayerError, TypeError):
    """A registered object is not a layer."""


class ReplacementError(LayerError, TypeError):
    """A layer cannot replace the class that it is registered for."""


class LayerArgumentError(LayerError, ValueError):
    """The arguments of a layer are invalid or contradict each other."""


class LayerCallError(LayerError, RuntimeError):
    """A layer was called that cannot be called, because only other layers use it."""


class ShardingError(LayerError, ValueError):
    """A dimension cannot be sharded over the ranks, or a rank is out of range."""


class WeightLoadError(LayerError, ValueError):
    """The shape of a loaded weight is neither that of the parameter nor that of a rank's shard."""


class UnusedOpWarning(UserWarning):
    """``custom_ops`` or a replacement names a layer that the model does not have."""


# The registries of layers: classes by name, and replacements.
#
# ``CustomOp`` and ``PluggableLayer`` share both, so a name belongs to one layer of either kind.


L = TypeVar("L", bound=nn.Module)
T = TypeVar("T")

op_registry: dict[str, type[nn.Module]] = {}
"""The layers by registered name."""

op_registry_oot: dict[str, type[Any]] = {}
"""The replacements, by the class name or the registered name of the replaced layer."""

_owners: WeakKeyDictionary[type[Any], Owner] = WeakKeyDictionary()

_RESERVED_NAMES = ("all", "none")  # entries of `custom_ops` that apply to every op


def register(kind: type[nn.Module], name: str, layer: type[L]) -> type[L]:
    """Register *layer* under *name*, and set its ``name``.

    Raises:
        LayerNameError: *name* is not an identifier, or reserved.
        InvalidLayerError: (a TypeError) *layer* is not a class, or not derived from *kind*.
        DuplicateLayerError: (a ValueError) the name is taken.
    """
    _check_name(name)
    _check_class(layer)
    if not issubclass(layer, kind):
        raise InvalidLayerError(
            f"{full_name(layer)} is not a {kind.__name__}. Derive it from {kind.__name__}, or "
            "register it with the base class that it does derive from."
        )
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
    chosen = by_class or by_name
    if chosen is None or chosen is layer:
        return layer
    if by_class is not None and by_name is not None and by_class is not by_name:
        raise DuplicateLayerError(
            f"{full_name(layer)} has two replacements: {full_name(by_class)} by its class name, "
            f"and {full_name(by_name)} by its registered name. Install one of the two only."
        )
    check_replacement(layer, chosen)
    return cast(type[T], chosen)


def _by_class_name(layer: type[Any]) -> type[Any] | None:
    """Return the replacement for the class name, unless it is for another class of that name."""
    key = layer.__name__
    candidate = op_registry_oot.get(key)
    if candidate is None or issubclass(candidate, layer):
        return candidate
    others = (other for other in op_registry.values() if other is not layer)
    return None if any(_stands_for(key, other) for other in others) else candidate


def check_replacement(replaced: type[Any], layer: type[Any]) -> None:
    """Raise :class:`ReplacementError` unless *layer* can replace *replaced*."""
    if not issubclass(layer, replaced):
        raise ReplacementError(
            f"{full_name(layer)} cannot replace {full_name(replaced)}: it is not a subclass, so "
            f"Python would not initialize it. Derive it from {full_name(replaced)}, or register it "
            "for the class that it does derive from."
        )


def _enter(table: dict[str, type[Any]], key: str, layer: type[Any], label: str) -> None:
    transaction.enter(label, table, key, layer)
    if (owner := current_owner()) is not None:
        _owners[layer] = owner


def full_name(layer: type[object]) -> str:
    """Return module and name of a class."""
    return f"{layer.__module__}.{layer.__qualname__}"


def _stands_for(key: str, layer: type[nn.Module]) -> bool:
    return key in (layer.__name__, layer.__dict__.get("name"))


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED_NAMES:
        raise LayerNameError(
            f"{name!r} cannot name a layer: it should be an identifier, such as 'rms_norm', and "
            "not 'all' or 'none', so that custom_ops can name it."
        )


def _check_class(layer: object) -> None:
    if not isinstance(layer, type):
        raise InvalidLayerError(
            f"Decorator can only be applied to classes. It was applied to {layer!r}."
        )


# Common base of ``CustomOp`` and ``PluggableLayer``: names, and replacement at construction.


ReplaceableT = TypeVar("ReplaceableT", bound=type[nn.Module])


class Replaceable(nn.Module):
    """A module that other packages can replace, by its class name or its registered name.

    Attributes:
        name: the registered name; an unregistered subclass has its parent's.
        op_registry: the layers of both kinds by name.
        op_registry_oot: the replacements by name.
    """

    name: str
    op_registry: ClassVar[dict[str, type[nn.Module]]] = op_registry
    op_registry_oot: ClassVar[dict[str, type[Any]]] = op_registry_oot

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Python then calls __init__ of the class of the returned object.
        return super().__new__(replacement(cls))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and unpickle as its own class, regardless of later registrations."""
        _, _, *state = cast(tuple[object, ...], super().__reduce_ex__(2))
        return (_blank, (type(self),), *state)

    @classmethod
    def register(cls, name: str) -> Callable[[ReplaceableT], ReplaceableT]:
        """Register the decorated class under *name*, and set its ``name``.

        Raises:
            LayerNameError: *name* is not an identifier, or is ``all`` or ``none``.
            InvalidLayerError: (a TypeError) the decorated object is not a class of this kind.
            DuplicateLayerError: (a ValueError) the name is taken, by a layer of either kind.
        """

        def decorate(layer: ReplaceableT) -> ReplaceableT:
            register(_kind(cls), name, layer)
            return layer

        return decorate

    @overload
    @classmethod
    def register_oot(
        cls, _decorated_op_cls: ReplaceableT, name: str | None = None
    ) -> ReplaceableT: ...

    @overload
    @classmethod
    def register_oot(
        cls, _decorated_op_cls: str | None = None, name: str | None = None
    ) -> Callable[[ReplaceableT], ReplaceableT]: ...

    @classmethod
    def register_oot(cls, _decorated_op_cls: Any = None, name: str | None = None) -> Any:
        """Replace a layer: constructing it builds the decorated subclass instead.

        ``@RMSNorm.register_oot``, ``@RMSNorm.register_oot()``,
        ``@CustomOp.register_oot("RMSNorm")``, ``@CustomOp.register_oot(name="rms_norm")`` and
        ``CustomOp.register_oot(_decorated_op_cls=MyRMSNorm, name="RMSNorm")`` are equivalent.

        Args:
            _decorated_op_cls: the replacement, or the name.
            name: class name or registered name of the replaced layer; by default, the class that
                this method is called on.

        Raises:
            InvalidLayerError: (a TypeError) the decorated object is not a class.
            DuplicateLayerError: (a ValueError) the layer already has a replacement.
            ReplacementError: (a TypeError) the class is not a subclass of the replaced layer, or
                the replaced layer is not named.
        """
        if isinstance(_decorated_op_cls, str) and name is None:
            _decorated_op_cls, name = None, _decorated_op_cls
        if name is None and cls is _kind(cls):
            raise ReplacementError(
                f"{cls.__name__}.register_oot does not say what is to be replaced. Name it, as in "
                f'@{cls.__name__}.register_oot("RMSNorm"), or call it on that class: '
                "@RMSNorm.register_oot."
            )

        def decorate(layer: ReplaceableT) -> ReplaceableT:
            if name is None and isinstance(layer, type):
                check_replacement(cls, layer)
            register_oot(cls.__name__ if name is None else name, layer)
            return layer

        return decorate if _decorated_op_cls is None else decorate(_decorated_op_cls)


def _kind(cls: type[Replaceable]) -> type[Replaceable]:
    """Return the kind of *cls*: ``CustomOp`` or ``PluggableLayer``."""
    return next(base for base in cls.__mro__ if Replaceable in (base, *base.__bases__))


def _blank(cls: type[Replaceable]) -> Replaceable:
    """Return an uninitialized object of exactly this class."""
    return nn.Module.__new__(cls)


# Layers that another package can replace as a whole.


class PluggableLayer(Replaceable):
    """A layer with its own parameters and submodules that another package can replace.

    Unlike a :class:`CustomOp`, it cannot be disabled and has no method per platform: it consists of
    ops and other layers, which select kernels. Both kinds share one registry.

    Example::

        @PluggableLayer.register("row_parallel_linear")
        class RowParallelLinear(PluggableLayer): ...

        @RowParallelLinear.register_oot      # in another package
        class MyRowParallelLinear(RowParallelLinear): ...
    """


# Warnings about entries of ``custom_ops`` and replacements that had no effect on a model.


def warn_of_unused_ops(config: CompilationConfig) -> None:
    """Warn about each op in ``custom_ops`` that was not built under *config*.

    Call it after a model is built. The warning points to the innermost line outside opweave.
    """
    built = config.enabled_custom_ops.keys() | config.disabled_custom_ops.keys()
    for name in sorted(config.named_custom_ops - built):
        if name in op_registry:
            reason = "is not present in the model, so it has no effect"
        else:
            reason = "doesn't exist (or wasn't imported or registered). " + _meant(name)
        warnings.warn(
            f"custom_ops names {name!r}, which {reason.rstrip('.')}.",
            UnusedOpWarning,
            stacklevel=_outside(),
        )


def warn_of_unused_replacements() -> None:
    """Warn about each replacement of an unknown layer, after a model's layers are imported."""
    replacements = set(op_registry_oot.values())
    names = {*op_registry, *(c.__name__ for c in _subclasses(Replaceable) if c not in replacements)}
    for name in sorted(op_registry_oot.keys() - names):
        warnings.warn(
            f"{full_name(op_registry_oot[name])} replaces {name!r}, which no layer is called. "
            + did_you_mean(name, names),
            UnusedOpWarning,
            stacklevel=_outside(),
        )


def _subclasses(cls: type[object]) -> Iterator[type[object]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _meant(name: str) -> str:
    by_class = {layer.__name__: registered for registered, layer in op_registry.items()}
    return did_you_mean(by_class.get(name, name), op_registry)


def _outside() -> int:
    """Return the ``stacklevel`` of the innermost frame outside opweave."""
    for level in count(1):
        name = sys._getframe(level).f_globals.get("__name__", "")
        if not is_in_project(name):
            return level
    raise AssertionError("unreachable: a stack begins somewhere")
