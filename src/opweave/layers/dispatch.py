"""Which method of a ``CustomOp`` runs on which platform."""

from __future__ import annotations

from collections.abc import Sequence


def method_for(op: type, base: type, tags: Sequence[str]) -> str:
    """Return the name of the method of *op* for a platform with those dispatch tags, best first.

    That is the first ``forward_<tag>`` that *op* defines; *base* has what runs where it defines
    none.

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
    """Whether *op* inherits a ``forward_oot`` from a class that others have overridden in part.

    opweave's layers have one that calls ops. A package that derives from such a layer, and gives
    it another ``forward_native`` only, wants that to run on its own platform.
    """
    for cls in op.__mro__:
        if cls is base or "forward_oot" in vars(cls):
            return False
        if any(name.startswith("forward_") for name in vars(cls)):
            break
    return getattr(op, "forward_oot", None) is not getattr(base, "forward_oot", None)
