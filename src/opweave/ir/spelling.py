"""Spellings: how programs that do not call an op write it in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Inductor fuses row-wise code with its neighbors, and a call of a kernel takes about 3 us more. On
# a Xeon, kernels were faster with 512 x 4,096 elements, by 1.2 to 1.5, and not always with
# 64 x 2,048.
ROWWISE_ELEMENTS = 1 << 20


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
        constants: the parameters that must be inputs of the graph, as weights are.
        elements: the smallest first argument, in elements, for which a kernel is faster than
            generated code. Graphs in which it may be smaller are left to the code generator.
    """

    name: str
    function: Callable[..., Any]
    call: Callable[..., Any] | None = None
    inputs: Callable[..., tuple[Any, ...]] | None = None
    marker: str = ""
    constants: tuple[str, ...] = ()
    elements: int = 0
