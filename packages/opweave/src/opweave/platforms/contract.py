"""Checks of a platform class against the contract of ``Platform``, when the class is defined.

Otherwise a misspelled hook, or one with an incompatible signature, would go unnoticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import torch

from opweave.platforms.capabilities import Capabilities
from opweave.platforms.errors import PlatformApiError, PlatformContractError

_BOUND = (staticmethod, classmethod)
_COMPUTED = (property, cached_property)


def check_class(cls: type, base: type) -> None:
    """Check the members that *cls* and its mixins define.

    Raises:
        PlatformApiError: (a TypeError) it is written for another version of the contract.
        PlatformContractError: (a TypeError) it breaks the contract; the message lists each fault.
    """
    check_api(cls.__dict__.get("api", base.__dict__["api"]), _name(cls), base.__dict__["api"])
    faults = [
        fault
        for owner in cls.__mro__
        if owner is cls or (not issubclass(owner, base) and owner is not object)
        for name, value in vars(owner).items()
        if not name.startswith("_")
        for fault in _faults(f"{_name(owner)}.{name}", name, value, base)
    ]
    if faults:
        raise PlatformContractError(
            f"{_name(cls)} does not keep the contract of Platform:\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )


def check_api(found: object, who: str, provided: int) -> None:
    """Raise :class:`PlatformApiError` unless *found* is the *provided* version."""
    if isinstance(found, bool) or not isinstance(found, int):
        raise PlatformApiError(f"{who}: api={found!r} should be the number {provided}.")
    if found != provided:
        older = "an older" if found < provided else "a newer"
        remedy = (
            "install a version of the package that is written for this opweave"
            if found < provided
            else "upgrade opweave, or install an older version of the package"
        )
        raise PlatformApiError(
            f"{who} is written for version {found} of the platform contract, {older} one than the "
            f"version {provided} of this opweave: {remedy}."
        )


def check_object(platform: object, base: type, who: str) -> None:
    """Check that *platform* is an instance of *base* with valid attributes.

    Raises:
        PlatformContractError: (a TypeError) it is not.
    """
    if not isinstance(platform, base):
        raise PlatformContractError(
            f"{who} is a {type(platform).__name__}, and not derived from {_name(base)}."
        )
    # Properties are not read, because they may start the device's runtime.
    found = {name: inspect.getattr_static(platform, name, None) for name in base.__annotations__}
    faults = [
        fault
        for name, value in found.items()
        if not isinstance(value, _COMPUTED)
        for fault in _data_faults(f"{_name(type(platform))}.{name}", name, value)
    ]
    if faults:
        raise PlatformContractError("\n".join(faults))


def members(base: type) -> Iterator[str]:
    """Yield the names of the contract in definition order: attributes, then methods."""
    yield from base.__annotations__
    yield from (name for name, value in vars(base).items() if _is_method(name, value))


def _is_method(name: str, value: object) -> bool:
    return inspect.isfunction(value) and not name.startswith("_")


def _faults(where: str, name: str, value: Any, base: type) -> Iterator[str]:
    known = list(members(base))
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        yield (
            f"{where} is not a member of the contract. {hint}Names of helpers must start with _."
        )
    elif name in base.__annotations__:
        if not isinstance(value, _COMPUTED):
            yield from _data_faults(where, name, value)
    else:
        yield from _method_faults(where, value, base.__dict__[name])


def _method_faults(where: str, value: Any, expected: Callable[..., Any]) -> Iterator[str]:
    function = value.__func__ if isinstance(value, _BOUND) else value
    if isinstance(value, (*_COMPUTED, type)) or not callable(function):
        yield f"{where} is {_shown(value)}; it should be a method {_signature(expected)}."
        return
    if inspect.iscoroutinefunction(function):
        yield f"{where} is a coroutine function; it should be a plain method."
        return
    own = list(inspect.signature(function).parameters.values())
    bound = own if isinstance(value, staticmethod) else own[1:]
    if not isinstance(value, staticmethod) and not own:
        yield f"{where} takes no self."
        return
    asked = list(inspect.signature(expected).parameters.values())[1:]
    problems = [*_missing(bound, asked), *_unasked(bound, asked)]
    if problems:
        yield f"{where}{_signature(function)} {'; '.join(problems)}. It is {_signature(expected)}."


def _missing(own: list[inspect.Parameter], asked: list[inspect.Parameter]) -> Iterator[str]:
    """Describe the expected parameters that *own* does not accept by position and by name."""
    kinds = {parameter.kind for parameter in own}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        return
    by_name = {p.name: p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD}
    places = list(by_name)
    for place, parameter in enumerate(asked):
        found = by_name.get(parameter.name)
        if found is None:
            yield f"does not take {parameter.name!r}"
        elif places[place : place + 1] != [parameter.name]:
            yield f"takes {parameter.name!r} in another position"
        elif parameter.default is not parameter.empty and found.default is found.empty:
            yield f"requires {parameter.name!r}, which is optional"


def _unasked(own: list[inspect.Parameter], asked: list[inspect.Parameter]) -> Iterator[str]:
    """Describe the required parameters of *own* that are never passed."""
    names = {parameter.name for parameter in asked}
    for parameter in own:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not variadic and parameter.name not in names and parameter.default is parameter.empty:
            yield f"requires {parameter.name!r}, which is never passed"


def _data_faults(where: str, name: str, value: object) -> Iterator[str]:
    wanted, is_right = _DATA[name]
    if not is_right(value):
        yield f"{where} is {_shown(value)}; it should be {wanted}."


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_tuple_of(kind: type) -> Callable[[object], bool]:
    return lambda v: isinstance(v, tuple) and bool(v) and all(isinstance(i, kind) for i in v)


_DATA: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "api": ("the number of the version", lambda v: isinstance(v, int)),
    "name": ("an identifier, such as 'acme'", lambda v: isinstance(v, str) and v.isidentifier()),
    "device_type": ("torch's name for the devices, such as 'cuda'", _is_text),
    "dispatch_tags": ("a tuple of strings, such as ('oot',)", _is_tuple_of(str)),
    "supported_dtypes": ("a tuple of torch.dtype", _is_tuple_of(torch.dtype)),
    "capabilities": ("a Capabilities(...)", lambda v: isinstance(v, Capabilities)),
    "dist_backend": ("the name of a backend of torch.distributed", _is_text),
    "simple_compile_backend": ("the name of a backend of torch.compile", _is_text),
}


def _signature(function: Callable[..., Any]) -> str:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    bare = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    return str(inspect.Signature(bare))


def _shown(value: object) -> str:
    if isinstance(value, (*_COMPUTED, *_BOUND)):
        return f"a {type(value).__name__}"
    if inspect.isfunction(value):
        return "a method"
    return "missing" if value is None else repr(value)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
