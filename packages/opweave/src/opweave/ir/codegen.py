"""Code generation for the eager fast path.

The generated function looks like this (print any with ``op.dispatch_source``)::

    def rms_norm(self, x, weight, epsilon, variance_size=_default_variance_size):
        _scope = _current_scope()
        if _scope is not None:
            return _scoped(_scope)(self, x, weight, epsilon, variance_size)
        if (_plain := _is_plain(x, weight)) or (_type(x) is _Tensor and ...):
            try:
                if (_plain == 2 or x.is_cpu and ...) and x.dtype is _float32 ...:
                    _run = _impl_opweave_c
                else:
                    _run = _impl_native
            except _Exception:
                return _slow(x, weight, epsilon, variance_size)
            try: return _run(x, weight, epsilon, variance_size)
            except _Exception as _error:
                _note(_error, _run)
                raise
        if _type(x) is _Tensor and ...:  # a gradient is needed
            return _differentiated(x, weight, epsilon, variance_size)
        return _slow(x, weight, epsilon, variance_size)

``try`` is free in CPython unless an exception is raised. ``_impl_*`` is at first a wrapper that
checks the results of the implementation, and replaces itself by the bare function once they pass.

All names except the parameters start with an underscore; parameters of ops must not. Dynamo
never sees this function: it traces a call of the torch op instead.
"""

from __future__ import annotations

import enum
import linecache
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from types import CellType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from opweave import plain_call, torch_compat
from opweave.ir.donation import clone_in_layout, refused
from opweave.ir.op import IrOpImpl, OpDefinition
from opweave.ir.rules import ALIAS_SAFE, All, Rule, named_call
from opweave.ir.schema import Function, Param, Schema
from opweave.ir.scope import current_scope
from opweave.ir.selection import Candidate

PlainCheck = Callable[..., int]
Ranges = list[tuple[int | None, list[Candidate]]]
"""Candidates by the largest number of tokens that they are for; the last one has no limit."""
ResultCheck = Callable[[IrOpImpl, Any, Sequence[Any], Mapping[str, Any]], bool]

# Letters for the symbols in the names of tunable implementations, such as ``mine[block=64]``.
_SYMBOL_LETTERS = str.maketrans({"[": "A", "=": "B", ",": "C", "]": "D"})
_plain_check: PlainCheck | None = None


def use_plain_check(check: PlainCheck | None) -> None:
    """Use *check* as a quick test for plain calls in functions generated from now on.

    *check* takes the tensor arguments of a call, the first of them not None. It must return 0
    unless each is exactly Tensor, Parameter or None, no mode, transform or tracer is active, and
    grad mode is off; 2 only if the tensors also are on the CPU, not lazily negated, and have a last
    stride of 1; else 1. After 0, the generated code tests each condition in Python.
    """
    global _plain_check
    _plain_check = check


class Kind(enum.Enum):
    """The kind of a call path."""

    CALL = "call"  # op(...): functional
    DONATING = "maybe_inplace"  # op.maybe_inplace(...): activations are donated
    AUTOGRAD = "autograd"  # of the torch op: functional, plain calls need no second dispatch
    KERNEL = "kernel"  # below the torch dispatcher: functional, no checks for modes or gradients


class Generator:
    """Generates and compiles the function of one path.

    Args:
        op: the op.
        kind: the kind of the path.
        ranges: its candidates, in priority order, by number of tokens.
        check: raises if a result is wrong; returns whether later results need no check.
        slow: runs a call that the function does not handle.
        scoped: returns the function for calls inside a scope; None: generate such a function.
        differentiated: runs a call that is plain but for the gradient it needs.
    """

    def __init__(
        self,
        op: OpDefinition,
        kind: Kind,
        ranges: Ranges,
        check: ResultCheck,
        slow: Function,
        scoped: Function | None = None,
        differentiated: Function | None = None,
    ) -> None:
        self.op, self.kind, self.ranges, self.check = op, kind, ranges, check
        self.donates, self.in_scope = kind is Kind.DONATING, scoped is None
        self.schema: Schema = op.schema
        self.call = self.schema.call()
        self.runs: dict[str, IrOpImpl] = {}  # name in the generated code -> implementation
        self.owners: dict[int, IrOpImpl] = {}  # by id(), since a callable may not be hashable
        self.namespace: dict[str, Any] = {
            **self.schema.defaults, **plain_call.NAMES,
            "_Tensor": Tensor, "_Parameter": Parameter, "_plain_types": plain_call.PLAIN_TYPES,
            "_type": type, "_list": list, "_tuple": tuple, "_all": all, "_any": any,
            "_Exception": Exception, "_current_scope": current_scope, "_scoped": scoped,
            "_slow": slow, "_differentiated": differentiated, "_note": self._note,
            "_has_torch_function": torch_compat.has_torch_function_unary,
            "_is_grad_enabled": torch.is_grad_enabled,
            "_is_inference_mode": torch.is_inference_mode_enabled,
        }  # fmt: skip

    def compile(self) -> tuple[str, Function]:
        """Return the source and the function.

        The names it refers to are closure variables, not globals: they are faster to read, and
        Dynamo looks up globals in the module named by the function's ``__module__``.
        """
        name, lines = self.op.name, self._lines()
        factory = [
            f"def make({', '.join(self.namespace)}):",
            *(f"    {line}" for line in lines),
            f"    return {name}",
        ]
        source = "\n".join(factory) + "\n"
        filename = f"<opweave {name}.{self.kind.value}>"
        # Lets tracebacks and debuggers show the generated code.
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        module: dict[str, Any] = {"__name__": __name__}
        exec(compile(source, filename, "exec"), module)
        function = module["make"](**self.namespace)
        function.__qualname__ = name  # shown in "missing argument" errors
        for free, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
            if free in self.runs:
                cell.cell_contents = self._checked(self.runs[free], cell)
        return "\n".join(lines), function

    def bind(self, value: object, name: str = "") -> str:
        """Give *value* a name in the generated code."""
        if isinstance(value, torch.dtype):
            name = str(value).replace("torch.", "_")
        name = name or f"_constant_{len(self.namespace)}"
        self.namespace[name] = value
        return name

    def _checked(self, impl: IrOpImpl, cell: CellType) -> Function:
        """Wrap the function in *cell* to check its results; the wrapper restores the cell."""
        run: Function = cell.cell_contents

        def checked(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            if self.check(impl, result, args, kwargs):
                cell.cell_contents = run
            return result

        self.owners[id(checked)] = self.owners[id(run)] = impl
        return checked

    def _note(self, error: Exception, run: Function) -> None:
        self.owners[id(run)].add_note(error)

    def _lines(self) -> list[str]:
        slow = f"return _slow({self.call})"
        lines = [f"def {self.op.name}(self, {self.schema.declaration}):"]
        if self.donates and self.op.settings.check_donation:
            return [*lines, f"    {slow}"]
        if not self.in_scope:
            lines += [
                "    _scope = _current_scope()",
                "    if _scope is not None:",
                f"        return _scoped(_scope)(self, {self.call})",
            ]
        if self.kind is Kind.KERNEL:
            cast = [f"    if not ({plain_call.AUTOCAST.inactive}):", f"        {slow}"]
            return [*lines, *cast, *self._choice("    ", slow)]
        lines += [*self._plain_condition(), *self._choice("        ", slow)]
        if self.kind is not Kind.AUTOGRAD and not self.in_scope:
            tests = self._plain_tests("        ")[:-1]  # without that of the gradient
            lines += ["    if (", *tests, "    ):", f"        return _differentiated({self.call})"]
        return [*lines, f"    {slow}"]

    def _choice(self, indent: str, slow: str) -> list[str]:
        """Return the choice by tokens and predicates, and the call of the chosen function."""
        run = [
            f"{indent}try: return _run({self.call})",
            f"{indent}except _Exception as _error:",
            f"{indent}    _note(_error, _run)",
            f"{indent}    raise",
        ]
        if len(self.ranges) == 1:
            branches = self._branches(self.ranges[0][1], slow)
            if branches[0][0] is None:
                statement = branches[0][1]
                return [indent + statement, *(() if statement == slow else run)]
            chain = _chain(branches, f"{indent}    ")
        else:
            self.namespace["_length"] = torch_compat.tensor_length
            chain = [f"{indent}    _tokens = _length({self.schema.tensors[0].name})"]
            for i, (limit, candidates) in enumerate(self.ranges):
                head = "else" if limit is None else f"{'elif' if i else 'if'} _tokens <= {limit}"
                chain.append(f"{indent}    {head}:")
                chain += _chain(self._branches(candidates, slow), f"{indent}        ")
        return [f"{indent}try:", *chain, f"{indent}except _Exception:", f"{indent}    {slow}", *run]

    def _branches(self, candidates: list[Candidate], slow: str) -> list[tuple[str | None, str]]:
        """Return (condition or None, statement) of each candidate, up to the first without one."""
        branches: list[tuple[str | None, str]] = []
        for candidate in candidates:
            if candidate.obstacle is None:
                condition = self._condition(candidate.impl)
                branches.append((condition, f"_run = {self._runner(candidate.impl)}"))
                if condition is None:
                    break
                if not isinstance(candidate.impl.supports_args, Rule):  # may return a non-bool
                    branches.append(("_answer is not False", slow))  # raises
            if candidate.entry.strict:
                branches.append((None, slow))  # raises
                break
        else:
            branches.append((None, slow))  # no implementation has the required traits
        return branches

    def _condition(self, impl: IrOpImpl) -> str | None:
        predicate = impl.supports_args
        if predicate is None:
            return None
        if isinstance(predicate, Rule):
            return self._rule(predicate)
        accepts = self.bind(predicate, f"_accepts_{_word(impl)}")
        return f"(_answer := {accepts}({named_call(predicate)})) is True"

    def _rule(self, rule: Rule) -> str:
        if "_is_plain" not in self.namespace:
            return rule.expression(self.schema, self.bind)
        parts = rule.rules if isinstance(rule, All) else (rule,)
        known = [part for part in parts if part.holds_for_plain_rows]
        tests = [part.expression(self.schema, self.bind) for part in parts if part not in known]
        if known:
            test = All(tuple(known)).expression(self.schema, self.bind)
            tests.insert(0, f"_plain == 2 or ({test})")
        return " and ".join(f"({test})" for test in tests)

    def _runner(self, impl: IrOpImpl) -> str:
        # Below the dispatcher, tensors may still be fake: only the other paths check for that.
        function = impl.impl_fn if self.kind is Kind.KERNEL else impl.plain_fn
        direct = self._bind_run(impl, function, f"_impl_{_word(impl)}")
        if not impl.inplace:
            return direct
        if not self.donates:
            return self._bind_run(impl, copying(impl), f"_copying_{_word(impl)}")
        # Autograd may have saved an activation even if none requires a gradient.
        noting = self._bind_run(impl, bumping_versions(impl, function), f"_bumping_{_word(impl)}")
        run = f"{direct} if _is_inference_mode() else {noting}"
        if ALIAS_SAFE in impl.traits:
            return run
        careful = self._bind_run(impl, partial(run_donating, impl), f"_careful_{_word(impl)}")
        return f"{careful} if {self._may_be_refused()} else {run}"

    def _bind_run(self, impl: IrOpImpl, function: Function, name: str) -> str:
        self.runs[name] = impl
        return self.bind(function, name)

    def _may_be_refused(self) -> str:
        """Return a cheap condition that holds whenever :func:`refused` may return a name."""
        if self.schema.tensor_lists:
            return "True"
        self.namespace["_share_storage"] = torch_compat.share_storage
        activations = self.op.activations
        others = [p for p in self.schema.tensors if p.name not in activations]
        tests = [f"not {name}.is_contiguous()" for name in activations]
        tests += [f"_share_storage({a}, {b})" for a, b in combinations(activations, 2)]
        for name in activations:
            for p in others:
                presence = f"{p.name} is not None and " if p.is_optional else ""
                tests.append(f"({presence}_share_storage({name}, {p.name}))")
        return f"({' or '.join(tests)})"

    def _plain_condition(self) -> list[str]:
        """Return the lines of the test for plain calls, which may bypass the torch dispatcher."""
        required = [p.name for p in self.schema.tensors if not p.is_optional]
        tests = self._plain_tests("        ")
        if _plain_check is None or not required or self.schema.tensor_lists:
            return ["    if (", *tests, "    ):"]
        self.namespace["_is_plain"] = _plain_check
        optional = [p.name for p in self.schema.tensors if p.is_optional]
        check = [
            f"(_plain := _is_plain({', '.join(required + optional)}))",
            *(f"{name} is not None" for name in required[1:]),
            *(fact.inactive for fact in plain_call.FACTS if not fact.in_native_check),
        ]
        return [f"    if ({' and '.join(check)}) or (", *tests, "    ):"]

    def _plain_tests(self, indent: str) -> list[str]:
        """Return the conditions of a plain call, one per line, without the native check."""
        tests = [self._exact_type(p.name, p.is_optional) for p in self.schema.tensors]
        tests += [self._exact_list(p) for p in self.schema.tensor_lists]
        required = [p.name for p in self.schema.tensors if not p.is_optional]
        first = required[0] if required else None
        for fact in plain_call.FACTS:
            # Equivalent for an exact tensor, and faster.
            quicker = first is not None and fact is plain_call.FUNCTION_MODE
            tests.append(f"not _has_torch_function({first})" if quicker else fact.inactive)
        tests.append(f"not (_is_grad_enabled() and ({self._any_requires_grad()}))")
        return [f"{indent}{'and ' if i else ''}{test}" for i, test in enumerate(tests)]

    def _exact_type(self, name: str, optional: bool) -> str:
        likely, other = "_Tensor", "_Parameter"
        if name not in self.op.activations and optional:
            likely, other = other, likely  # an optional non-activation is most often a weight
        test = f"_type({name}) is {likely} or _type({name}) is {other}"
        return f"({test} or {name} is None)" if optional else f"({test})"

    def _exact_list(self, p: Param) -> str:
        """Return the test for a list parameter; accept lists and tuples, not iterators."""
        items = "t is None or " if p.has_optional_items else ""
        plain = f"_all({items}_type(t) in _plain_types for t in {p.name})"
        return f"(_type({p.name}) is _list or _type({p.name}) is _tuple) and {plain}"

    def _any_requires_grad(self) -> str:
        tests = [
            f"({p.name} is not None and {p.name}.requires_grad)"
            if p.is_optional
            else f"{p.name}.requires_grad"
            for p in self.schema.tensors
        ]
        tests += [
            f"_any(t is not None and t.requires_grad for t in {p.name} or ())"
            for p in self.schema.tensor_lists
        ]
        return " or ".join(tests)


def _word(impl: IrOpImpl) -> str:
    """Return the provider as a part of a Python name; unique, as providers have no capitals."""
    return impl.provider.translate(_SYMBOL_LETTERS)


def _chain(branches: list[tuple[str | None, str]], indent: str) -> list[str]:
    """Return the if/elif chain of the branches."""
    if branches[0][0] is None:
        return [indent + branches[0][1]]
    lines = []
    for i, (condition, statement) in enumerate(branches):
        head = "else" if condition is None else f"{'elif' if i else 'if'} {condition}"
        lines += [f"{indent}{head}:", f"{indent}    {statement}"]
    return lines


def functional(impl: IrOpImpl) -> Function:
    """Return the implementation as a function that does not write to its arguments."""
    return copying(impl) if impl.inplace else impl.impl_fn


def copying(impl: IrOpImpl, names: Sequence[str] | None = None) -> Function:
    """Return a functional form of an in-place implementation.

    Args:
        impl: the implementation. If it was registered without ``functional=``, it gets copies.
        names: the activations to copy; all by default.
    """
    if impl.functional_fn is not None:
        return impl.functional_fn
    op = impl.op
    copies = {name: f"_copy({name})" for name in (op.activations if names is None else names)}
    copies |= {name: f"{name}.clone()" for name in copies if name not in op.keeps_strides}
    body = f"_impl_fn({op.schema.call(copies)})"
    return op.schema.function(body, _impl_fn=impl.impl_fn, _copy=clone_in_layout)


def bumping_versions(impl: IrOpImpl, function: Function) -> Function:
    """Wrap the in-place *function* so that it increments the versions of its activations.

    Kernels outside torch do not. If autograd has saved an activation, the backward pass then raises
    torch's error instead of using the overwritten values.
    """
    schema = impl.op.schema
    written = "".join(f"{name}, " for name in impl.op.activations)
    body = f"_changed(({written})) or _impl_fn({schema.call()})"
    changed = torch.autograd.graph.increment_version
    return schema.function(body, _impl_fn=function, _changed=changed)


def run_donating(impl: IrOpImpl, *args: Any, **kwargs: Any) -> Any:
    """Call an implementation with donated activations, copying those it must not overwrite."""
    if not impl.inplace:
        return impl.impl_fn(*args, **kwargs)
    if ALIAS_SAFE not in impl.traits and (names := refused(impl.op, impl.op.bind(*args, **kwargs))):
        return copying(impl, names)(*args, **kwargs)
    run = impl.impl_fn
    if not torch.is_inference_mode_enabled():
        run = bumping_versions(impl, run)
    return run(*args, **kwargs)
