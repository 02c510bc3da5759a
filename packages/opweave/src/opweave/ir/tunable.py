"""Tunable parameters: keyword-only parameters of a kernel, such as a block size.

Every combination of values is an implementation of its own, named ``provider[block=64]``, so that
priorities, verification and tuning treat it like any other. ``provider`` alone has the defaults.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from opweave.ir.errors import InvalidOpError

Tunable = Mapping[str, Sequence[int | str]]

MOST_VARIANTS = 64
NAME = re.compile(r"[^\W\d]\w*(\[\w+=\w+(,\w+=\w+)*\])?")
"""The name of an implementation: a provider, and values of its parameters."""


def _check(function: Callable[..., Any], tunable: Tunable, what: str) -> None:
    parameters = inspect.signature(function).parameters
    count = 1
    for name, values in tunable.items():
        p = parameters.get(name)
        if p is None or p.kind is not p.KEYWORD_ONLY or p.default is p.empty:
            raise InvalidOpError(
                f"{what}: tunable {name!r} must be a keyword-only parameter of the function with a "
                f"default, as in def kernel(x, *, {name}=64)."
            )
        texts = [*map(str, values)]
        if str(p.default) not in texts or len({*texts}) != len(texts):
            raise InvalidOpError(
                f"{what}: the values {values!r} of {name!r} must be distinct, and contain its "
                f"default {p.default!r}."
            )
        for value in values:
            if type(value) not in (int, str) or not re.fullmatch(r"[a-z0-9_]+", str(value)):
                raise InvalidOpError(
                    f"{what}: the value {value!r} of {name!r} must be a number of at least 0, or a "
                    "word of lower-case letters, digits and underscores."
                )
        count *= len(values)
    if count > MOST_VARIANTS:
        raise InvalidOpError(
            f"{what}: {count} combinations of {', '.join(tunable)} are too many; each is verified "
            f"and measured. Give at most {MOST_VARIANTS}."
        )


def variants(
    op: str, provider: str, function: Callable[..., Any], tunable: Tunable
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name and the function of each combination, the defaults first.

    The name lists the values that differ from the defaults.

    Raises:
        InvalidOpError: a parameter is not keyword-only or lacks a default, a value is not a word,
            the default is not among the values, or there are too many combinations.
    """
    _check(function, tunable, f"{op}: implementation {provider!r}")
    yield provider, function
    parameters = inspect.signature(function).parameters
    for chosen in itertools.product(*tunable.values()):
        given = dict(zip(tunable, chosen, strict=True))
        changed = {name: v for name, v in given.items() if v != parameters[name].default}
        if changed:
            shown = ",".join(f"{name}={value}" for name, value in changed.items())
            yield f"{provider}[{shown}]", partial(function, **changed)


def without_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a variant, which is partial, without values of its parameters."""
    return function.func if isinstance(function, partial) else function


def base_of(name: str) -> str:
    """Return the provider in the name of an implementation.

    Examples:
        >>> base_of("mine[block=64]"), base_of("mine")
        ('mine', 'mine')
    """
    return name.partition("[")[0]
