"""Spellings: plain PyTorch code that computes the same as an op."""

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
    """A function in plain PyTorch that computes the same as an op.

    The compiler recognizes the operators that the function traces to, and replaces them with a call
    of the op.

    Attributes:
        name: the function's name.
        function: the function; it has the op's parameters.
        call: a function with the same parameters that calls the op; None: call the op with the
            arguments unchanged.
        inputs: returns arguments to trace the function with; by default the op's input generator.
        marker: the name of an aten operator that is in every trace of the function. Graphs without
            it are not searched. Empty: search all graphs.
        constants: the parameters that must be inputs of the graph, such as weights.
        elements: the minimum size of the first argument, in elements, for which a kernel is faster
            than generated code. Code whose first argument may be smaller is not replaced.
    """

    name: str
    function: Callable[..., Any]
    call: Callable[..., Any] | None = None
    inputs: Callable[..., tuple[Any, ...]] | None = None
    marker: str = ""
    constants: tuple[str, ...] = ()
    elements: int = 0
