"""Predicates: rules or functions that say whether an implementation supports given arguments.

A predicate function gets the arguments of the op whose names are among its own parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from opweave.ir.errors import PredicateSignatureError, did_you_mean
from opweave.ir.rule import Custom, Rule
from opweave.ir.schema import Schema, check_returns

Predicate = Rule | Callable[..., bool]


def check_predicate(predicate: Predicate, schema: Schema, what: str) -> None:
    """Raise PredicateSignatureError unless *predicate* fits the op's parameters."""
    if isinstance(predicate, Rule):
        predicate.check(schema)
        for function in custom_functions(predicate):
            check_predicate(function, schema, what)
        return
    if not callable(predicate):
        raise PredicateSignatureError(
            f"{what}: supports_args must be a rule or a function, not {predicate!r}."
        )
    check_returns(predicate, f"{what}: supports_args", PredicateSignatureError)
    try:
        parameters = list(inspect.signature(predicate).parameters.values())
    except (TypeError, ValueError) as error:
        raise PredicateSignatureError(f"{what}: supports_args: {error}.") from error
    if not parameters:
        raise PredicateSignatureError(
            f"{what}: supports_args takes no parameter. Name the parameters of the op that it "
            f"reads, among {', '.join(schema.names)}; use supported= if it needs none of them."
        )
    for parameter in parameters:
        _check_parameter(parameter, schema, f"{what}: supports_args")


def _check_parameter(parameter: inspect.Parameter, schema: Schema, what: str) -> None:
    name = parameter.name
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise PredicateSignatureError(
            f"{what} takes {str(parameter)!r}. Name the parameters that it reads, among "
            f"{', '.join(schema.names)}."
        )
    if name not in schema.names:
        raise PredicateSignatureError(
            f"{what} names {name!r}, which is not a parameter of the op. "
            f"{did_you_mean(name, schema.names)}"
        )
    wanted = schema.param(name)
    has_default = parameter.default is not parameter.empty
    # Tuples compare items by identity first, so that nan equals itself.
    if has_default and not (wanted.has_default and (parameter.default,) == (wanted.default,)):
        raise PredicateSignatureError(
            f"{what}: the default of {name!r} differs from the op's. Remove it: a predicate "
            "always gets a value."
        )


def custom_functions(rule: Rule) -> list[Callable[..., bool]]:
    """Return the user's functions that a rule calls."""
    if isinstance(rule, Custom):
        return [rule.function]
    return [f for part in getattr(rule, "rules", ()) for f in custom_functions(part)]
