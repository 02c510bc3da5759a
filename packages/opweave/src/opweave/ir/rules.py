"""Declarative predicates: rules for the arguments that an implementation supports.

A rule compiles to an expression and gives the reason why it rejects a call.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from opweave.ir.errors import PredicateSignatureError, UnknownTraitError, did_you_mean
from opweave.ir.schema import Schema, check_returns

# Traits: promises of an implementation beyond correct values.
#
# They are declared at registration and verified by the conformance kit.


BATCH_INVARIANT = "batch_invariant"
DIFFERENTIABLE = "differentiable"
ALIAS_SAFE = "alias_safe"
ROWWISE = "rowwise"
ROUNDS_LESS = "rounds_less"

TRAITS: dict[str, str] = {
    BATCH_INVARIANT: "the bits of a row do not depend on the other rows in the batch",
    ROWWISE: "each row of every output is computed from that row of the activations alone",
    ALIAS_SAFE: "donated activations may have any strides and overlap themselves, each other and "
    "other arguments; the kernel allocates outputs that cannot reuse their memory",
    ROUNDS_LESS: "intermediate results are rounded less often than in the op's definition, so that "
    "16-bit outputs are more accurate, and may differ from native by one unit in the last place",
    DIFFERENTIABLE: "autograd through the implementation gives the op's gradient",
}
"""The promise of each trait."""


def check_traits(names: Iterable[str]) -> frozenset[str]:
    """Return *names* as a set.

    Raises:
        UnknownTraitError: a trait does not exist.

    >>> sorted(check_traits(["batch_invariant"]))
    ['batch_invariant']
    """
    traits = frozenset([names] if isinstance(names, str) else names)
    for name in sorted(traits - TRAITS.keys()):
        raise UnknownTraitError(f"unknown trait {name!r}. {did_you_mean(name, TRAITS)}")
    return traits


# Rules: conditions on the arguments of an op that compile to an expression and give a reason.


# No frozen=True, eq or repr for the dataclasses here: generating those takes 8 ms of import time.

Bind = Callable[[object], str]  # binds a constant to a name in the generated code


class Rule(ABC):
    """Whether an implementation supports given arguments, and if not, why.

    Attributes:
        holds_for_plain_rows: whether it holds if every tensor is on the CPU, not lazily negated,
            and its last stride is 1.
    """

    holds_for_plain_rows = False

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
    holds_for_plain_rows: bool = False

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
        vector, tensor = self.vector, self.tensor
        # Half of the time of comparing shapes.
        test = f"({vector}.ndim == 1 and {vector}.numel() == {tensor}.shape[-1])"
        if _optional(schema, vector):
            test = f"({vector} is None or {test})"
        return f"{tensor}.ndim > 0 and {test}"

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
    supported: str  # the values that pass, in words
    constants: tuple[object, ...] = ()

    def check(self, schema: Schema) -> None:
        _check_names((self.name,), schema, tensors=False)

    def expression(self, schema: Schema, bind: Bind) -> str:
        return self.test.format(*(bind(value) for value in self.constants), v=self.name)

    def reason(self, schema: Schema, arguments: Mapping[str, Any]) -> str:
        value = arguments[self.name]
        shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        return f"{self.name}: {shown} (supports {self.supported})"


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
    names_of_op = [p.name for p in (schema.tensors if tensors else schema.params)]
    for name in names:
        if name not in names_of_op:
            kind = "tensor parameter" if tensors else "parameter"
            raise PredicateSignatureError(
                f"a rule names {name!r}, which is not a {kind} of the op. "
                f"{did_you_mean(name, names_of_op)}"
            )


def _optional(schema: Schema, name: str) -> bool:
    return schema.param(name).is_optional


def _parts(rule: Rule, kind: type[All] | type[Either]) -> tuple[Rule, ...]:
    return rule.rules if isinstance(rule, kind) else (rule,)


# Predicates: rules or functions that say whether an implementation supports given arguments.
#
# A predicate function gets the arguments of the op whose names are among its own parameters.


Predicate = Rule | Callable[..., bool]


def check_predicate(predicate: Predicate, schema: Schema, label: str) -> None:
    """Raise PredicateSignatureError unless *predicate* fits the op's parameters."""
    if isinstance(predicate, Rule):
        predicate.check(schema)
        for function in custom_functions(predicate):
            check_predicate(function, schema, label)
        return
    if not callable(predicate):
        raise PredicateSignatureError(
            f"{label}: supports_args must be a rule or a function, not {predicate!r}."
        )
    check_returns(predicate, f"{label}: supports_args", PredicateSignatureError)
    try:
        parameters = list(inspect.signature(predicate).parameters.values())
    except (TypeError, ValueError) as error:
        raise PredicateSignatureError(f"{label}: supports_args: {error}.") from error
    if not parameters:
        raise PredicateSignatureError(
            f"{label}: supports_args takes no parameter. Name the parameters of the op that it "
            f"reads, among {', '.join(schema.names)}; use supported= if it needs none of them."
        )
    for parameter in parameters:
        _check_parameter(parameter, schema, f"{label}: supports_args")


def _check_parameter(parameter: inspect.Parameter, schema: Schema, label: str) -> None:
    name = parameter.name
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise PredicateSignatureError(
            f"{label} takes {str(parameter)!r}. Name the parameters that it reads, among "
            f"{', '.join(schema.names)}."
        )
    if name not in schema.names:
        raise PredicateSignatureError(
            f"{label} names {name!r}, which is not a parameter of the op. "
            f"{did_you_mean(name, schema.names)}"
        )
    param = schema.param(name)
    has_default = parameter.default is not parameter.empty
    # Tuples compare items by identity first, so that nan equals itself.
    if has_default and not (param.has_default and (parameter.default,) == (param.default,)):
        raise PredicateSignatureError(
            f"{label}: the default of {name!r} differs from the op's. Remove it: a predicate "
            "always gets a value."
        )


def custom_functions(rule: Rule) -> list[Callable[..., bool]]:
    """Return the user's functions that a rule calls."""
    if isinstance(rule, Custom):
        return [rule.function]
    return [f for part in getattr(rule, "rules", ()) for f in custom_functions(part)]


# Declarative predicates: rules for the arguments that an implementation supports.
#
# For example::
#
#     supports_args=rules.cpu("x", "weight") & rules.dtype("x", torch.float32, torch.bfloat16)
#
# Combine rules with ``&`` and ``|``. They compile into one expression, which the eager fast path
# inlines and selection evaluates; the rule that fails gives the reason. An optional tensor that
# is None passes every rule about tensors.
#
# No rule depends on the batch size or the environment. To choose by size, use priorities, or the
# option ``compile_ranges`` for compiled code.


def dtype(name: str, *dtypes: torch.dtype) -> Rule:
    """Parameter *name* has one of *dtypes*."""
    _check_given(dtypes, "dtype", torch.dtype)
    supported = ", ".join(plain(d) for d in dtypes)
    test = " or ".join(f"{{t}}.dtype is {{{i}}}" for i in range(len(dtypes)))
    return TensorRule(
        (name,), f"({test})", lambda n, t: f"{n}: {plain(t.dtype)} (supports {supported})", dtypes
    )


def same_dtype(*names: str) -> Rule:
    """The tensors have the same dtype."""
    return PairRule(names, "dtype")


def same_shape(*names: str) -> Rule:
    """The tensors have the same shape."""
    return PairRule(names, "shape")


def same_device(*names: str) -> Rule:
    """The tensors are on the same device."""
    return PairRule(names, "device")


def cpu(*names: str) -> Rule:
    """The tensors are on the CPU and not lazily negated (:meth:`torch.Tensor.is_neg`)."""
    test = "({t}.is_cpu and not {t}.is_neg())"
    return TensorRule(names, test, _in_memory("cpu"), holds_for_plain_rows=True)


def cuda(*names: str) -> Rule:
    """The tensors are on a CUDA or ROCm device and not lazily negated."""
    return TensorRule(names, "({t}.is_cuda and not {t}.is_neg())", _in_memory("cuda"))


def device(kind: str, *names: str) -> Rule:
    """The tensors are on a device of type *kind*, such as ``"xpu"``, and not lazily negated."""
    test = "({t}.device.type == {0} and not {t}.is_neg())"
    return TensorRule(names, test, _in_memory(kind), (kind,))


def has_values(*names: str) -> Rule:
    """The tensors are not on the meta device."""
    return TensorRule(
        names, "not {t}.is_meta", lambda n, t: f"{n}: on {t.device} (supports tensors with values)"
    )


def contiguous(*names: str) -> Rule:
    """The tensors are contiguous."""
    return TensorRule(names, "{t}.is_contiguous()", _strides("contiguous"))


def unit_stride(*names: str) -> Rule:
    """The stride of the tensors' last dimension is 1."""
    test = "({t}.is_contiguous() or ({t}.ndim > 0 and {t}.stride()[-1] == 1))"
    return TensorRule(names, test, _strides("last stride 1"), holds_for_plain_rows=True)


def ndim(name: str, *counts: int) -> Rule:
    """Parameter *name* has one of these numbers of dimensions (``Tensor.ndim``)."""
    _check_given(counts, "ndim", int)
    supported = " or ".join(map(str, counts))
    return TensorRule(
        (name,),
        "({t}.ndim in {0})",
        lambda n, t: f"{n}: {t.ndim}-d (supports {supported}-d)",
        (frozenset(counts),),
    )


def last_dim_multiple_of(name: str, factor: int) -> Rule:
    """The size of the last dimension is a multiple of *factor*."""
    if not isinstance(factor, int) or factor < 1:
        raise PredicateSignatureError(
            f"rules.last_dim_multiple_of takes a positive int, not {factor!r}."
        )
    return TensorRule(
        (name,),
        "({t}.ndim > 0 and {t}.shape[-1] % {0} == 0)",
        lambda n, t: f"{n}: last dimension of {tuple(t.shape)} (supports multiples of {factor})",
        (factor,),
    )


def per_last_dim(vector: str, tensor: str) -> Rule:
    """*vector* is 1-d and as long as the last dimension of *tensor*."""
    return LastDimRule(vector, tensor)


def is_none(name: str) -> Rule:
    """Parameter *name* is None."""
    return ValueRule(name, "{v} is None", "None")


def not_none(name: str) -> Rule:
    """Parameter *name* is not None."""
    return ValueRule(name, "{v} is not None", "a value")


def one_of(name: str, *values: object) -> Rule:
    """Parameter *name* equals one of *values*."""
    _check_given(values, "one_of", object)
    return ValueRule(name, "{v} in {0}", " or ".join(map(repr, values)), (values,))


def custom(function: Callable[..., bool], why: str) -> Rule:
    """*function* returns True for the arguments it takes by name; *why* is the reason if not.

    ``rules.custom(lambda group_size: group_size >= 1, "group_size is below 1")``
    """
    return Custom(function, why)


def _check_given(values: tuple[object, ...], rule: str, kind: type) -> None:
    if not values:
        raise PredicateSignatureError(f"rules.{rule} needs at least one value.")
    for value in values:
        if not isinstance(value, kind):
            raise PredicateSignatureError(
                f"rules.{rule} takes {kind.__module__}.{kind.__name__} values, not {value!r}."
            )


def _in_memory(kind: str) -> Callable[[str, Any], str]:
    def reason(name: str, tensor: Any) -> str:
        if tensor.device.type == kind:
            return f"{name}: lazily negated (supports resolved tensors)"
        return f"{name}: on {tensor.device} (supports {kind})"

    return reason


def _strides(supported: str) -> Callable[[str, Any], str]:
    return lambda n, t: f"{n}: strides {tuple(t.stride())} (supports {supported})"
