"""Operations as modules, with a method for each platform."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from types import MethodType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from opweave import platforms, torch_compat
from opweave.config import current_compilation_config
from opweave.layers.registry import InvalidLayerError, Replaceable, full_name

# Choose the method of a ``CustomOp`` for a platform.


def method_for(op: type, base: type, tags: Sequence[str]) -> str:
    """Return the name of the method of *op* for a platform with these dispatch tags, best first.

    This is the first ``forward_<tag>`` that *op* defines. If it defines none, it is that of the
    first tag if *base* has it, else ``forward_native``.

    >>> class Base:
    ...     forward_native = forward_cuda = forward_oot = None
    >>> class Op(Base):
    ...     def forward_cuda(self): ...
    >>> [method_for(Op, Base, tags) for tags in (("hip", "cuda"), ("oot",), ("acme",))]
    ['forward_cuda', 'forward_oot', 'forward_native']
    """
    if _has_outdated_oot(op, base):
        tags = [tag for tag in tags if tag != "oot"]
    methods = [f"forward_{tag}" for tag in tags]
    for method in methods:
        if getattr(op, method, None) is not getattr(base, method, None):
            return method
    return methods[0] if methods and hasattr(base, methods[0]) else "forward_native"


def _has_outdated_oot(op: type, base: type) -> bool:
    """Whether a subclass has overridden a ``forward_...`` method, but inherits ``forward_oot``.

    The ``forward_oot`` of opweave's layers calls ops. If a package derives from such a layer and
    overrides only ``forward_native``, its override must run on the package's platform.
    """
    for cls in op.__mro__:
        if cls is base or "forward_oot" in vars(cls):
            return False
        if any(name.startswith("forward_") for name in vars(cls)):
            break
    return getattr(op, "forward_oot", None) is not getattr(base, "forward_oot", None)


# ``forward_native`` of one op, compiled on its own.


Dims = Mapping[str, int | list[int]]


def compiled_native(op: CustomOp, dims: Dims | None) -> Callable[..., Any]:
    """Return ``op.forward_native``, compiled at its first call.

    The method is compiled once for all instances and bound to this one, so that a copy of the
    instance runs with its own parameters.

    Raises:
        InvalidLayerError: *dims* names a parameter that ``forward_native`` does not have.
    """
    cls = type(op)
    backend = platforms.current_platform.simple_compile_backend
    return MethodType(_compiled(cls.forward_native, backend, _frozen(cls, dims)), op)


@cache
def _compiled(
    native: Callable[..., Any], backend: str, dims: tuple[tuple[str, tuple[int, ...]], ...]
) -> Callable[..., Any]:
    compiled = torch.compile(native, backend=backend, dynamic=not dims)
    signature = inspect.signature(native)

    @wraps(native)
    def run(self: CustomOp, *args: Any, **kwargs: Any) -> Any:
        # Part of a larger graph, whose sizes count. Dynamo of torch 2.11 loses what a compiled
        # method is bound to.
        if torch.compiler.is_compiling():
            return native(self, *args, **kwargs)
        if dims:
            arguments = signature.bind(self, *args, **kwargs).arguments
            for name, numbers in dims:
                _mark(arguments.get(name), numbers)
        return compiled(self, *args, **kwargs)

    return run


def _mark(value: object, numbers: tuple[int, ...]) -> None:
    if isinstance(value, Tensor):  # an optional argument may be None
        for number in numbers:
            torch_compat.mark_dynamic(value, number % value.dim())


def _frozen(cls: type[CustomOp], dims: Dims | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    parameters = inspect.signature(cls.forward_native).parameters
    for name in dims or {}:
        if name not in parameters:
            raise InvalidLayerError(
                f"dynamic_arg_dims of {full_name(cls)} names {name!r}, which forward_native does "
                f"not take. It takes {', '.join(list(parameters)[1:]) or 'nothing'}."
            )
    return tuple(
        (name, (numbers,) if isinstance(numbers, int) else tuple(numbers))
        for name, numbers in (dims or {}).items()
    )


# The base class.


T = TypeVar("T", bound=type[nn.Module])
_log = logging.getLogger(__name__)


class CustomOp(Replaceable):
    """An operation with one forward method per platform.

    A subclass defines ``forward_native`` in plain PyTorch, and any of ``forward_cpu``,
    ``forward_cuda``, ``forward_hip``, ``forward_xpu``, ``forward_tpu`` and ``forward_oot`` (for
    platforms of other packages, unless they set other ``dispatch_tags``). When an op is built,
    ``custom_ops`` of the current :class:`opweave.config.CompilationConfig` enables or disables it.
    An enabled op runs its platform's method, a disabled one ``forward_native``, which a compiler
    can fuse. Later changes of the configuration do not affect it.

    Args:
        enforce_enable: run the platform's method regardless of the configuration.
        compile_native: if the op is disabled, run ``forward_native`` under ``torch.compile``,
            unless the configuration turns compilation off.

    Example::

        @CustomOp.register("silu_and_mul")
        class SiluAndMul(CustomOp):
            def forward_native(self, x: Tensor) -> Tensor: ...
            def forward_cuda(self, x: Tensor) -> Tensor: ...
    """

    dynamic_arg_dims: Mapping[str, int | list[int]] | None = None

    def __init__(self, *, enforce_enable: bool = False, compile_native: bool = False) -> None:
        super().__init__()
        self._enforce_enable = enforce_enable
        self._forward_method = self.dispatch_forward(compile_native=compile_native)

    @classmethod
    def register(
        cls, name: str, dynamic_arg_dims: Mapping[str, int | list[int]] | None = None
    ) -> Callable[[T], T]:
        """Register the decorated class under *name*, and set its ``name``.

        Args:
            name: the name in ``custom_ops``.
            dynamic_arg_dims: for ``compile_native``: the dynamic dimensions by argument of
                ``forward_native``; other dimensions are compiled as static. By default every
                dimension is dynamic.

        Raises:
            LayerNameError: *name* is not an identifier, or is ``all`` or ``none``.
            InvalidLayerError: (a TypeError) the decorated object is not a class of this kind.
            DuplicateLayerError: (a ValueError) the name is taken, by a layer of either kind.
        """
        enter = super().register(name)

        def decorate(layer: T) -> T:
            enter(layer)
            if dynamic_arg_dims is not None:
                layer.dynamic_arg_dims = dict(dynamic_arg_dims)  # type: ignore[attr-defined]
            return layer

        return decorate

    @staticmethod
    def default_on() -> bool:
        """Return whether ops that are not in ``custom_ops`` are enabled."""
        return current_compilation_config().custom_ops_default_on

    @classmethod
    def enabled(cls) -> bool:
        """Return whether ``custom_ops`` of the current configuration enables this op.

        A class that is not registered uses its parent's name, or the default if it has none.
        """
        return current_compilation_config().enables_custom_op(getattr(cls, "name", None))

    def dispatch_forward(self, *, compile_native: bool = False) -> Callable[..., Any]:
        """Return the method that ``forward`` runs, and count the op in the configuration."""
        config = current_compilation_config()
        enabled = self._enforce_enable or self.enabled()
        config.count_custom_op(getattr(self, "name", type(self).__name__), enabled=enabled)
        if enabled:
            tags = platforms.current_platform.dispatch_tags
            method = method_for(type(self), CustomOp, tags)
            if method in ("forward_cuda", "forward_hip"):
                _note_missing(type(self), method)
            return getattr(self, method)  # type: ignore[no-any-return]
        if compile_native and config.compiles:
            return compiled_native(self, self.dynamic_arg_dims)
        return self.forward_native

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method chosen when the op was built."""
        return self._forward_method(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._rebind()

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica._rebind()
        return replica

    def _rebind(self) -> None:
        """Bind the method of a shallow copy to the copy instead of the original."""
        method = self._forward_method
        if isinstance(method, MethodType) and isinstance(method.__self__, type(self)):
            self._forward_method = MethodType(method.__func__, self)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op in plain PyTorch."""
        raise NotImplementedError(
            f"{full_name(type(self))} has no forward_native, which runs if the op is disabled or "
            "has no method for the platform. Define it."
        )

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op on the platform of this name; by default as ``forward_native``.

        ``forward_oot`` is for the platforms of other packages.
        """
        return self.forward_native(*args, **kwargs)

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def forward_hip(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op on ROCm; by default as ``forward_cuda``."""
        return self.forward_cuda(*args, **kwargs)


def _note_missing(cls: type[CustomOp], method: str) -> None:
    """Log once that an enabled op does not have a method for the GPU."""
    is_defined = any(
        getattr(cls, name) is not getattr(CustomOp, name) for name in (method, "forward_cuda")
    )
    if not is_defined and cls not in _noted:
        _noted.add(cls)
        _log.info("%s is enabled, but has no %s: forward_native runs.", full_name(cls), method)


_noted: set[type[CustomOp]] = set()
