"""Random functional programs over IR ops, views and aten ops, and the ops they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from opweave import ir
from opweave.ir import rules

ROWS, WIDTH = 4, 8
SAME = rules.same_dtype("x", "x_residual")  # as kernels that reuse memory need
Values = list[Tensor]
Step = Callable[[Values, Values], None]  # (what there is, inputs that were given up)


@dataclass(frozen=True)
class Ops:
    """The ops of the programs, each with kernels of every kind."""

    norm: ir.IrOp
    add_norm: ir.IrOp
    halves: ir.IrOp

    @property
    def providers(self) -> list[str]:
        return ["native", "functional", "inplace", "crossed", "opaque"]


def declare() -> Ops:
    """Declare the ops in the current registry."""

    @ir.register_op
    def norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        return y if weight is None else y * weight

    @ir.register_op(allow_inplace=True, composite=True)
    def add_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        total = x + x_residual
        return norm(total, weight, epsilon), total

    @ir.register_op(allow_inplace=True)
    def halves(x: Tensor, factor: float = 0.5, *, shift: float = 0.0) -> Tensor:
        return x * factor + shift

    @norm.register_impl("functional")
    def _(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, epsilon)

    @norm.register_impl("opaque")
    def _(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        if type(x) is not Tensor:
            raise RuntimeError("a kernel that looks at pointers")
        return norm.native(x, weight, epsilon)

    @add_norm.register_impl("inplace", inplace=True, supports_args=SAME)
    def _(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        x_residual.add_(x)
        x.copy_(norm.native(x_residual, weight, epsilon))
        return x, x_residual

    @add_norm.register_impl("crossed", inplace=True, supports_args=SAME)
    def _(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        x.add_(x_residual)
        x_residual.copy_(norm.native(x, weight, epsilon))
        return x_residual, x

    @add_norm.register_impl("functional", inplace=True, supports_args=SAME)
    def _(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        scratch = torch.empty_like(x)  # writes to memory of its own, and to one activation
        torch.add(x, x_residual, out=scratch)
        x_residual.copy_(scratch)
        return norm.native(scratch, weight, epsilon), x_residual

    @halves.register_impl("inplace", inplace=True)
    def _(x: Tensor, factor: float = 0.5, *, shift: float = 0.0) -> Tensor:
        return x.mul_(factor).add_(shift)

    @halves.register_impl("functional")
    def _(x: Tensor, factor: float = 0.5, *, shift: float = 0.0) -> Tensor:
        return torch.empty_like(x).copy_(x).mul_(factor).add_(shift)

    return Ops(norm, add_norm, halves)


@dataclass(frozen=True)
class Program:
    """A function of two tensors and a weight, as a list of steps.

    Each step appends values; ``results`` picks what is returned, inputs and views among it.
    """

    ops: Ops
    steps: tuple[tuple[Any, ...], ...]
    results: tuple[int, ...]

    def __call__(self, a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        values = [a, b]
        for name, *arguments in self.steps:
            values += list(getattr(self, f"_{name}")(values, weight, *arguments))
        return tuple(values[i % len(values)] for i in self.results)

    def _norm(self, v: Values, w: Tensor, i: int, weighted: bool) -> Iterator[Tensor]:
        yield self.ops.norm(v[i % len(v)], w if weighted else None, 1e-5)

    def _add_norm(self, v: Values, w: Tensor, i: int, j: int) -> tuple[Tensor, Tensor]:
        a, b = _alike(v, i, j)
        return self.ops.add_norm(a, b, w, epsilon=1e-5)

    def _donating(self, v: Values, w: Tensor, i: int, j: int) -> tuple[Tensor, Tensor]:
        a, b = _alike(v, i, j)
        return self.ops.add_norm.maybe_inplace(a * 2, x_residual=b + 1, weight=w, epsilon=1e-5)

    def _halves(self, v: Values, w: Tensor, i: int) -> Iterator[Tensor]:
        yield self.ops.halves(v[i % len(v)], shift=0.25)

    def _halves_twice(self, v: Values, w: Tensor, i: int) -> Iterator[Tensor]:
        yield self.ops.halves.maybe_inplace(self.ops.halves(v[i % len(v)]))

    def _sin(self, v: Values, w: Tensor, i: int) -> Iterator[Tensor]:
        yield v[i % len(v)].sin()

    def _add(self, v: Values, w: Tensor, i: int, j: int) -> Iterator[Tensor]:
        a, b = _alike(v, i, j)
        yield a + b

    def _rows(self, v: Values, w: Tensor, i: int, start: int) -> Iterator[Tensor]:
        x = v[i % len(v)]
        yield x[start % 2 :]

    def _overlapping(self, v: Values, w: Tensor, i: int) -> tuple[Tensor, Tensor]:
        x = v[i % len(v)]
        return (x[:-1], x[1:]) if len(x) > 1 else (x, x)

    def _view(self, v: Values, w: Tensor, i: int) -> Iterator[Tensor]:
        x = v[i % len(v)]
        yield x.reshape(-1).view(-1, WIDTH)

    def _expanded(self, v: Values, w: Tensor, i: int) -> Iterator[Tensor]:
        x = v[i % len(v)]
        yield x[:1].expand(ROWS, WIDTH)

    def _transposed(self, v: Values, w: Tensor, i: int) -> Iterator[Tensor]:
        x = v[i % len(v)]
        yield torch.stack([x, x * 2], 1).transpose(0, 1).reshape(-1, WIDTH)

    def _columns(self, v: Values, w: Tensor, i: int) -> tuple[Tensor, Tensor]:
        x = v[i % len(v)]
        left, right = torch.cat([x, x.cos()], -1).chunk(2, -1)
        return left, right

    def _mutated(self, v: Values, w: Tensor, i: int, j: int) -> Iterator[Tensor]:
        """A fresh tensor is written to through a view, after others have read it."""
        x = v[i % len(v)] * 3
        y = self.ops.halves(x)
        x[:1].mul_(2)
        yield x
        yield y

    def _product(self, v: Values, w: Tensor, i: int) -> Iterator[Tensor]:
        x = v[i % len(v)]
        yield (x @ x.t()) @ x


def _alike(v: Values, i: int, j: int) -> tuple[Tensor, Tensor]:
    a, b = v[i % len(v)], v[j % len(v)]
    rows = min(len(a), len(b))
    return a[:rows], b[:rows]


_index = st.integers(0, 30)
_STEPS = {
    "norm": (_index, st.booleans()),
    "add_norm": (_index, _index),
    "donating": (_index, _index),
    "halves": (_index,),
    "halves_twice": (_index,),
    "sin": (_index,),
    "add": (_index, _index),
    "rows": (_index, st.integers(0, 1)),
    "overlapping": (_index,),
    "view": (_index,),
    "expanded": (_index,),
    "transposed": (_index,),
    "columns": (_index,),
    "mutated": (_index, _index),
    "product": (_index,),
}


@st.composite
def programs(draw: st.DrawFn, ops: Ops) -> Program:
    """Draw a program; every one contains an op that may run in place."""
    step = st.sampled_from(sorted(_STEPS)).flatmap(
        lambda name: st.tuples(st.just(name), *_STEPS[name])
    )
    steps = draw(st.lists(step, min_size=1, max_size=7))
    steps.append(draw(st.tuples(st.sampled_from(["add_norm", "donating"]), _index, _index)))
    results = draw(st.lists(_index, min_size=1, max_size=4))
    return Program(ops, tuple(steps), tuple(results))
