"""Explain, describe and record which implementations run, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from opweave import torch_compat
from opweave.ir import selection as selections
from opweave.ir.dispatch import CallSite
from opweave.ir.errors import InvalidOpError
from opweave.ir.op import IrOpImpl, OpDefinition, shown, tensors_in
from opweave.ir.priority import Entries
from opweave.ir.registry import IrOp
from opweave.ir.scope import Scope, current_scope, entered, left_to_python
from opweave.registration import Owner

# Describe an op as plain data, for the CLI and the server.


def describe(op: IrOp) -> dict[str, Any]:
    """Return the definition, priority and implementations of *op*, ready for JSON.

    ``priority`` is the order for calls with any number of tokens. With a tuning file that chooses
    by it, ``tuned`` has the order for each range, in ascending order.
    """
    policy = selections.policy_for(op)
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


# Explain which implementation a call of an op runs, and why.


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
    differentiable = selections.needs_gradient(values)
    policy = selections.policy_for(op, entries, differentiable=differentiable)
    if (torch_compat.is_in_vmap() or not differentiable) and any(
        map(torch_compat.is_batched, tensors_in(values))
    ):
        return explained(selections.select_native(op, policy, selections.UNDER_VMAP), values)
    return explained(selections.select_here(op, values, policy), values)


def _op_and_entries(callee: object) -> tuple[OpDefinition, Entries]:
    if isinstance(callee, CallSite):
        return callee.op, callee.entries
    op = getattr(callee, "wrapped", callee)
    if isinstance(op, IrOp):
        return op, ()
    raise InvalidOpError(
        f"explain takes an op, such as ir.ops.rms_norm, and its arguments; found {callee!r}."
    )


def explained(selection: selections.Selection, values: tuple[Any, ...]) -> Explanation:
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
        f"{name}={shown(value)}" for name, value in zip(op.schema.names, values, strict=True)
    )
    return Explanation(
        op.name, call, selection.provider, tuple(verdicts), dict(selection.policy.required)
    )


def _plugin(op: OpDefinition, provider: str) -> str:
    impl = op.impls.get(provider)
    return "" if impl is None or impl.owner is None else str(impl.owner)


# Record which implementations run: ``ir.record`` and ``opweave.explain``.


@dataclass
class Record:
    """The implementations that ran: the number of calls for each distinct outcome of each op."""

    _outcomes: dict[tuple[Any, ...], tuple[Explanation, int]] = field(default_factory=dict)

    def add(self, selection: selections.Selection, values: tuple[Any, ...]) -> None:
        """Count one call."""
        key = (selection.op.name, selection.provider, selection.rejected)
        example, count = self._outcomes.get(key) or (explained(selection, values), 0)
        self._outcomes[key] = example, count + 1

    def outcomes(self) -> list[tuple[Explanation, int]]:
        """Return an example call for each distinct outcome, and the number of such calls."""
        # A copy, because another thread may add calls.
        return list(self._outcomes.values())

    @property
    def selected_impls(self) -> dict[str, dict[str, int]]:
        """Calls by op and provider: ``{"rms_norm": {"opweave_c": 26}}``."""
        result: dict[str, dict[str, int]] = {}
        for (op, provider, _), (_, count) in self._outcomes.items():
            by_provider = result.setdefault(op, {})
            by_provider[provider] = by_provider.get(provider, 0) + count
        return result

    def __str__(self) -> str:
        """Return a table with a row for each distinct outcome."""
        rows = [_COLUMNS]
        for explained_call, count in self.outcomes():
            chosen = next(v for v in explained_call.verdicts if v.outcome == "chosen")
            verdicts = explained_call.verdicts
            others = [f"{v.provider}: {v.reason}" for v in verdicts if v is not chosen]
            first, *more = others or ["-"]
            rows.append((explained_call.op, chosen.provider, str(count), chosen.origin, first))
            rows += [("", "", "", "", other) for other in more]
        return text_table(rows)


def text_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return *rows* as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


_COLUMNS = ("op", "ran", "calls", "because of", "the others")


@contextmanager
def record() -> Iterator[Record]:
    """Record which implementations run inside the block, in this thread or asyncio task.

    Recorded calls are slower, because they bypass the fast path.
    """
    log = Record()
    with entered(Scope(current_scope(), recorder=log.add)):
        yield log


def explain_model(model: Callable[..., Any], /, *inputs: Any, **options: Any) -> Record:
    """Run ``model(*inputs, **options)`` once, and record which implementations its ops run.

    This is ``opweave.explain``. ``print`` the result for a table with each distinct outcome of an
    op, the number of such calls, the setting that led to it, and why other providers did not run.
    :func:`opweave.ir.explain` explains one call of an op without running it.

    Args:
        model: a module or function in eager mode; for compiled code, use
            ``opweave.compile.report()``.
    """
    with record() as log:
        model(*inputs, **options)
    return log


left_to_python("ir.record", record)
