"""Spellings: how programs that do not call an op write it in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spelling:
    """A function of plain PyTorch that computes what an op computes.

    The compiler recognizes the operators that it traces to, and calls the op in their place.

    Attributes:
        name: the function's name.
        function: takes the op's parameters.
        call: takes the op's parameters, too, and calls the op; None where it takes them as they
            are.
        inputs: makes arguments that the function is traced with, as the op's input generator does,
            which it replaces.
        marker: an aten operator that every trace of the function has, by its name. Where a graph
            has none, the spelling is not looked for. Empty: always look.
        constants: the parameters that must be inputs of the graph, such as weights: a layout that
            pays once for a weight would be paid on every call for a computed tensor.
    """

    name: str
    function: Callable[..., Any]
    call: Callable[..., Any] | None = None
    inputs: Callable[..., tuple[Any, ...]] | None = None
    marker: str = ""
    constants: tuple[str, ...] = ()
