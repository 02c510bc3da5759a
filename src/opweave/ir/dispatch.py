"""The ways to call an op, and what happens where the fast path does not apply.

The fast path is generated from the candidates that selection walks, see :mod:`opweave.ir.codegen`.
Everything unusual (modes, subclasses, gradients, errors) is left to :meth:`Path.slow`, plain Python
that calls :func:`opweave.ir.selection.select`.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from opweave.base import compat, torch_state
from opweave.ir.codegen import (
    Function,
    Generator,
    Kind,
    functional,
    run_donating,
)
from opweave.ir.donation import poison_unused
from opweave.ir.gradients import warn_of_fallback
from opweave.ir.priority import Entries
from opweave.ir.results import check_result
from opweave.ir.schema import check_types
from opweave.ir.scope import Scope, current_scope, entered
from opweave.ir.selection import (
    Candidate,
    candidates,
    needs_gradient,
    policy_for,
    select_here,
    tensors_in,
)
from opweave.ir.sharding import prepare_sharding

if TYPE_CHECKING:
    from opweave.ir.op import IrOp


class _OpSignature:
    """The ``__signature__`` of what calls an op, and of its class, for ``inspect`` and ``help``."""

    def __get__(self, instance: object, owner: type[Callee]) -> inspect.Signature:
        op: IrOp | None = vars(owner).get("called_op")
        if op is None:
            raise AttributeError("__signature__")  # of IrOp itself and the like
        return inspect.signature(op.native)


class Callee:
    """An object with a class of its own, so that its ``__call__`` can be a generated function.

    That is the quickest way from ``op(...)`` to a kernel: no dictionary lookup, no ``*args``.
    """

    __call__: Function
    traced: Function  # what Dynamo puts into its graph for a call: the torch op
    called_op: IrOp  # of its own class only
    __signature__ = _OpSignature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        own: Self = object.__new__(type(cls.__name__, (cls,), {}))
        return own

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self  # what holds an op means that one, in whatever registry it is


class Path:
    """One way to call an op, and the function generated for it.

    A path knows its op, its kind and the call site's priority. Its function is
    generated on first use, again after every change of registrations or settings, and once more
    for every scope it is called in. It becomes the ``__call__`` of *callee*, if there is one.
    """

    def __init__(
        self, op: IrOp, kind: Kind, call_site: Entries = (), callee: Callee | None = None
    ) -> None:
        self.op, self.kind, self.call_site, self.callee = op, kind, call_site, callee
        self.version = 0
        self.prepared = False
        # Scopes come and go; those that say the same share a function.
        self._by_policy: dict[tuple[object, ...], Function] = {}
        if callee is not None:
            callee.traced = self.torch_op
            type(callee).__doc__ = op.native.__doc__  # of the class: help() asks that
            type(callee).called_op = op
        self._install(None)

    @property
    def donates(self) -> bool:
        return self.kind is Kind.DONATING

    def reset(self) -> None:
        """Forget what was generated; the next call generates anew."""
        self.version += 1
        self.prepared = False
        self._by_policy = {}
        self._install(None)

    def prepare(self) -> None:
        """Generate the function for the current settings."""
        with entered(Scope(None)):  # scopes have functions of their own
            self._install(candidates(self.op, policy_for(self.op, self.call_site)))
        self.prepared = True

    def _install(self, found: list[Candidate] | None) -> None:
        if found is None:
            self.source, self.function = "", _unprepared(self)
        else:
            self.source, self.function = Generator(
                self, found, check_result, in_scope=False
            ).compile()
        if self.callee is not None:
            compat.trace_instead(self.function, _traced)
            compat.run_untraced(self.function)
            setattr(type(self.callee), "__call__", self.function)  # noqa: B010 (not to be typed)

    def scoped(self, scope: Scope) -> Function:
        """Return the function for calls inside *scope*."""
        key = (self, self.version)
        found = scope.compiled.get(key)
        if found is None:
            found = scope.compiled[key] = self._recorded if scope.recorders else self._in_scope()
        return found

    def _in_scope(self) -> Function:
        policy = policy_for(self.op, self.call_site)
        key = (policy.priority, tuple(policy.required.items()))
        found = self._by_policy.get(key)
        if found is None:
            given = candidates(self.op, policy)
            _, found = Generator(self, given, check_result, in_scope=True).compile()
            self._by_policy[key] = found
        return found

    def _recorded(self, _callee: object, *args: Any, **kwargs: Any) -> Any:
        return self.slow(*args, **kwargs)

    def slow(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call that the fast path does not cover, or cover yet."""
        if self.op.ensure_prepared(self):
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


def _unprepared(path: Path) -> Function:
    """Return what a path runs until it is first used: generating code for each op takes time."""

    def call(_callee: object, *args: Any, **kwargs: Any) -> Any:
        return path.slow(*args, **kwargs)

    return call


def _traced(callee: Callee, *args: Any, **kwargs: Any) -> Any:
    # No closure: Dynamo would look for it in the function that it traces this one instead of.
    return callee.traced(*args, **kwargs)


def _needs_dispatcher(values: tuple[Any, ...]) -> bool:
    """Whether only the torch dispatcher can run the call: modes, tracers, subclasses, functorch."""
    return (
        torch_state.is_watched()
        or any(type(t) not in torch_state.PLAIN_TYPES for t in tensors_in(values))
        or any(hasattr(type(v), "__torch_function__") and not _is_tensor(v) for v in values)
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
