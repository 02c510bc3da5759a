"""Explain which implementation a call of an op runs, and why."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from opweave.base import compat
from opweave.ir.errors import InvalidOpError
from opweave.ir.op import IrOp
from opweave.ir.overloads import CallSite
from opweave.ir.priority import Entries
from opweave.ir.selection import (
    UNDER_VMAP,
    Selection,
    needs_gradient,
    policy_for,
    select_here,
    select_native,
    tensors_in,
)


class Verdict(NamedTuple):
    """The outcome for one provider.

    Attributes:
        provider: its name.
        outcome: ``chosen``, ``rejected``, ``not reached`` or ``not listed``.
        reason: why.
        origin: the setting that put it into the priority list.
        plugin: name, distribution and version of the plugin that registered it, or empty.
    """

    provider: str
    outcome: str
    reason: str
    origin: str
    plugin: str = ""


class Explanation(NamedTuple):
    """The result of :func:`explain`; ``print`` it, or convert it with :meth:`to_dict`.

    Attributes:
        op: the op's name.
        call: the arguments: dtypes, shapes, values.
        chosen: the provider that runs.
        verdicts: the outcome for each provider, in order of priority; unlisted providers last.
        required: the traits that an implementation must have, and the setting behind each.
    """

    op: str
    call: str
    chosen: str
    verdicts: tuple[Verdict, ...]
    required: dict[str, str]

    def __str__(self) -> str:
        width = max(len(v.provider) for v in self.verdicts)
        marks = {"chosen": "✓", "rejected": "✗", "not reached": "·", "not listed": "·"}
        lines = [f"{self.op}({self.call})"]
        for trait, origin in self.required.items():
            lines.append(f"  requires {trait} ({origin})")
        for v in self.verdicts:
            reason = f": {v.reason}" if v.reason else ""
            origin = f"  [{v.origin}]" if v.origin else ""
            plugin = f"  plugin {v.plugin}" if v.plugin else ""
            mark = f"{marks[v.outcome]} {v.provider:<{width}}"
            lines.append(f"  {mark}  {v.outcome}{reason}{origin}{plugin}")
        return "\n".join([*lines, f"  → {self.chosen}"])

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data, ready for JSON."""
        return {
            "op": self.op,
            "call": self.call,
            "chosen": self.chosen,
            "required": dict(self.required),
            "providers": [{**v._asdict(), "plugin": v.plugin or None} for v in self.verdicts],
        }


def explain(callee: IrOp | CallSite, /, *args: Any, **kwargs: Any) -> Explanation:
    """Explain which implementation a call with these arguments would run, without running it.

    Args:
        callee: an op, an op with named providers (``op.using("triton")``), or a wrapper of another
            package with the op as its attribute ``wrapped``.
        args, kwargs: the arguments of the call; tensors may be fake.

    Raises:
        InvalidOpError: *callee* is not an op.
        IrError: the selection fails, as it would in the call.
    """
    op, entries = _op_and_entries(callee)
    values = op.bind(*args, **kwargs)
    differentiable = needs_gradient(values)
    policy = policy_for(op, entries, differentiable=differentiable)
    if (compat.is_in_vmap() or not differentiable) and any(
        map(compat.is_batched, tensors_in(values))
    ):
        return explained(select_native(op, policy, UNDER_VMAP), values)
    return explained(select_here(op, values, policy), values)


def _op_and_entries(callee: object) -> tuple[IrOp, Entries]:
    if isinstance(callee, CallSite):
        return callee.op, callee.entries
    op = getattr(callee, "wrapped", callee)
    if isinstance(op, IrOp):
        return op, ()
    raise InvalidOpError(
        f"explain takes an op, such as ir.ops.rms_norm, and its arguments; found {callee!r}."
    )


def explained(selection: Selection, values: tuple[Any, ...]) -> Explanation:
    """Return the explanation of a selection that was made for *values*."""
    op = selection.op
    reasons = {r.provider: r.reason for r in selection.rejected}
    verdicts = []
    for entry in selection.policy.priority:
        if entry.provider in reasons:
            outcome, reason = "rejected", reasons[entry.provider]
        elif entry.provider == selection.provider:
            outcome, reason = "chosen", ""
        else:
            outcome, reason = "not reached", f"{selection.provider} comes first"
        plugin = _plugin(op, entry.provider)
        verdicts.append(Verdict(entry.provider, outcome, reason, entry.origin, plugin))
    listed = {entry.provider for entry in selection.policy.priority}
    for provider in (name for name in op.impls if name not in listed):
        plugin = _plugin(op, provider)
        verdicts.append(Verdict(provider, "not listed", "in no priority list", "", plugin))
    call = ", ".join(
        f"{name}={_show(value)}" for name, value in zip(op.schema.names, values, strict=True)
    )
    return Explanation(
        op.name, call, selection.provider, tuple(verdicts), dict(selection.policy.required)
    )


def _plugin(op: IrOp, provider: str) -> str:
    impl = op.impls.get(provider)
    return "" if impl is None or impl.owner is None else str(impl.owner)


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = ", ".join(map(str, value.shape))
        dtype = str(value.dtype).removeprefix("torch.")
        plain = value.layout is not torch.strided or value.is_contiguous()
        strided = "" if plain else f" strides {tuple(value.stride())}"
        return f"{dtype}[{shape}]{strided} {value.device}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_show, value))}]"
    return repr(value)
