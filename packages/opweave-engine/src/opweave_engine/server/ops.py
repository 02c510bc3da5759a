"""The ops, with their preferred kernels and the kernels that ran."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from opweave.ir import IrOp, current_registry, policy_for
from opweave.ir.description import describe
from opweave_engine import KernelUse


def ops(kernels: Iterable[KernelUse]) -> list[dict[str, Any]]:
    """Return every op as plain data, with its preferred provider and its calls in *kernels*."""
    preference = preferred()
    ran: dict[str, list[dict[str, Any]]] = {name: [] for name in preference}
    for use in kernels:
        row = asdict(use)
        ran.setdefault(row.pop("op"), []).append(row)
    found = [describe(op) for op in _all()]
    return [
        {**each, "preferred": preference[each["op"]][0], "ran": ran[each["op"]]} for each in found
    ]


def preferred() -> dict[str, tuple[str, str]]:
    """Return, by op, the first provider of its priority that is available, and its plugin."""
    return {op.name: _first_available(op) for op in _all()}


def _all() -> list[IrOp]:
    registry = current_registry()
    registry.ensure_ready()
    return list(registry.ops.values())


def _first_available(op: IrOp) -> tuple[str, str]:
    for entry in policy_for(op).priority:
        impl = op.impls[entry.provider]
        if impl.supported:
            return impl.provider, "" if impl.owner is None else impl.owner.plugin
    return "", ""  # each is rejected: a required trait that none has
