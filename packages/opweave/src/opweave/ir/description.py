"""Describe an op as plain data, for the CLI and the server."""

from __future__ import annotations

import inspect
from typing import Any

from opweave.base.owner import Owner
from opweave.ir.impl import IrOpImpl
from opweave.ir.op import IrOp
from opweave.ir.priority import Entries
from opweave.ir.selection import policy_for


def describe(op: IrOp) -> dict[str, Any]:
    """Return the definition, priority and implementations of *op*, ready for JSON.

    ``priority`` is the order for calls with any number of tokens. With a tuning file that chooses
    by it, ``tuned`` has the order for each range, in ascending order.
    """
    policy = policy_for(op)
    return {
        "op": op.name,
        "kind": "op",
        "schema": op.schema.torch,
        "summary": (inspect.getdoc(op.native) or "").partition("\n")[0],
        "activations": list(op.activations),
        "allow_inplace": op.allow_inplace,
        "composite": op.composite,
        "declared": str(op.site),
        "plugin": None if op.owner is None else str(op.owner),
        "priority": _listed(policy.priority),
        "tuned": [{"max_tokens": r.limit, "priority": _listed(r.entries)} for r in policy.tuned],
        "implementations": [_implementation(impl) for impl in op.impls.values()],
    }


def _listed(entries: Entries) -> list[dict[str, Any]]:
    return [{"provider": e.provider, "strict": e.strict, "origin": e.origin} for e in entries]


def owner_in_force(op: IrOp, provider: str) -> Owner | None:
    """Return the plugin that registered *provider* for *op*, if any, without loading kernels."""
    return op._impls[provider].owner


def _implementation(impl: IrOpImpl) -> dict[str, Any]:
    return {
        "provider": impl.provider,
        "available": impl.supported,
        "reason": None if impl.supported else impl.unsupported_reason,
        "inplace": impl.inplace,
        "traits": sorted(impl.traits),
        "registered": str(impl.site),
        "plugin": None if impl.owner is None else str(impl.owner),
    }
