"""The one function that chooses an implementation.

Eager calls, graph lowering, export and explain all choose with :func:`select`; the eager
fast path is code generated from the same :func:`candidates` (see :mod:`opweave.ir.dispatch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opweave.base import compat
from opweave.ir.errors import (
    NoImplementationError,
    ProviderRejectedError,
    ProviderUnavailableError,
)
from opweave.ir.impl import IrOpImpl
from opweave.ir.priority import NATIVE, Entries, Entry, merge
from opweave.ir.scope import current_scope
from opweave.ir.settings import Requirements
from opweave.ir.traits import DIFFERENTIABLE

if TYPE_CHECKING:
    from opweave.ir.op import IrOp


UNDER_AUTOCAST = "torch.autocast is on"
UNDER_VMAP = "torch.vmap maps over an argument, and goes through native"


class Policy(NamedTuple):
    """Everything but the arguments that a selection depends on.

    Attributes:
        priority: the merged priority list, native last.
        required: the traits an implementation must have, and who requires each.
    """

    priority: Entries
    required: Requirements


class Candidate(NamedTuple):
    """An implementation in priority order; *obstacle* says why it is out whatever the arguments."""

    entry: Entry
    impl: IrOpImpl
    obstacle: str | None


class Rejection(NamedTuple):
    """An implementation that was passed over.

    Attributes:
        provider: whose it is.
        reason: why.
        origin: who put the provider into the priority list.
    """

    provider: str
    reason: str
    origin: str


class Selection(NamedTuple):
    """The outcome: the chosen implementation, and the reason for every one passed over.

    Attributes:
        op: the op.
        impl: the chosen implementation.
        origin: who put its provider into the priority list.
        rejected: those in front of it, in the order they were tried.
        policy: the priority and the requirements that led here.
    """

    op: IrOp
    impl: IrOpImpl
    origin: str
    rejected: tuple[Rejection, ...]
    policy: Policy

    @property
    def provider(self) -> str:
        """Whose implementation was chosen."""
        return self.impl.provider


def policy_for(op: IrOp, call_site: Entries = (), *, differentiable: bool = False) -> Policy:
    """Return the policy that holds here and now: call site, scope and the registry's settings."""
    op.registry.ensure_ready()
    scope, settings = current_scope(), op.registry.settings
    lists = [
        call_site,
        *(scope.priorities.get(op, []) if scope else []),
        *settings.priorities(op.name),
    ]
    for entries in lists:
        op.check_providers(entries)
    required = {**settings.required, **(scope.required if scope else {})}
    if differentiable:
        required[DIFFERENTIABLE] = "an argument requires a gradient"
    return Policy(merge([*lists, _with_traits(op, required)]), required)


def _with_traits(op: IrOp, required: Requirements) -> Entries:
    """Return every provider with the required traits, to be added where native lacks one."""
    if required.keys() <= op.impls[NATIVE].traits:
        return ()
    origin = f"has the required traits: {', '.join(required)}"
    return tuple(
        Entry(impl.provider, False, origin)
        for impl in op.impls.values()
        if required.keys() <= impl.traits
    )


def candidates(op: IrOp, policy: Policy) -> list[Candidate]:
    """Return the implementations of *op* in priority order, those out of the question included."""
    return [
        Candidate(entry, impl, _obstacle(impl, policy))
        for entry in policy.priority
        for impl in [op.impls[entry.provider]]
    ]


def select(op: IrOp, values: Sequence[Any], policy: Policy) -> Selection:
    """Choose the implementation of *op* for *values*, one per parameter, real or fake.

    Raises:
        ProviderUnavailableError, ProviderRejectedError: a provider marked ``name!`` is passed over.
        NoImplementationError: none has the required traits.
        PredicateFailedError: a predicate raised.
    """
    return _first(op, candidates(op, policy), values, policy)


def _first(
    op: IrOp, found: list[Candidate], values: Sequence[Any] | None, policy: Policy
) -> Selection:
    """Return the first that has no obstacle and, where values are given, accepts them."""
    rejected: list[Rejection] = []
    for candidate in found:
        entry, impl = candidate.entry, candidate.impl
        reason = candidate.obstacle or (None if values is None else impl.rejection(values))
        if reason is None:
            return Selection(op, impl, entry.origin, tuple(rejected), policy)
        rejected.append(Rejection(entry.provider, reason, entry.origin))
        if entry.strict:
            raise _strict_error(op, candidate, reason)
    reasons = "; ".join(f"{r.provider}: {r.reason}" for r in rejected)
    raise NoImplementationError(
        f"{op.name}: no implementation has the required traits. {reasons}. Put a provider that has "
        "them into the priority, or drop the requirement."
    )


def select_native(op: IrOp, policy: Policy, why: str) -> Selection:
    """Choose native where nothing else can run, and say *why* every other is passed over.

    Raises:
        ProviderUnavailableError, ProviderRejectedError: a provider marked ``name!`` is passed over.
        NoImplementationError: native lacks a required trait.
    """
    only = [
        c._replace(obstacle=c.obstacle or (None if c.entry.provider == NATIVE else why))
        for c in candidates(op, policy)
    ]
    return _first(op, only, None, policy)


def select_here(op: IrOp, values: Sequence[Any], policy: Policy) -> Selection:
    """Choose as :func:`select` does, and under ``torch.autocast`` native for any kernel.

    Raises:
        IrError: as :func:`select` and :func:`native_for` raise.
    """
    selection = select(op, values, policy)
    return native_for(selection) if _casts(values) else selection


def native_for(selection: Selection) -> Selection:
    """Pass over a selected kernel under ``torch.autocast``: only native casts as torch does.

    Raises:
        ProviderRejectedError: the kernel's provider is marked ``name!``.
        NoImplementationError: native lacks a required trait.
    """
    op, policy = selection.op, selection.policy
    if selection.provider == NATIVE:
        return selection
    strict = any(e.strict and e.provider == selection.provider for e in policy.priority)
    if strict or not policy.required.keys() <= op.impls[NATIVE].traits:
        wanted = f"{selection.provider}!" if strict else f"the traits {sorted(policy.required)}"
        error = ProviderRejectedError if strict else NoImplementationError
        raise error(
            f"{op.name} is called under torch.autocast, where only its native implementation casts "
            f"as torch's operators do, but {wanted} is required. Call it under "
            "torch.autocast(..., enabled=False)."
        )
    passed = Rejection(selection.provider, UNDER_AUTOCAST, selection.origin)
    return selection._replace(impl=op.impls[NATIVE], rejected=(*selection.rejected, passed))


def _casts(values: Sequence[Any]) -> bool:
    """Whether ``torch.autocast`` is on for the device of a tensor among *values*."""
    return compat.any_autocast_enabled() and any(
        torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        for device in {tensor.device.type for tensor in tensors_in(values)}
    )


def needs_gradient(values: Sequence[Any]) -> bool:
    """Whether autograd, reverse or forward, would record a call with *values*."""
    tensors = tensors_in(values)
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return recorded or any(compat.has_tangent(t) for t in tensors)


def tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among *values*, those inside lists included."""
    found: list[torch.Tensor] = []
    for value in values:
        items = value if isinstance(value, (list, tuple)) else (value,)
        found += [item for item in items if isinstance(item, torch.Tensor)]
    return found


def _obstacle(impl: IrOpImpl, policy: Policy) -> str | None:
    if not impl.supported:
        return impl.unsupported_reason
    for trait, origin in policy.required.items():
        if trait not in impl.traits:
            return f"is not {trait}, required by {origin}"
    return None


def _strict_error(op: IrOp, candidate: Candidate, reason: str) -> Exception:
    name = candidate.entry.provider
    others = [p for p in op.supported_providers() if p != name]
    advice = (
        f"Available here: {', '.join(others)}. Write {name!r} instead of '{name}!' to allow "
        "fallback."
    )
    asked = f"{op.name}: provider {name!r} was requested as '{name}!' ({candidate.entry.origin})"
    if candidate.obstacle:
        return ProviderUnavailableError(f"{asked} but cannot be used: {reason}. {advice}")
    return ProviderRejectedError(f"{asked} but does not accept the arguments: {reason}. {advice}")
