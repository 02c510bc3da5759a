"""The eager fast path: one function per op, generated from the candidates that selection walks.

A generated function looks like this (print any with ``op.dispatch_source``)::

    def rms_norm(self, x, weight, epsilon, variance_size=default_variance_size):
        if is_dynamo_compiling():
            return torch_op(x, weight, epsilon, variance_size)
        scope = current_scope()
        if scope is not None:
            return scoped(scope)(self, x, weight, epsilon, variance_size)
        if is_plain(x, weight) or (type(x) is Tensor and ... dispatch_mode_count() == 0 and ...):
            try:
                if x.is_cpu and ...:
                    run = impl_0
                else:
                    run = impl_1
            except Exception:
                return slow(x, weight, epsilon, variance_size)
            return run(x, weight, epsilon, variance_size)
        return slow(x, weight, epsilon, variance_size)

Everything unusual (modes, subclasses, gradients, errors) is left to ``slow``, the plain
Python in :class:`Path` that calls :func:`opweave.ir.selection.select`.
"""

from __future__ import annotations

import enum
import linecache
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn import Parameter

from opweave.ir import compat
from opweave.ir.donation import poison_unused
from opweave.ir.impl import IrOpImpl
from opweave.ir.priority import Entries
from opweave.ir.rules import Rule
from opweave.ir.schema import Schema
from opweave.ir.scope import Scope, current_scope, entered
from opweave.ir.selection import (
    Candidate,
    candidates,
    needs_gradient,
    policy_for,
    select,
    tensors_in,
)

if TYPE_CHECKING:
    from opweave.ir.op import IrOp

Function = Callable[..., Any]
PlainCheck = Callable[..., bool]
_PLAIN = frozenset({Tensor, Parameter})


_plain_check: PlainCheck | None = None


def use_plain_check(check: PlainCheck | None) -> None:
    """Ask *check* whether the dispatcher has nothing to add, before asking torch fact by fact.

    *check* takes the tensor arguments of a call, the first of them not None, and answers True only
    if every one is exactly Tensor, Parameter or None, no mode, transform or tracer is active, and
    grad mode is off. Functions generated from now on use it.
    """
    global _plain_check
    _plain_check = check


class Kind(enum.Enum):
    """What a call path is for."""

    CALL = "call"  # op(...): functional
    DONATING = "maybe_inplace"  # op.maybe_inplace(...): activations are given up
    KERNEL = "kernel"  # below the torch dispatcher: functional, no checks for modes or gradients


class Callee:
    """An object with a class of its own, so that its ``__call__`` can be a generated function.

    That is the quickest way from ``op(...)`` to a kernel: no dictionary lookup, no ``*args``.
    """

    __call__: Function

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        own: Self = object.__new__(type(cls.__name__, (cls,), {}))
        return own


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
        self._install(None)

    @property
    def donates(self) -> bool:
        return self.kind is Kind.DONATING

    def reset(self) -> None:
        """Forget what was generated; the next call generates anew."""
        self.version += 1
        self.prepared = False
        self._install(None)

    def prepare(self) -> None:
        """Generate the function for the current settings."""
        with entered(Scope(None)):  # scopes have functions of their own
            self._install(self._candidates())
        self.prepared = True

    def _install(self, found: list[Candidate] | None) -> None:
        self.source, self.function = _Generator(self, found, in_scope=False).compile()
        if self.callee is not None:
            setattr(type(self.callee), "__call__", self.function)  # noqa: B010 (not to be typed)

    def scoped(self, scope: Scope) -> Function:
        """Return the function for calls inside *scope*."""
        key = (self, self.version)
        found = scope.compiled.get(key)
        if found is None:
            if scope.recorders:
                found = lambda _, *args, **kwargs: self._execute(self.op.bind(*args, **kwargs))  # noqa: E731
            else:
                _, found = _Generator(self, self._candidates(), in_scope=True).compile()
            scope.compiled[key] = found
        return found

    def slow(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call that the fast path does not cover, or cover yet."""
        if self.op.ensure_prepared(self):
            return self.function(self.op, *args, **kwargs)
        if self.kind is not Kind.KERNEL and _needs_dispatcher(self.op.bind(*args, **kwargs)):
            return self.torch_op(*args, **kwargs)
        return self._execute(self.op.bind(*args, **kwargs))

    @property
    def torch_op(self) -> Function:
        """The torch op that stands for this path in graphs."""
        return self.op.torch_ops.for_call(
            [str(entry) for entry in self.call_site], donates=self.donates
        )

    def _candidates(self) -> list[Candidate]:
        return candidates(self.op, policy_for(self.op, self.call_site))

    def _execute(self, values: tuple[Any, ...]) -> Any:
        differentiable = self.kind is not Kind.KERNEL and needs_gradient(values)
        policy = policy_for(self.op, self.call_site, differentiable=differentiable)
        selection = select(self.op, values, policy)
        scope = current_scope()
        for recorder in scope.recorders if scope else ():
            recorder(selection, values)
        keep = not self.donates or _repeats(self.op, values)
        run = copying(selection.impl) if selection.impl.inplace and keep else selection.impl.impl_fn
        args, kwargs = self.op.schema.split(values)
        result = run(*args, **kwargs)
        if self.donates and self.op.registry.settings.check_donation and not differentiable:
            poison_unused(self.op, values, result)
        return result


class _Generator:
    """Writes and compiles the function of one path; *found* is None while nothing is prepared."""

    def __init__(self, path: Path, found: list[Candidate] | None, *, in_scope: bool) -> None:
        self.path, self.found, self.in_scope = path, found, in_scope
        self.schema: Schema = path.op.schema
        self.call = self.schema.call()
        self.namespace: dict[str, Any] = {
            **self.schema.defaults,
            "Tensor": Tensor,
            "Parameter": Parameter,
            "plain_types": _PLAIN,
            "current_scope": current_scope,
            "scoped": path.scoped,
            "slow": path.slow,
            "is_dynamo_compiling": compat.is_dynamo_compiling,
            "has_torch_function": compat.has_torch_function_unary,
            "function_mode_enabled": compat.function_mode_enabled,
            "dispatch_mode_count": compat.dispatch_mode_count,
            "functorch_interpreter": compat.functorch_interpreter,
            "jit_tracing_state": compat.jit_tracing_state,
            "is_grad_enabled": torch.is_grad_enabled,
        }

    def compile(self) -> tuple[str, Function]:
        """Return the function and its source.

        What it refers to is in its closure, not in globals: that is quicker to read, and
        Dynamo looks globals up in the module that a function claims to come from.
        """
        name, lines = self.path.op.name, self._lines()
        factory = [
            f"def make({', '.join(self.namespace)}):",
            *(f"    {line}" for line in lines),
            f"    return {name}",
        ]
        source = "\n".join(factory) + "\n"
        filename = f"<opweave {name}.{self.path.kind.value}>"
        # Tracebacks and debuggers show generated code like any other.
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        module: dict[str, Any] = {"__name__": __name__}
        exec(compile(source, filename, "exec"), module)
        return "\n".join(lines), module["make"](**self.namespace)

    def bind(self, value: object, name: str = "") -> str:
        name = name or f"constant_{len(self.namespace)}"
        self.namespace[name] = value
        return name

    def _lines(self) -> list[str]:
        slow = f"return slow({self.call})"
        lines = [f"def {self.path.op.name}(self, {self.schema.declaration}):"]
        if self.path.kind is not Kind.KERNEL and not self.in_scope:
            self.namespace["torch_op"] = self.path.torch_op
            lines += ["    if is_dynamo_compiling():", f"        return torch_op({self.call})"]
        if self.found is None or (self.path.donates and self._checks_donation):
            return [*lines, f"    {slow}"]
        if not self.in_scope:
            lines += [
                "    scope = current_scope()",
                "    if scope is not None:",
                f"        return scoped(scope)(self, {self.call})",
            ]
        if self.path.kind is Kind.KERNEL:
            return [*lines, *self._choice("    ", slow)]
        return [*lines, *self._plain_condition(), *self._choice("        ", slow), f"    {slow}"]

    @property
    def _checks_donation(self) -> bool:
        return self.path.op.registry.settings.check_donation

    def _choice(self, indent: str, slow: str) -> list[str]:
        """The chain of predicates that ends in a call of the first implementation to accept."""
        branches: list[tuple[str | None, str]] = []  # (condition or None, statement)
        for candidate in self.found or ():
            if candidate.obstacle is None:
                condition = self._condition(candidate.impl)
                branches.append((condition, f"run = {self._runner(candidate.impl)}"))
                if condition is None:
                    break
            if candidate.entry.strict:
                branches.append((None, slow))  # which raises
                break
        else:
            branches.append((None, slow))  # no implementation has the required traits
        run = f"{indent}return run({self.call})"
        if branches[0][0] is None:
            statement = branches[0][1]
            return [indent + statement] if statement == slow else [indent + statement, run]
        chain = []
        for i, (condition, statement) in enumerate(branches):
            head = "else" if condition is None else f"{'elif' if i else 'if'} {condition}"
            chain += [f"{indent}    {head}:", f"{indent}        {statement}"]
        return [f"{indent}try:", *chain, f"{indent}except Exception:", f"{indent}    {slow}", run]

    def _condition(self, impl: IrOpImpl) -> str | None:
        predicate = impl.supports_args
        if predicate is None:
            return None
        if isinstance(predicate, Rule):
            return predicate.expression(self.schema, self.bind)
        return f"{self.bind(predicate, f'accepts_{impl.provider}')}({self.call})"

    def _runner(self, impl: IrOpImpl) -> str:
        direct = self.bind(impl.impl_fn, f"impl_{impl.provider}")
        if not impl.inplace:
            return direct
        copy = self.bind(copying(impl), f"copying_{impl.provider}")
        if not self.path.donates:
            return copy
        keep, inplace = self._repeated(), direct
        return f"{copy} if {keep} else {inplace}" if keep else inplace

    def _repeated(self) -> str:
        """True where one tensor is passed in two activation slots: it cannot be donated twice."""
        names = self.path.op.activations
        pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
        return " or ".join(f"{a} is {b}" for a, b in pairs)

    def _plain_condition(self) -> list[str]:
        """The condition under which the torch dispatcher has nothing to add."""
        required = [p.name for p in self.schema.tensors if not p.is_optional]
        tests = self._plain_tests("        ")
        if _plain_check is None or not required or self.schema.tensor_lists:
            return ["    if (", *tests, "    ):"]
        self.namespace["is_plain"] = _plain_check
        optional = [p.name for p in self.schema.tensors if p.is_optional]
        check = [
            f"is_plain({', '.join(required + optional)})",
            *(f"{name} is not None" for name in required[1:]),
        ]
        return [f"    if ({' and '.join(check)}) or (", *tests, "    ):"]

    def _plain_tests(self, indent: str) -> list[str]:
        """What that condition is made of, asked of torch fact by fact; a line for each test."""
        tests = [self._exact_type(p.name, p.is_optional) for p in self.schema.tensors]
        tests += [
            f"all(type(t) in plain_types for t in {p.name})" for p in self.schema.tensor_lists
        ]
        required = [p.name for p in self.schema.tensors if not p.is_optional]
        first = required[0] if required else None
        tests.append(f"not has_torch_function({first})" if first else "not function_mode_enabled()")
        tests += ["dispatch_mode_count() == 0", "functorch_interpreter() is None"]
        tests.append("jit_tracing_state() is None")
        tests.append(f"not (is_grad_enabled() and ({self._any_requires_grad()}))")
        return [f"{indent}{'and ' if i else ''}{test}" for i, test in enumerate(tests)]

    def _exact_type(self, name: str, optional: bool) -> str:
        likely, other = ("Tensor", "Parameter")
        if name not in self.path.op.activations and optional:
            likely, other = other, likely  # weights are optional more often than activations
        test = f"type({name}) is {likely} or type({name}) is {other}"
        return f"({test} or {name} is None)" if optional else f"({test})"

    def _any_requires_grad(self) -> str:
        tests = [
            f"({p.name} is not None and {p.name}.requires_grad)"
            if p.is_optional
            else f"{p.name}.requires_grad"
            for p in self.schema.tensors
        ]
        tests += [f"any(t.requires_grad for t in {p.name})" for p in self.schema.tensor_lists]
        return " or ".join(tests)


def copying(impl: IrOpImpl) -> Function:
    """Return the functional form of an in-place implementation: it copies the activations first."""
    op = impl.op
    rename = {name: f"{name}.clone()" for name in op.activations}
    names = {p.name: f"{p.name}={p.name}" if p.keyword_only else p.name for p in op.schema.params}
    arguments = ", ".join(
        f"{p.name}={rename[p.name]}"
        if p.keyword_only and p.name in rename
        else rename.get(p.name, names[p.name])
        for p in op.schema.params
    )
    namespace = {**op.schema.defaults, "impl_fn": impl.impl_fn}
    function: Function = eval(f"lambda {op.schema.declaration}: impl_fn({arguments})", namespace)
    return function


def _repeats(op: IrOp, values: tuple[Any, ...]) -> bool:
    activations = [
        v for p, v in zip(op.schema.params, values, strict=True) if p.name in op.activations
    ]
    return len({id(v) for v in activations}) < len(activations)


def _needs_dispatcher(values: tuple[Any, ...]) -> bool:
    """Whether only the torch dispatcher can run the call: modes, tracers, subclasses, functorch."""
    return (
        compat.dispatch_mode_count() > 0
        or compat.function_mode_enabled()
        or compat.functorch_interpreter() is not None
        or compat.jit_tracing_state() is not None
        or any(type(t) not in _PLAIN for t in tensors_in(values))
        or not tensors_in(values)  # proxies, or a mistake that the torch op reports
    )
