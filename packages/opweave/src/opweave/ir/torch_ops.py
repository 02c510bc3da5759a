"""The torch ops that represent an IR op in graphs and in the dispatcher.

Each IR op has, in the registry's namespace:

- ``op``: the functional op;
- ``op.maybe_inplace``: the same with donated activations (only with ``allow_inplace=True``). Its
  schema is functional too: a donating call may leave its inputs unchanged, so torch's passes stay
  correct and insert no copies;
- ``op_annotated(..., *, str using, int[]? donate, str autocast)``: the functional op with the
  settings of a call site and the state of ``torch.autocast`` as arguments, which survive caches
  and serialization.

Kernels are registered for CompositeExplicitAutograd (every backend including PrivateUse1, opaque
to AOTAutograd), Autograd (a differentiable implementation if a gradient is needed) and
FuncTorchBatched (vmap uses the native implementation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from opweave.base import compat
from opweave.ir.autocast import entered
from opweave.ir.codegen import functional
from opweave.ir.gradients import warn_of_fallback
from opweave.ir.names import ANNOTATED_SUFFIX, ANNOTATIONS
from opweave.ir.priority import Entries, parse
from opweave.ir.scope import current_scope
from opweave.ir.selection import UNDER_VMAP, needs_gradient, policy_for, select_here, select_native
from opweave.ir.sharding import prepare_sharding

if TYPE_CHECKING:
    from opweave.ir.op import IrOp

Function = Callable[..., Any]


class Target(NamedTuple):
    """The meaning of a torch op in a graph."""

    op: IrOp
    donates: bool  # it is the maybe_inplace overload
    annotated: bool  # it carries the call-site settings as arguments


_targets: WeakValueDictionary[Function, TorchOps] = WeakValueDictionary()


def find_target(torch_op: object) -> Target | None:
    """Return the IR op that *torch_op*, the target of a graph node, represents, if any."""
    found = _targets.get(torch_op) if callable(torch_op) else None
    if found is None:
        return None
    return Target(found.op, torch_op is found.maybe_inplace, torch_op is found.annotated)


class TorchOps:
    """Defines and holds the torch ops of one IR op."""

    def __init__(self, op: IrOp, namespace: str) -> None:
        # One library per op, so that its torch ops can be removed alone.
        self.op, self._library = op, compat.new_library(namespace)
        schema = op.schema.torch
        self.default = self._define(op.name, schema)
        self.maybe_inplace = (
            self._define(f"{op.name}.maybe_inplace", schema) if op.allow_inplace else None
        )
        self.annotated = self._define(
            op.name + ANNOTATED_SUFFIX, _with_annotations(schema), annotated=True
        )

    def remove(self) -> None:
        """Undefine the torch ops and free their names."""
        compat.remove_ops(self._library)

    def for_call(self, using: Sequence[str], *, donates: bool) -> Function:
        """Return the torch op for a call with these providers that may donate activations."""
        if using:
            donate = self.op.activation_indices if donates else None
            return partial(self.annotated, using=",".join(using), donate=donate)
        if donates and self.maybe_inplace is not None:
            return self.maybe_inplace
        return self.default

    def _define(self, qualified: str, schema: str, *, annotated: bool = False) -> Function:
        library = self._library
        name, _, overload = qualified.partition(".")
        untyped: Any = library  # torch does not annotate define and impl
        untyped.define(qualified + schema)
        packet = getattr(getattr(torch.ops, library.ns), name)
        torch_op: Function = getattr(packet, overload or "default")
        plain = _drop_annotations if annotated else _keep
        kernel = plain(self._kernel, reads_using=True) if annotated else self._plain_kernel()
        untyped.impl(qualified, kernel, "CompositeExplicitAutograd")
        untyped.impl(qualified, partial(self._autograd, torch_op, annotated=annotated), "Autograd")
        untyped.impl(qualified, plain(self._batched, reads_using=annotated), "FuncTorchBatched")
        compat.register_fake(library, qualified, plain(self._fake))
        _targets[torch_op] = self
        return torch_op

    def _plain_kernel(self) -> Function:
        """Return the kernel of calls without annotations; every step here costs 0.1 µs."""
        path = self.op.kernel_path(())
        body = f"_path.function(_op, {self.op.schema.call()})"
        return self.op.schema.function(body, _path=path, _op=self.op)

    def _kernel(self, *args: Any, using: str = "", **kwargs: Any) -> Any:
        path = self.op.kernel_path(call_site(using))
        return path.function(self.op, *args, **kwargs)

    def _autograd(self, torch_op: Function, *args: Any, annotated: bool, **kwargs: Any) -> Any:
        own = {k: v for k, v in kwargs.items() if not (annotated and k in ANNOTATIONS)}
        values = self.op.bind(*args, **own)
        if not needs_gradient(values):
            prepare_sharding(self.op, values)
            with compat.below_autograd():
                return torch_op(*args, **kwargs)
        using = kwargs.get("using", "") if annotated else ""
        policy = policy_for(self.op, call_site(using), differentiable=True)
        autocast = kwargs.get("autocast", "") if annotated else ""
        with entered(autocast) if self.op.autocast else compat.no_autocast():
            selection = select_here(self.op, values, policy)
            warn_of_fallback(selection)
            with selection.impl.noting():
                return functional(selection.impl)(*args, **own)

    def _batched(self, *args: Any, using: str = "", **kwargs: Any) -> Any:
        policy = policy_for(self.op, call_site(using))
        selection = select_native(self.op, policy, UNDER_VMAP)
        scope = current_scope()
        for recorder in scope.recorders if scope else ():
            recorder(selection, self.op.bind(*args, **kwargs))
        with selection.impl.noting():
            return self.op.native(*args, **kwargs)

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        return self.op.fake(*args, **kwargs)


def call_site(using: str) -> Entries:
    """Parse the comma-joined names of ``op.using(...)`` into priority entries."""
    return parse(using, f"call site .using({using})") if using else ()


def _with_annotations(schema: str) -> str:
    parameters, returns = schema.rsplit(" -> ", 1)
    separator = ", " if "*" in parameters else ", *, "
    # donate is optional: AOTInductor passes None for an omitted empty list.
    own = "str using='', int[]? donate=None, str autocast=''"
    return f"{parameters[:-1]}{separator}{own}) -> {returns}"


def _keep(function: Function, *, reads_using: bool = False) -> Function:
    return function


def _drop_annotations(function: Function, *, reads_using: bool = False) -> Function:
    def without(
        *args: Any,
        using: str = "",
        donate: Sequence[int] | None = None,
        autocast: str = "",
        **kw: Any,
    ) -> Any:
        named = {**kw, "using": using} if reads_using else kw
        with entered(autocast):
            return function(*args, **named)

    return without
