"""Priorities: the order in which to try the providers of an op, and tunable parameters."""

from __future__ import annotations

import enum
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from opweave.ir.errors import InvalidOpError, SettingError

# Tunable parameters: keyword-only parameters of a kernel, such as a block size.
#
# Every combination of values is an implementation of its own, named ``provider[block=64]``, so
# that priorities, verification and tuning treat it like any other. ``provider`` alone has the
# defaults.


Tunable = Mapping[str, Sequence[int | str]]

_MAX_VARIANTS = 64
NAME = re.compile(r"[^\W\d]\w*(\[\w+=\w+(,\w+=\w+)*\])?")
"""The name of an implementation: a provider, and values of its parameters."""


def _check(function: Callable[..., Any], tunable: Tunable, label: str) -> None:
    parameters = inspect.signature(function).parameters
    count = 1
    for name, values in tunable.items():
        p = parameters.get(name)
        if p is None or p.kind is not p.KEYWORD_ONLY or p.default is p.empty:
            raise InvalidOpError(
                f"{label}: tunable {name!r} must be a keyword-only parameter of the function with "
                f"a default, as in def kernel(x, *, {name}=64)."
            )
        texts = [*map(str, values)]
        if str(p.default) not in texts or len({*texts}) != len(texts):
            raise InvalidOpError(
                f"{label}: the values {values!r} of {name!r} must be distinct, and contain its "
                f"default {p.default!r}."
            )
        for value in values:
            if type(value) not in (int, str) or not re.fullmatch(r"[a-z0-9_]+", str(value)):
                raise InvalidOpError(
                    f"{label}: the value {value!r} of {name!r} must be a number of at least 0, or "
                    "a word of lower-case letters, digits and underscores."
                )
        count *= len(values)
    if count > _MAX_VARIANTS:
        raise InvalidOpError(
            f"{label}: {count} combinations of {', '.join(tunable)} are too many; each is verified "
            f"and measured. Give at most {_MAX_VARIANTS}."
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
        values = dict(zip(tunable, chosen, strict=True))
        changed = {name: v for name, v in values.items() if v != parameters[name].default}
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


# Priorities: the order in which to try the providers of an op, and the setting behind each
# entry.
#
# Sources, strongest first: call site, scope, command line, environment, config file,
# ``set_default``, tuning file, platform default, native. The list of a stronger source comes
# before that of a weaker one; native is always last.


NATIVE = "native"
EVERY_OP = "*"
"""In a platform's default: the ops without a list of their own, where they have the provider."""
ALWAYS_LAST = "always last"  # origin of native if no list contains it


class Source(enum.IntEnum):
    """Where a priority list comes from; a smaller value is stronger."""

    CALL_SITE = 0
    """``op.using(...)``."""
    SCOPE = 1
    """A ``with`` block of ``ir.priority`` or ``op.set_priority``."""
    COMMAND_LINE = 2
    """``--ir-op-priority.<op>``."""
    ENVIRONMENT = 3
    """``OPWEAVE_IR_OP_PRIORITY__<OP>``."""
    CONFIG_FILE = 4
    """``[ir_op_priority]``."""
    SET_DEFAULT = 5
    """``op.set_default``."""
    TUNED = 6
    """A tuning file; it may choose by the number of tokens."""
    PLATFORM = 7
    """The default of the platform."""
    NATIVE = 8
    """The native implementation, always last."""


class PriorityEntry(NamedTuple):
    """One provider in a priority list.

    Attributes:
        provider: its name.
        strict: written as ``name!``: raise an error if it cannot be used, instead of falling back.
        origin: the setting it comes from, in the words of the user.
    """

    provider: str
    strict: bool
    origin: str

    def __str__(self) -> str:
        return f"{self.provider}!" if self.strict else self.provider


Entries = tuple[PriorityEntry, ...]

_COMMA = re.compile(r",(?![^\[]*\])")  # outside of brackets


class SizeRange(NamedTuple):
    """A priority list for calls with up to *limit* tokens; None: any number of tokens."""

    limit: int | None
    entries: Entries


def parse(providers: str | Iterable[str], origin: str) -> Entries:
    """Parse a priority list, given as an iterable of names or as one comma-separated string.

    Examples:
        >>> [str(entry) for entry in parse("triton!, opweave_c", "the command line")]
        ['triton!', 'opweave_c']

    Raises:
        SettingError: the list is empty or malformed.
    """
    if not isinstance(providers, Iterable):
        raise SettingError(
            f"{origin}: {providers!r} is not a list of providers, such as ['opweave_c', 'native']."
        )
    names = _COMMA.split(providers) if isinstance(providers, str) else list(providers)
    entries = tuple(_entry(name, origin) for name in names)
    if not entries:
        raise SettingError(
            f"{origin}: the priority list is empty. Give at least one provider, such as 'native'."
        )
    return entries


def _entry(name: object, origin: str) -> PriorityEntry:
    if not isinstance(name, str):
        raise SettingError(
            f"{origin}: {name!r} is not the name of a provider. "
            "Give a list of names, such as ['opweave_c', 'native']."
        )
    bare = name.strip().removesuffix("!")
    if not NAME.fullmatch(bare):
        raise SettingError(
            f"{origin}: {name!r} is not the name of a provider. "
            "Separate names by commas, such as 'opweave_c,native'; 'name!' makes it an error if "
            "that provider cannot be used."
        )
    return PriorityEntry(bare, name.strip().endswith("!"), origin)


def merge(lists: Iterable[Entries]) -> Entries:
    """Merge lists, strongest first: the first mention of a provider wins, native is last.

    Examples:
        >>> lists = parse("a,b", "scope"), parse("c,a", "platform default")
        >>> [entry.provider for entry in merge(lists)]
        ['a', 'b', 'c', 'native']
    """
    merged: dict[str, PriorityEntry] = {}
    for entry in (entry for entries in lists for entry in entries):
        merged.setdefault(entry.provider, entry)
    merged.setdefault(NATIVE, PriorityEntry(NATIVE, False, ALWAYS_LAST))
    return tuple(merged.values())


class IrOpPriorityConfig(Mapping[str, list[str]]):
    """Priority lists by op name: ``IrOpPriorityConfig(rms_norm=["triton", "native"])``.

    A mapping of op names to provider names. Any op name is accepted, including ops that a plugin
    declares later; names are checked against the registry when the config is applied.

    Examples:
        >>> IrOpPriorityConfig(rms_norm="opweave_c,native")["rms_norm"]
        ['opweave_c', 'native']
        >>> config = IrOpPriorityConfig()
        >>> config.rms_norm = ["native"]
        >>> config
        IrOpPriorityConfig(rms_norm=['native'])
    """

    def __init__(
        self,
        priorities: Mapping[str, str | Iterable[str]] | None = None,
        /,
        **by_op: str | Iterable[str],
    ) -> None:
        self._lists: dict[str, list[str]]
        object.__setattr__(self, "_lists", {})
        for op, names in {**(priorities or {}), **by_op}.items():
            setattr(self, op, names)

    def __setattr__(self, op: str, names: str | Iterable[str]) -> None:
        entries = parse(names, f"IrOpPriorityConfig({op}=...)")
        self._lists[op] = [str(entry) for entry in entries]

    def __getattr__(self, op: str) -> list[str]:
        if op.startswith("_"):  # copy and pickle look up names before _lists exists
            raise AttributeError(op)
        providers = self._lists.get(op)
        if providers is None:
            raise AttributeError(f"no priority is set for an op {op!r}; set: {', '.join(self)}")
        return providers

    def __getitem__(self, op: str) -> list[str]:
        return self._lists[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lists)

    def __len__(self) -> int:
        return len(self._lists)

    def __repr__(self) -> str:
        lists = ", ".join(f"{op}={names!r}" for op, names in self._lists.items())
        return f"IrOpPriorityConfig({lists})"
