"""Common base of ``CustomOp`` and ``PluggableLayer``: names, and replacement at construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar, cast, overload

from torch import nn

from opweave.layers import registry
from opweave.layers.errors import ReplacementError

T = TypeVar("T", bound=type[nn.Module])


class Replaceable(nn.Module):
    """A module that other packages can replace, by its class name or its registered name.

    Attributes:
        name: the registered name; an unregistered subclass has its parent's.
        op_registry: the layers of both kinds by name.
        op_registry_oot: the replacements by name.
    """

    name: str
    op_registry: ClassVar[dict[str, type[nn.Module]]] = registry.op_registry
    op_registry_oot: ClassVar[dict[str, type[Any]]] = registry.op_registry_oot

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Python goes on to call the __init__ of the class of what this returns.
        return super().__new__(registry.replacement(cls))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and unpickle as its own class, regardless of later registrations."""
        _, _, *state = cast(tuple[object, ...], super().__reduce_ex__(2))
        return (_blank, (type(self),), *state)

    @classmethod
    def register(cls, name: str) -> Callable[[T], T]:
        """Register the decorated class under *name*, and set its ``name``.

        Raises:
            LayerNameError: *name* is not an identifier, or is ``all`` or ``none``.
            InvalidLayerError: (a TypeError) the decorated object is not a class of this kind.
            DuplicateLayerError: (a ValueError) the name is taken, by a layer of either kind.
        """

        def decorate(layer: T) -> T:
            registry.register(_kind(cls), name, layer)
            return layer

        return decorate

    @overload
    @classmethod
    def register_oot(cls, _decorated_op_cls: T, name: str | None = None) -> T: ...

    @overload
    @classmethod
    def register_oot(
        cls, _decorated_op_cls: str | None = None, name: str | None = None
    ) -> Callable[[T], T]: ...

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

        def decorate(layer: T) -> T:
            if name is None and isinstance(layer, type):
                registry.check_replacement(cls, layer)
            registry.register_oot(cls.__name__ if name is None else name, layer)
            return layer

        return decorate if _decorated_op_cls is None else decorate(_decorated_op_cls)


def _kind(cls: type[Replaceable]) -> type[Replaceable]:
    """Return the kind of *cls*: ``CustomOp`` or ``PluggableLayer``."""
    return next(base for base in cls.__mro__ if Replaceable in (base, *base.__bases__))


def _blank(cls: type[Replaceable]) -> Replaceable:
    """Return an uninitialized object of exactly this class."""
    return nn.Module.__new__(cls)
