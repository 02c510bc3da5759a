"""Which configuration group of compressed-tensors a module belongs to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")
_PATTERN = "re:"


def group_for(module: str, groups: Sequence[tuple[Sequence[str], _T]]) -> _T | None:
    """Return the value of the group with the most specific target: a name, pattern, or class.

    Args:
        module: the name of a linear layer.
        groups: targets and the value of each group.

    Returns:
        The first group's value if no target names the module: the tensors say that it is quantized.
    """
    for matches in (_is_name, _matches_pattern, _is_class):
        for targets, value in groups:
            if any(matches(target, module) for target in targets):
                return value
    return groups[0][1] if groups else None


def _is_name(target: str, module: str) -> bool:
    return target == module


def _matches_pattern(target: str, module: str) -> bool:
    return target.startswith(_PATTERN) and bool(re.match(target.removeprefix(_PATTERN), module))


def _is_class(target: str, module: str) -> bool:
    return target == "Linear"
