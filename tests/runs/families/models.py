"""Compare a tiny model of transformers with itself, after ``opweave.optimize`` and compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import opweave
from runs.families.checkpoint import build
from runs.families.compare import Result, line
from runs.families.sizes import SPECIAL, VOCABULARY

# Of the largest logit. The layers of these models amplify rounding, some by a routing decision.
TOLERANCE = 1e-3
# Of token ids. Some layers loop over the tokens, and a graph contains every step.
_SHAPES = ((1, 1), (2, 9), (1, 70))
_COMPILED_SHAPES = ((2, 9), (1, 13))


def optimize(name: str) -> list[Result]:
    """Compare the logits of an architecture before and after ``opweave.optimize``."""
    return _timed(name, _optimize, _SHAPES)


def compile_model(name: str, codegen: bool = False) -> list[Result]:
    """Compare the logits of an architecture with those of ``backend="opweave"``.

    Args:
        name: of an architecture or variant.
        codegen: as in the options of the backend. False takes seconds, True minutes.
    """
    return _timed(name, partial(_compile, codegen=codegen), _COMPILED_SHAPES)


_Check = Callable[[str, Any, list[Tensor], list[Tensor]], Result]


def _timed(name: str, check: _Check, shapes: Sequence[tuple[int, int]]) -> list[Result]:
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randint(SPECIAL, VOCABULARY - 1, each, generator=generator) for each in shapes]
    try:
        model = build(name)
        expected, again = _logits(model, inputs), _logits(model, inputs)
        if difference := _difference(again, expected):
            result = Result(name, "not built", detail=f"its logits are random: {difference}")
        else:
            result = check(name, model, inputs, expected)
    except Exception as error:
        result = Result(name, "not built", detail=line(error))
    return [replace(result, seconds=time.perf_counter() - start)]


def _optimize(name: str, model: Any, inputs: list[Tensor], expected: list[Tensor]) -> Result:
    try:
        report = opweave.optimize(model)
        found = _logits(model, inputs)
        opweave.restore(model)
        restored = _logits(model, inputs)
    except Exception as error:
        return Result(name, "failed", detail=line(error))
    if difference := _difference(found, expected):
        return Result(name, "different", detail=difference)
    if not all(map(torch.equal, restored, expected)):
        return Result(name, "different", detail="after restore")
    return Result(name, "equal", detail=f"{len(report.replaced)} modules replaced")


def _compile(
    name: str, model: Any, inputs: list[Tensor], expected: list[Tensor], codegen: bool
) -> Result:
    found = _compiled(model, inputs, backend="opweave", options={"codegen": codegen})
    difference = found if isinstance(found, str) else _difference(found, expected)
    if not difference:
        return Result(name, "equal")
    plain = _compiled(model, inputs, backend="inductor" if codegen else "aot_eager")
    if isinstance(plain, str):
        return Result(name, "not built", detail=f"torch.compile: {plain}")
    if isinstance(found, list) and not _difference(found, plain):
        return Result(name, "equal", detail=f"to torch.compile; eager: {difference}")
    return Result(name, "failed" if isinstance(found, str) else "different", detail=difference)


def _compiled(model: Any, inputs: list[Tensor], **how: Any) -> list[Tensor] | str:
    """Return the logits of the compiled *model*, or the error."""
    torch.compiler.reset()
    try:
        return _logits(torch.compile(model, **how), inputs)
    except Exception as error:
        return line(error)


def _logits(model: Any, inputs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [model(input_ids=ids, use_cache=False).logits for ids in inputs]


def _difference(found: list[Tensor], expected: list[Tensor]) -> str:
    for one, other in zip(found, expected, strict=True):
        off = ((one - other).abs().max() / other.abs().max()).item()
        if not off <= TOLERANCE:
            return f"{tuple(one.shape[:2])} tokens: logits differ by {off:.2g} of the largest"
    return ""
