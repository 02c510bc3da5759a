"""Call paths of an op: a generated fast path, the slow path behind it, and the call variants."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from opweave import plain_call, torch_compat
from opweave.ir.codegen import Function, Generator, Kind, Ranges, functional, run_donating
from opweave.ir.donation import poison_unused
from opweave.ir.priority import Entries
from opweave.ir.results import check_result
from opweave.ir.schema import check_types
from opweave.ir.scope import Scope, current_scope, entered
from opweave.ir.selection import (
    Policy,
    candidates,
    needs_gradient,
    policy_for,
    select_here,
    tensors_in,
    warn_of_fallback,
)
from opweave.ir.torch_ops import prepare_sharding

if TYPE_CHECKING:
    from opweave.ir.impl import IrOpImpl
    from opweave.ir.op import IrOp


# Call paths of an op: a generated fast path, and the slow path behind it.
#
# The fast path is generated from the candidates that selection walks, see
# :mod:`opweave.ir.codegen`. Modes, tensor subclasses, gradients and errors go to
# :meth:`Path.slow`, which calls :func:`opweave.ir.selection.select`.


class _OpSignature:
    """The ``__signature__`` of a :class:`Callee` and its class, for ``inspect`` and ``help``."""

    def __get__(self, instance: object, owner: type[Callee]) -> inspect.Signature:
        op: IrOp | None = vars(owner).get("called_op")
        if op is None:
            raise AttributeError("__signature__")  # a class such as IrOp itself
        return inspect.signature(op.native)


class Callee:
    """A callable whose class is unique, so that ``__call__`` can be a generated function.

    This is the fastest way from ``op(...)`` to a kernel: no dictionary lookup and no ``*args``.
    """

    __call__: Function
    traced: Function  # the torch op that Dynamo puts into its graph for a call
    called_op: IrOp  # set on the unique class
    __signature__ = _OpSignature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        own: Self = object.__new__(type(cls.__name__, (cls,), {}))
        return own

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self  # an op is a singleton


class Path:
    """One way to call an op (kind and call-site priority), and the function generated for it.

    The function is generated on first use, again after each change of registrations or settings,
    and once for each distinct policy of the scopes it is called in. It becomes the ``__call__`` of
    *callee*, if there is one.
    """

    def __init__(
        self, op: IrOp, kind: Kind, call_site: Entries = (), callee: Callee | None = None
    ) -> None:
        self.op, self.kind, self.call_site, self.callee = op, kind, call_site, callee
        self.version = 0
        self.prepared = False
        # Scopes are short-lived; those with equal policies share a function.
        self._by_policy: dict[tuple[object, ...], Function] = {}
        if callee is not None:
            callee.traced = self.torch_op
            type(callee).__doc__ = op.native.__doc__  # help() reads it from the class
            type(callee).called_op = op
        self._install(None)

    @property
    def donates(self) -> bool:
        return self.kind is Kind.DONATING

    def reset(self) -> None:
        """Discard the generated functions; the next call generates them again."""
        self.version += 1
        self.prepared = False
        self._by_policy = {}
        self._install(None)

    def prepare(self) -> None:
        """Generate the function for the current settings."""
        with entered(Scope(None)):  # scopes have functions of their own
            self._install(self._candidates(policy_for(self.op, self.call_site)))
        self.prepared = True

    def _candidates(self, policy: Policy) -> Ranges:
        return [(limit, candidates(self.op, each)) for limit, each in policy.by_size()]

    def _install(self, found: Ranges | None) -> None:
        if found is None:
            self.source, self.function = "", _slow_function(self)
        else:
            self.source, self.function = Generator(
                self, found, check_result, in_scope=False
            ).compile()
        if self.callee is not None:
            torch_compat.trace_instead(self.function, _traced)
            torch_compat.run_untraced(self.function)
            setattr(type(self.callee), "__call__", self.function)  # noqa: B010 (not to be typed)

    def scoped(self, scope: Scope) -> Function:
        """Return the function for calls inside *scope*."""
        key = (self, self.version)
        found = scope.compiled.get(key)
        if found is None:
            found = _slow_function(self) if scope.recorders else self._in_scope()
            scope.compiled[key] = found
        return found

    def _in_scope(self) -> Function:
        policy = policy_for(self.op, self.call_site)
        key = (policy.priority, tuple(policy.required.items()), policy.tuned)
        found = self._by_policy.get(key)
        if found is None:
            given = self._candidates(policy)
            _, found = Generator(self, given, check_result, in_scope=True).compile()
            self._by_policy[key] = found
        return found

    def slow(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call that the fast path does not handle, or that comes before it is generated."""
        if self.op.ensure_prepared(self):
            return self.function(self.op, *args, **kwargs)
        if not self.op.autocast and torch_compat.any_autocast_enabled():
            with torch_compat.no_autocast():
                return self.function(self.op, *args, **kwargs)
        values = self.op.bind(*args, **kwargs)
        if self.kind is not Kind.KERNEL and _needs_dispatcher(values):
            if not needs_gradient(values):
                prepare_sharding(self.op, values)
            return self.torch_op(*args, **kwargs)
        check_types(self.op, values)
        return self._execute(values)

    @property
    def torch_op(self) -> Function:
        """The torch op that stands for this path in graphs."""
        return self.op.torch_ops.for_call(
            [str(entry) for entry in self.call_site], donates=self.donates
        )

    def _execute(self, values: tuple[Any, ...]) -> Any:
        differentiable = self.kind is not Kind.KERNEL and needs_gradient(values)
        policy = policy_for(self.op, self.call_site, differentiable=differentiable)
        selection = select_here(self.op, values, policy)
        warn_of_fallback(selection)
        scope = current_scope()
        for recorder in scope.recorders if scope else ():
            recorder(selection, values)
        args, kwargs = self.op.schema.split(values)
        donates = self.donates and not differentiable
        impl = selection.impl
        run = partial(run_donating, impl) if donates else functional(impl)
        with impl.noting():
            result = run(*args, **kwargs)
        check_result(impl, result, args, kwargs)
        if donates and self.op.registry.settings.check_donation:
            poison_unused(self.op, values, result)
        return result


def _slow_function(path: Path) -> Function:
    """Return a function for a path that is not prepared (code generation is lazy) or recorded."""

    def call(_callee: object, *args: Any, **kwargs: Any) -> Any:
        return path.slow(*args, **kwargs)

    return call


def _traced(callee: Callee, *args: Any, **kwargs: Any) -> Any:
    # Must not have a closure: Dynamo would look it up in the function that this one replaces.
    return callee.traced(*args, **kwargs)


def _needs_dispatcher(values: tuple[Any, ...]) -> bool:
    """Whether the torch dispatcher must run the call: modes, tracers, subclasses, functorch."""
    return (
        plain_call.is_watched()
        or any(type(t) not in plain_call.PLAIN_TYPES for t in tensors_in(values))
        or any(
            hasattr(type(v), "__torch_function__") and not isinstance(v, torch.Tensor)
            for v in values
        )
    )


# The call variants ``op.maybe_inplace`` and ``op.using(...)``.


class IrOpInplaceOverload(Callee):
    """``op.maybe_inplace``: call the op and donate its activations.

    A kernel may write its outputs into their memory, so reading an activation after the call is
    undefined behavior.

    Attributes:
        op: the op.
        path: its call path.
    """

    def __init__(self, op: IrOp, entries: Entries = ()) -> None:
        self.op = op
        self.path = Path(op, Kind.DONATING, entries, callee=self)

    def __repr__(self) -> str:
        return f"<maybe_inplace of {self.op!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        names = [str(entry) for entry in self.path.call_site]
        return getattr, (self.op.using(*names) if names else self.op, "maybe_inplace")


class CallSite(Callee):
    """``op.using(...)``: call the op with a priority that comes before all others.

    Attributes:
        op: the op.
        entries: the priority.
        paths: its call paths, functional and donating.
        maybe_inplace: the donating variant, if the op has one.
    """

    maybe_inplace: IrOpInplaceOverload

    def __init__(self, op: IrOp, entries: Entries) -> None:
        self.op, self.entries = op, entries
        self.paths = [Path(op, Kind.CALL, entries, callee=self)]
        if op.allow_inplace:
            self.maybe_inplace = IrOpInplaceOverload(op, entries)
            self.paths.append(self.maybe_inplace.path)

    def __repr__(self) -> str:
        return f"<{self.op.name}.using({', '.join(repr(str(e)) for e in self.entries)})>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _call_site, (self.op, *map(str, self.entries))

    def __getattr__(self, name: str) -> Any:
        if name == "maybe_inplace":
            return getattr(self.op, name)  # raises DonationError
        raise AttributeError(f"{self!r} has no attribute {name!r}; see the op, its attribute 'op'.")

    def dispatch(self, *args: Any, **kwargs: Any) -> IrOpImpl:
        """Return the implementation that a call with these arguments would run."""
        return self.op.dispatch_at(self.entries, *args, **kwargs)

    def get_priority(self) -> list[str]:
        """Return the providers in the current order of priority, this call site's first."""
        return [str(entry) for entry in policy_for(self.op, self.entries).priority]


def _call_site(op: IrOp, *providers: str) -> CallSite:
    return op.using(*providers)


class TracedCallSite:
    """``op.using(...)`` while Dynamo traces: calls the torch op with the names as an argument.

    Dynamo cannot trace code generation, so this class avoids it. The names are checked when the
    graph runs.
    """

    def __init__(self, op: IrOp, using: str) -> None:
        self._op, self._using = op, using

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._op.torch_ops.annotated(*args, using=self._using, **kwargs)

    def maybe_inplace(self, *args: Any, **kwargs: Any) -> Any:
        donate = self._op.activation_indices
        return self._op.torch_ops.annotated(*args, using=self._using, donate=donate, **kwargs)
