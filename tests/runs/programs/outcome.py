"""The results and side effects of a program, and the difference of two outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runs.programs.program import ROWS, WIDTH, Program

DRAWS = 3  # inputs that differ by one rounding, to see how sensitive a program is
MARGIN = 8.0


@dataclass(frozen=True)
class Outcome:
    """Results, inputs after the call and gradients, and which of the first two share memory."""

    values: list[Tensor]
    sharing: frozenset[frozenset[int]]


def leaves(program: Program, mode: str, dtype: torch.dtype, draw: int) -> tuple[Tensor, Tensor]:
    """Return the memory of the inputs; in *draw* 0 as it is, in others off by one rounding."""
    own = getattr(torch, program.dtype)
    generator = torch.Generator().manual_seed(program.seed)
    base = torch.randn(3 * ROWS, WIDTH, generator=generator).to(own)
    if draw:
        signs = torch.randn(base.shape, generator=generator.manual_seed(draw)).sign()
        base = (base.double() * (1 + signs * torch.finfo(own).eps)).to(own)
    with torch.inference_mode(mode == "inference_inputs"):
        base, weight = base.to(dtype, copy=True), base[-1].to(dtype, copy=True)
    needs_grad = mode == "grad"
    return base.requires_grad_(needs_grad), weight.requires_grad_(needs_grad)


def inputs(program: Program, base: Tensor, weight: Tensor) -> list[Tensor]:
    """Return the arguments of *program*."""
    a, b = {
        "apart": lambda: (base[:ROWS].clone(), base[ROWS : 2 * ROWS].clone()),
        "same": lambda: (base[:ROWS],) * 2,
        "overlapping": lambda: (base[:ROWS], base[1 : ROWS + 1]),
        "views": lambda: (base[:ROWS], base[ROWS : 2 * ROWS]),
    }[program.aliases]()
    return [a, b, weight]


def call(
    programs: Sequence[Program],
    mode: str,
    function: Callable[..., Any],
    dtype: torch.dtype | None = None,
    draw: int = 0,
) -> list[Outcome]:
    """Call *function* with the inputs of all *programs*, and return the outcome of each."""
    modes = {"inference_mode": torch.inference_mode, "grad": torch.enable_grad}
    with modes.get(mode, torch.no_grad)():
        memory = [
            leaves(each, mode, dtype or getattr(torch, each.dtype), draw) for each in programs
        ]
        given = [inputs(each, *of) for each, of in zip(programs, memory, strict=True)]
        results = function(*(value for each in given for value in each))
        live = [[*r, *g] for r, g in zip(results, given, strict=True)]
        values = [[value.detach().clone() for value in each] for each in live]
        if mode == "grad":
            for each, grads in zip(values, gradients(live, memory), strict=True):
                each.extend(grads)
    return [Outcome(*each) for each in zip(values, map(sharing, live), strict=True)]


def gradients(
    values: Sequence[Sequence[Tensor]], memory: Sequence[tuple[Tensor, Tensor]]
) -> list[list[Tensor]]:
    """Return the gradients of a loss of all *values*; zeros where it does not depend on memory."""
    parts = [v.float().cos().sum() for each in values for v in each if v.requires_grad]
    if not parts:
        return [[] for _ in memory]
    flat = [tensor for of in memory for tensor in of]
    found = torch.autograd.grad(sum(parts), flat, allow_unused=True)
    full = [
        torch.zeros_like(of) if grad is None else grad.detach()
        for grad, of in zip(found, flat, strict=True)
    ]
    return [full[2 * i : 2 * i + 2] for i in range(len(memory))]


def sharing(values: Sequence[Tensor]) -> frozenset[frozenset[int]]:
    """Return which of *values* share memory with each other."""
    groups: dict[int, set[int]] = {}
    for number, value in enumerate(values):
        groups.setdefault(value.untyped_storage().data_ptr(), set()).add(number)
    return frozenset(map(frozenset, groups.values()))


@dataclass(frozen=True)
class Expected:
    """The outcome in eager mode, and how far from it other roundings may be."""

    outcome: Outcome
    tolerances: list[float]


def expect(program: Program, mode: str, function: Callable[..., Any]) -> Expected:
    """Run *program* in eager mode.

    The tolerance of a value is a multiple of how much it moves in float64, and when the inputs move
    by one rounding.
    """
    (outcome,) = call([program], mode, function)
    others = [call([program], mode, function, draw=draw)[0] for draw in range(1, DRAWS + 1)]
    others += call([program], mode, function, dtype=torch.float64)
    eps = torch.finfo(getattr(torch, program.dtype)).eps
    tolerances = []
    for number, value in enumerate(outcome.values):
        exact = value.double()
        size = exact.abs().nan_to_num(0, 0, 0).max().item() if value.numel() else 0.0
        moved = [(other.values[number].double() - exact).abs() for other in others]
        far = max((m[~m.isnan()].max().item() if (~m.isnan()).any() else 0.0) for m in moved)
        tolerances.append(MARGIN * max(far, eps * size))
    return Expected(outcome, tolerances)


def difference(expected: Expected, found: Outcome) -> str:
    """Return how an outcome differs, in words, or an empty string."""
    wanted = expected.outcome
    if len(found.values) != len(wanted.values):
        return f"{len(found.values)} values and gradients instead of {len(wanted.values)}"
    for number, (value, right) in enumerate(zip(found.values, wanted.values, strict=True)):
        if value.shape != right.shape or value.dtype != right.dtype:
            found_as, wanted_as = ((v.dtype, tuple(v.shape)) for v in (value, right))
            return f"value {number}: {found_as}, not {wanted_as}"
        off = (value.double() - right.double()).abs()
        same = (value == right) | (value.isnan() & right.isnan())
        wrong = ~same & ~(off <= expected.tolerances[number])
        if wrong.any():
            return (
                f"value {number}: {int(wrong.sum())} of {wrong.numel()} elements differ, by up to "
                f"{off[wrong].max().item():.3g} where {expected.tolerances[number]:.3g} is allowed"
            )
    if found.sharing != wanted.sharing:
        return f"results that share memory: {_listed(found)}, not {_listed(wanted)}"
    return ""


def _listed(outcome: Outcome) -> str:
    return str(sorted(sorted(group) for group in outcome.sharing if len(group) > 1))
