"""Rules: conditions on the arguments of an op that compile to an expression and give a reason."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from opweave.ir.errors import PredicateSignatureError, did_you_mean
from opweave.ir.schema import Schema

# No frozen=True, eq or repr for the dataclasses here: generating those takes 8 ms of import time.

Bind = Callable[[object], str]  # binds a constant to a name in the generated code


class Rule(ABC):
    """Whether an implementation supports given arguments, and if not, why."""

    def __and__(self, other: Rule) -> Rule:
        _check_rule(other)
        return All((*_parts(self, All), *_parts(other, All)))

    def __or__(self, other: Rule) -> Rule:
        _check_rule(other)
        return Either((*_parts(self, Either), *_parts(other, Either)))

    @abstractmethod
    def check(self, schema: Schema) -> None:
        """Raise PredicateSignatureError if the rule does not fit the op's parameters."""

    @abstractmethod
    def expression(self, schema: Schema, bind: Bind) -> str:
        """Return Python source over the parameters' names that is true where the rule holds."""

    @abstractmethod
    def reason(self, schema: Schema, arguments: Mapping[str, Any]) -> str:
        """Return why the rule does not hold for *arguments*, as one short phrase."""


@dataclass(eq=False, repr=False)
class _Compound(Rule):
    rules: tuple[Rule, ...]

    def check(self, schema: Schema) -> None:
        for rule in self.rules:
            rule.check(schema)


class All(_Compound):
    """Every rule holds (``a & b``)."""

    def expression(self, schema: Schema, bind: Bind) -> str:
        return " and ".join(f"({rule.expression(schema, bind)})" for rule in self.rules)

    def reason(self, schema: Schema, arguments: Mapping[str, Any]) -> str:
        failed = next(rule for rule in self.rules if not holds(rule, schema, arguments))
        return failed.reason(schema, arguments)


class Either(_Compound):
    """At least one rule holds (``a | b``)."""

    def expression(self, schema: Schema, bind: Bind) -> str:
        return " or ".join(f"({rule.expression(schema, bind)})" for rule in self.rules)

    def reason(self, schema: Schema, arguments: Mapping[str, Any]) -> str:
        return " and ".join(rule.reason(schema, arguments) for rule in self.rules)


@dataclass(eq=False, repr=False)
class TensorRule(Rule):
    """A condition on each of one or more tensor parameters."""

    names: tuple[str, ...]
    test: str  # source over {t}, the tensor
    found: Callable[[str, Any], str]  # (name, tensor) -> reason
    constants: tuple[object, ...] = ()  # {0}, {1}, ... in the test

    def check(self, schema: Schema) -> None:
        _check_names(self.names, schema, tensors=True)

    def expression(self, schema: Schema, bind: Bind) -> str:
        constants = [bind(value) for value in self.constants]
        tests = []
        for name in self.names:
            test = self.test.format(*constants, t=name)
            tests.append(f"({name} is None or {test})" if _optional(schema, name) else test)
        return " and ".join(tests)

    def reason(self, schema: Schema, arguments: Mapping[str, Any]) -> str:
        for name in self.names:
            alone = TensorRule((name,), self.test, self.found, self.constants)
            if not holds(alone, schema, arguments):
                return self.found(name, arguments[name])
        raise AssertionError(f"{self.test} holds for {dict(arguments)}")


@dataclass(eq=False, repr=False)
class PairRule(Rule):
    """Two or more tensor parameters agree in an attribute."""

    names: tuple[str, ...]
    attribute: str

    def check(self, schema: Schema) -> None:
        _check_names(self.names, schema, tensors=True)
        if len(set(self.names)) < 2:
            raise PredicateSignatureError(f"same_{self.attribute} compares two tensors or more.")

    def expression(self, schema: Schema, bind: Bind) -> str:
        required = [name for name in self.names if not _optional(schema, name)]
        if required:
            pairs = [(name, required[0]) for name in self.names if name != required[0]]
        else:
            pairs = list(combinations(self.names, 2))
        tests = []
        for pair in pairs:
            absent = [f"{name} is None" for name in pair if _optional(schema, name)]
            equal = " == ".join(f"{name}.{self.attribute}" for name in pair)
            tests.append(f"({' or '.join([*absent, equal])})")
        return " and ".join(tests)

    def reason(self, schema: Schema, arguments: Mapping[str, Any]) -> str:
        tensors = {n: arguments[n] for n in self.names if arguments[n] is not None}
        facts = ", ".join(f"{n}: {plain(getattr(t, self.attribute))}" for n, t in tensors.items())
        return f"{self.attribute} differs ({facts})"


@dataclass(eq=False, repr=False)
class LastDimRule(Rule):
    """A 1-d tensor is as long as the last dimension of another."""

    vector: str
    tensor: str

    def check(self, schema: Schema) -> None:
        _check_names((self.vector, self.tensor), schema, tensors=True)

    def expression(self, schema: Schema, bind: Bind) -> str:
        test = f"{self.vector}.shape == {self.tensor}.shape[-1:]"
        if _optional(schema, self.vector):
            test = f"({self.vector} is None or {test})"
        return f"{self.tensor}.ndim > 0 and {test}"

    def reason(self, schema: Schema, arguments: Mapping[str, Any]) -> str:
        shapes = {
            n: tuple(arguments[n].shape)
            for n in (self.tensor, self.vector)
            if arguments[n] is not None
        }
        facts = ", ".join(f"{n}: {shape}" for n, shape in shapes.items())
        last = f"{self.tensor}'s last dimension"
        return f"{self.vector} is not one value per element of {last} ({facts})"


@dataclass(eq=False, repr=False)
class ValueRule(Rule):
    """A condition on the value of one parameter, but not on the contents of a tensor."""

    name: str
    test: str  # source over {v}, the value
    wanted: str
    constants: tuple[object, ...] = ()

    def check(self, schema: Schema) -> None:
        _check_names((self.name,), schema, tensors=False)

    def expression(self, schema: Schema, bind: Bind) -> str:
        return self.test.format(*(bind(value) for value in self.constants), v=self.name)

    def reason(self, schema: Schema, arguments: Mapping[str, Any]) -> str:
        value = arguments[self.name]
        shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        return f"{self.name}: {shown} (supports {self.wanted})"


@dataclass(eq=False, repr=False)
class Custom(Rule):
    """A function of some of the op's parameters, and the reason to give if it returns False."""

    function: Callable[..., bool]
    why: str

    def check(self, schema: Schema) -> None:
        pass  # the signature is checked with the implementation's

    def expression(self, schema: Schema, bind: Bind) -> str:
        return f"{bind(self.function)}({named_call(self.function)})"

    def reason(self, schema: Schema, arguments: Mapping[str, Any]) -> str:
        return self.why


def named_call(function: Callable[..., Any]) -> str:
    """Return the source of an argument list that passes the parameters that *function* takes."""
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(
        f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters
    )


def evaluator(rule: Rule, schema: Schema) -> Callable[..., bool]:
    """Compile *rule* into a function of the op's parameters."""
    constants: dict[str, object] = {}

    def bind(value: object) -> str:
        name = f"_constant_{len(constants)}"
        constants[name] = value
        return name

    return schema.function(f"_bool({rule.expression(schema, bind)})", _bool=bool, **constants)


def holds(rule: Rule, schema: Schema, arguments: Mapping[str, Any]) -> bool:
    """Whether *rule* holds for *arguments* (one per parameter of the op)."""
    return evaluator(rule, schema)(**arguments)


def plain(value: object) -> str:
    """Format a dtype without ``torch.``, and a shape as a tuple."""
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")


def _check_rule(other: object) -> None:
    if not isinstance(other, Rule):
        raise PredicateSignatureError(
            f"a rule combines with rules only, not with {other!r}; wrap a function in "
            "rules.custom(function, why)."
        )


def _check_names(names: tuple[str, ...], schema: Schema, *, tensors: bool) -> None:
    if not names:
        raise PredicateSignatureError("a rule must name at least one parameter.")
    known = [p.name for p in (schema.tensors if tensors else schema.params)]
    for name in names:
        if name not in known:
            kind = "tensor parameter" if tensors else "parameter"
            raise PredicateSignatureError(
                f"a rule names {name!r}, which is not a {kind} of the op. "
                f"{did_you_mean(name, known)}"
            )


def _optional(schema: Schema, name: str) -> bool:
    return schema.param(name).is_optional


def _parts(rule: Rule, kind: type[All] | type[Either]) -> tuple[Rule, ...]:
    return rule.rules if isinstance(rule, kind) else (rule,)
