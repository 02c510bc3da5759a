"""Selection of an implementation, and the errors of a call that none fits."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from opweave import torch_compat
from opweave.ir import errors
from opweave.ir.op import IrOpImpl, OpDefinition, tensors_in
from opweave.ir.priority import NATIVE, Entries, PriorityEntry, SizeRange, merge
from opweave.ir.rules import DIFFERENTIABLE
from opweave.ir.scope import Requirements, current_scope

# Selection of an implementation.
#
# Eager calls, graph lowering, export and explain all use :func:`select`. The eager fast path is
# generated from the same :func:`candidates` (see :mod:`opweave.ir.codegen`).


UNDER_AUTOCAST = "torch.autocast is on"
UNDER_VMAP = "torch.vmap maps over an argument, which only native supports"


class Policy(NamedTuple):
    """The settings that a selection depends on.

    Attributes:
        priority: the merged priority list, native last.
        required: the traits an implementation must have, and the setting behind each.
        tuned: the merged list by number of tokens, if a tuning file chooses by it; *priority* is
            then the list for calls whose number of tokens is not known.
    """

    priority: Entries
    required: Requirements
    tuned: tuple[SizeRange, ...] = ()

    def preceded_by(self, entries: Entries) -> Policy:
        """Return the policy with a stronger priority list."""
        tuned = (r._replace(entries=merge([entries, r.entries])) for r in self.tuned)
        return Policy(merge([entries, self.priority]), self.required, tuple(tuned))

    def by_size(self) -> list[tuple[int | None, Policy]]:
        """Return the policy of each range of token counts, with the limit of the range."""
        if not self.tuned:
            return [(None, self)]
        return [(r.limit, Policy(r.entries, self.required)) for r in self.tuned]

    def for_call(self, op: OpDefinition, values: Sequence[Any]) -> Policy:
        """Return the policy for the number of tokens of a call."""
        if not self.tuned:
            return self
        *limited, (_, unlimited) = self.by_size()
        bounds = torch_compat.size_bounds(tokens_of(op, values))
        if bounds is None:
            return Policy(self.priority, self.required)
        low, high = (_range_of(bound, limited, unlimited) for bound in bounds)
        # A dynamic size that may be in several ranges has the choice without tuning.
        return low if low is high else Policy(self.priority, self.required)


def _range_of(
    tokens: float, limited: Sequence[tuple[int | None, Policy]], unlimited: Policy
) -> Policy:
    fitting = (policy for limit, policy in limited if limit is not None and tokens <= limit)
    return next(fitting, unlimited)


class Candidate(NamedTuple):
    """An implementation in the priority list."""

    entry: PriorityEntry
    impl: IrOpImpl
    obstacle: str | None  # why it cannot run regardless of the arguments


class Rejection(NamedTuple):
    """An implementation that was passed over.

    Attributes:
        provider: its provider.
        reason: why.
        origin: the setting that put the provider into the priority list.
    """

    provider: str
    reason: str
    origin: str


class Selection(NamedTuple):
    """The chosen implementation, and why those before it were rejected.

    Attributes:
        op: the op.
        impl: the chosen implementation.
        origin: the setting that put its provider into the priority list.
        rejected: the implementations before it, in the order they were tried.
        policy: the priority and requirements of the selection.
    """

    op: OpDefinition
    impl: IrOpImpl
    origin: str
    rejected: tuple[Rejection, ...]
    policy: Policy

    @property
    def provider(self) -> str:
        """The provider of the chosen implementation."""
        return self.impl.provider


def policy_for(
    op: OpDefinition, call_site: Entries = (), *, differentiable: bool = False
) -> Policy:
    """Return the current policy: call site, scope and the registry's settings."""
    op.settings.ensure_ready()
    scope, settings = current_scope(), op.settings
    stronger = [call_site, *(scope.priorities.get(op, []) if scope else [])]
    lists = [*stronger, *settings.priorities(op.name, op.impls)]
    for entries in lists:
        op.check_providers(entries)
    required = {**settings.required, **(scope.required if scope else {})}
    if differentiable:
        required[DIFFERENTIABLE] = "an argument requires a gradient"
    able = _with_traits(op, required)
    tuned = []
    for limit, entries in settings.tuned(op.name) if op.schema.tensors else ():
        registered = tuple(entry for entry in entries if entry.provider in op.impls)
        merged = merge([*stronger, *settings.priorities(op.name, op.impls, registered), able])
        tuned.append(SizeRange(limit, merged))
    if len(tuned) == 1:  # the same choice for all sizes
        return Policy(tuned[0].entries, required)
    return Policy(merge([*lists, able]), required, tuple(tuned))


def tokens_of(op: OpDefinition, values: Sequence[Any]) -> int | torch.SymInt | None:
    """Return the first dimension of the first tensor argument: the number of tokens.

    It is 0 for a tensor without dimensions, and None if the argument is None.
    """
    value = values[op.schema.names.index(op.schema.tensors[0].name)]
    if not isinstance(value, torch.Tensor):
        return None
    return value.shape[0] if value.dim() else 0


def _with_traits(op: OpDefinition, required: Requirements) -> Entries:
    """Return every provider with the required traits if native lacks one of them."""
    if required.keys() <= op.impls[NATIVE].traits:
        return ()
    origin = f"has the required traits: {', '.join(required)}"
    return tuple(
        PriorityEntry(impl.provider, False, origin)
        for impl in op.impls.values()
        if required.keys() <= impl.traits
    )


def candidates(op: OpDefinition, policy: Policy) -> list[Candidate]:
    """Return the implementations of *op* in priority order, including those with an obstacle."""
    return [
        Candidate(entry, impl, _obstacle(impl, policy))
        for entry in policy.priority
        for impl in [op.impls[entry.provider]]
    ]


def select(op: OpDefinition, values: Sequence[Any], policy: Policy) -> Selection:
    """Choose the implementation of *op* for *values* (one per parameter; tensors may be fake).

    Raises:
        ProviderUnavailableError, ProviderRejectedError: a provider marked ``name!`` is passed over.
        NoImplementationError: no implementation has the required traits.
        PredicateFailedError: a predicate raised.
    """
    policy = policy.for_call(op, values)
    return _first(op, candidates(op, policy), values, policy)


def _first(
    op: OpDefinition, tried: list[Candidate], values: Sequence[Any] | None, policy: Policy
) -> Selection:
    """Return the first candidate without an obstacle that accepts *values*, if given."""
    rejected: list[Rejection] = []
    for candidate in tried:
        entry, impl = candidate.entry, candidate.impl
        reason = candidate.obstacle or (None if values is None else impl.rejection(values))
        if reason is None:
            return Selection(op, impl, entry.origin, tuple(rejected), policy)
        rejected.append(Rejection(entry.provider, reason, entry.origin))
        if entry.strict:
            raise _strict_error(op, candidate, reason)
    reasons = "; ".join(f"{r.provider}: {r.reason}" for r in rejected)
    raise errors.NoImplementationError(
        f"{op.name}: no implementation has the required traits. {reasons}. Add a provider that has "
        "them to the priority, or drop the requirement."
    )


def select_native(op: OpDefinition, policy: Policy, why: str) -> Selection:
    """Choose native and reject every other implementation with the reason *why*.

    Raises:
        ProviderUnavailableError, ProviderRejectedError: a provider marked ``name!`` is passed over.
        NoImplementationError: native lacks a required trait.
    """
    only = [
        c._replace(obstacle=c.obstacle or (None if c.entry.provider == NATIVE else why))
        for c in candidates(op, policy)
    ]
    return _first(op, only, None, policy)


def select_here(op: OpDefinition, values: Sequence[Any], policy: Policy) -> Selection:
    """Choose as :func:`select` does, but replace a kernel by native if autocast applies to it.

    Raises:
        IrError: see :func:`select` and :func:`native_for`.
    """
    selection = select(op, values, policy)
    return native_for(selection) if op.autocast and autocasts(tensors_in(values)) else selection


def native_for(selection: Selection) -> Selection:
    """Replace a selected kernel by native, which casts as torch's operators do under autocast.

    Raises:
        ProviderRejectedError: the kernel's provider is marked ``name!``.
        NoImplementationError: native lacks a required trait.
    """
    op, policy = selection.op, selection.policy
    if selection.provider == NATIVE:
        return selection
    strict = any(e.strict and e.provider == selection.provider for e in policy.priority)
    if strict or not policy.required.keys() <= op.impls[NATIVE].traits:
        requirement = (
            f"{selection.provider}!" if strict else f"the traits {sorted(policy.required)}"
        )
        error = errors.ProviderRejectedError if strict else errors.NoImplementationError
        raise error(
            f"{op.name} is called under torch.autocast, where only its native implementation casts "
            f"as torch's operators do, but {requirement} is required. Call it under "
            "torch.autocast(..., enabled=False)."
        )
    passed = Rejection(selection.provider, UNDER_AUTOCAST, selection.origin)
    return selection._replace(impl=op.impls[NATIVE], rejected=(*selection.rejected, passed))


def autocasts(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether ``torch.autocast`` is enabled for the device of one of *tensors*."""
    return torch_compat.any_autocast_enabled() and any(
        torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        for device in {tensor.device.type for tensor in tensors}
    )


def needs_gradient(values: Sequence[Any]) -> bool:
    """Whether reverse-mode or forward-mode autograd would record a call with *values*."""
    tensors = tensors_in(values)
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return recorded or any(torch_compat.has_tangent(t) for t in tensors)


def _obstacle(impl: IrOpImpl, policy: Policy) -> str | None:
    if not impl.supported:
        return impl.unsupported_reason
    for trait, origin in policy.required.items():
        if trait not in impl.traits:
            return f"is not {trait}, required by {origin}"
    return None


def _strict_error(op: OpDefinition, candidate: Candidate, reason: str) -> Exception:
    name = candidate.entry.provider
    others = [p for p in op.supported_providers() if p != name]
    advice = (
        f"Available here: {', '.join(others)}. Write {name!r} instead of '{name}!' to allow "
        "fallback."
    )
    request = f"{op.name}: provider {name!r} was requested as '{name}!' ({candidate.entry.origin})"
    if candidate.obstacle:
        return errors.ProviderUnavailableError(f"{request} but cannot be used: {reason}. {advice}")
    return errors.ProviderRejectedError(
        f"{request} but does not accept the arguments: {reason}. {advice}"
    )


# Warn if a required gradient prevents a kernel from running, which inference rarely intends.


_warned = False


def warn_of_fallback(selection: Selection) -> None:
    """Warn once per process that a kernel was passed over because it is not differentiable."""
    global _warned
    if _warned or DIFFERENTIABLE not in selection.policy.required:
        return
    impls = selection.op.impls
    rejected = [impls[r.provider] for r in selection.rejected]
    passed_over = [i.provider for i in rejected if i.supported and DIFFERENTIABLE not in i.traits]
    if not passed_over:
        return
    _warned = True
    warnings.warn(
        f"{selection.op.name} runs {selection.provider} instead of {passed_over[0]}, which is not "
        "differentiable, because an argument requires a gradient. For inference, call the model "
        "under torch.no_grad() or torch.inference_mode(). This is shown once, for the first op.",
        errors.GradientFallbackWarning,
        stacklevel=3,
    )
