"""A cell of the table: one kernel on one shape with so many threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernel_cells.cases import CASES, PROVIDER, Case, contexts, is_decode
from kernel_cells.shape import BLOCK_SIZE, Shape
from opweave import ir

LARGE_TOKENS = 2048
"""From here on, what a server does between two calls has filled the caches with other data."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A cell to measure; every combination that an op supports."""

    ops: Sequence[str]
    dtypes: Sequence[torch.dtype]
    tokens: Sequence[int]
    hidden: Sequence[int]
    threads: Sequence[int]


@dataclass(frozen=True, slots=True)
class Cell:
    """One kernel, by op and place in its list of cases, on one shape with so many threads."""

    name: str
    index: int
    shape: Shape
    threads: int

    @property
    def op(self) -> ir.IrOp:
        return ir.current_registry().op(self.name)

    @property
    def case(self) -> Case:
        return CASES[self.name][self.index]

    @property
    def is_one_call(self) -> bool:
        return self.shape.tokens <= self.case.most_in_one_call

    @property
    def states(self) -> tuple[str, ...]:
        return self.case.states if self.is_one_call else ("fresh",)

    @property
    def family(self) -> tuple[Any, ...]:
        """The key of a compiled function: dynamic tokens, as in a server, and one token alone."""
        shape = self.shape
        sizes = (shape.dtype, shape.hidden, shape.tokens == 1, is_decode(shape.tokens))
        return (self.threads, self.name, self.index, *sizes[: 4 if self.case.attends else 3])

    @property
    def dtype(self) -> str:
        """The dtype in words."""
        floating = str(self.shape.dtype).removeprefix("torch.")
        return floating if self.case.is_floating else "int64"

    def __str__(self) -> str:
        shape, variant = self.shape, self.case.variant
        width = f"{shape.context} keys" if self.case.attends else str(shape.hidden)
        sizes = f"{shape.tokens} x {width}" if self.case.is_floating else f"{shape.tokens}"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return ", ".join([*([variant] if variant else []), self.dtype, sizes, threads])

    @property
    def is_cold(self) -> bool:
        """Whether the data is in no cache when a server calls the kernel."""
        is_large = self.case.is_floating and self.shape.tokens >= LARGE_TOKENS
        return self.case.streams or is_large

    @property
    def is_bound_by_memory(self) -> bool:
        """Whether there is a share of the stream to reach; tokens that share weights compute."""
        if self.case.attends:
            return is_decode(self.shape.tokens)
        return self.shape.tokens == 1 if self.case.streams else self.is_cold

    @property
    def updates(self) -> bool:
        """Whether the kernel can write what it has read, in place."""
        return self.op.impls[PROVIDER].inplace and not self.case.moves

    def inputs(self) -> tuple[Any, ...]:
        return self.case.inputs(self.shape)


def cells_of(grid: Grid) -> list[list[Cell]]:
    """Return the cells of *grid*, those of one family together, fewest tokens first."""
    found: dict[tuple[Any, ...], list[Cell]] = {}
    for threads, name in itertools.product(grid.threads, grid.ops):
        for index, case in enumerate(CASES[name]):
            for shape in _shapes(case, grid):
                cell = Cell(name, index, shape, threads)
                found.setdefault(cell.family, []).append(cell)
    return list(found.values())


def _shapes(case: Case, grid: Grid) -> Iterator[Shape]:
    # Attention has heads of one size: the widest model stands for all. Ops on indices know
    # neither width nor dtype.
    hidden = grid.hidden if case.is_floating and not case.attends else [max(grid.hidden)]
    dtypes = grid.dtypes if case.is_floating else grid.dtypes[:1]
    for dtype, width, tokens in itertools.product(dtypes, hidden, sorted(grid.tokens)):
        for context in contexts(case, tokens):
            yield Shape(tokens, width, dtype, context)


def dynamic_dims(cell: Cell) -> list[list[int]]:
    """Return, for each input of *cell*, the dimensions that follow the number of tokens."""
    with torch._subclasses.fake_tensor.FakeTensorMode():
        here, there = map(cell.case.inputs, _two_sizes(cell.case, cell.shape))
    return [
        [dim for dim, sizes in enumerate(zip(a.shape, b.shape, strict=True)) if len({*sizes}) > 1]
        if isinstance(a, torch.Tensor)
        else []
        for a, b in zip(here, there, strict=True)
    ]


def _two_sizes(case: Case, shape: Shape) -> Iterator[Shape]:
    """Return *shape* and another of its kind, every size that may differ being another."""
    yield shape
    if case.attends and is_decode(shape.tokens):
        yield replace(shape, tokens=shape.tokens - 1, context=2 * shape.context)
    else:
        tokens = shape.tokens + 2 * BLOCK_SIZE
        yield replace(shape, tokens=tokens, context=tokens if case.attends else 0)
