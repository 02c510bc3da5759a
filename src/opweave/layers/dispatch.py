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
    methods = [f"forward_{tag}" for tag in tags]
    for method in methods:
        if getattr(op, method, None) is not getattr(base, method, None):
            return method
    return methods[0] if hasattr(base, methods[0]) else "forward_native"
