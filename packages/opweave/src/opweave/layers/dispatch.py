"""Choose the method of a ``CustomOp`` for a platform."""

from __future__ import annotations

from collections.abc import Sequence


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
