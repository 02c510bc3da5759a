"""Batch invariance and row-wise ops: rows must not depend on the rest of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from opweave.conformance import inputs
from opweave.conformance.case import Outputs, outputs_of
from opweave.conformance.check import Check, Finding, Findings, raised
from opweave.conformance.compare import bits_problem, near_problem, tolerance_of
from opweave.conformance.memory import copied
from opweave.conformance.subject import Subject
from opweave.conformance.tokens import Packed, Tokens, tokens_of
from opweave.ir import require
from opweave.ir.traits import BATCH_INVARIANT, ROWWISE

_SAMPLES = (1, 2, 3, 5, 16)
_LARGE = (257, 1031)  # tokens, for which a kernel may choose another way to add up


def _claims_invariance(subject: Subject) -> bool:
    return subject.has(BATCH_INVARIANT)


def _claims_rows(subject: Subject) -> bool:
    return subject.has(ROWWISE)


def _batches(subject: Subject) -> Iterator[Tokens | Packed]:
    """Yield batches of each dtype, large ones, and of rows with tails, that are accepted."""
    known = inputs.options_of(subject)
    sizes: list[dict[str, Any]] = [{}, *({"count": n} for n in _LARGE)]
    sizes += [{"hidden_size": n} for n in (7, 1031) if "hidden_size" in known]
    dtypes = [{"dtype": d} for d in inputs.DTYPES] if "dtype" in known else [{}]
    for options in ({**dtype, **size} for dtype in dtypes for size in sizes):
        tokens = tokens_of(subject, **options)
        if tokens is not None and subject.accepts(tokens.case.values):
            yield tokens


def _invariant(subject: Subject) -> Findings:
    if _is_exact(subject):
        yield None  # then equal values are equal bits
        return
    found = False
    for tokens in _batches(subject):
        found = True
        try:
            with require(BATCH_INVARIANT):  # what a composite calls must be, too
                yield from _in_other_batches(subject, tokens)
        except Exception as error:
            yield f"{raised(error)}: {tokens.case}"
    if not found and inputs.accepts_any(subject):
        yield (
            f"claims {BATCH_INVARIANT}, and no batch shows it: its input generator needs "
            "num_tokens, or the op an entry in opweave.conformance.tokens"
        )


def _in_other_batches(subject: Subject, tokens: Tokens | Packed) -> Findings:
    whole = outputs_of(subject.run(copied(tokens.case.values)))
    for which in _choices(tokens.count):
        part = tokens.of_some(outputs_of(subject.run(tokens.some(which))), which)
        problem = bits_problem(tokens.of(whole, which), part)
        if problem:
            problem = problem.replace("native has", "the whole batch had")
            yield f"rows {which[:4]} alone: {problem}: {tokens.case}"
        else:
            yield None


def _choices(count: int) -> Iterator[list[int]]:
    for i in range(0, count, max(5, count // 8)):
        yield [i]
    for size in _SAMPLES:
        yield torch.randperm(count)[:size].tolist()


def _is_exact(subject: Subject) -> bool:
    """Whether every output must equal native's: integers, or a tolerance of zero."""
    usual = (case for case in inputs.usual(subject) if case.refusal is None)
    cases = [case for case in usual if subject.accepts(case.values)]
    return bool(cases) and all(
        sum(tolerance_of(case, out)) == 0 for case in cases for out in case.native
    )


def _by_rows(subject: Subject) -> Findings:
    for tokens in _batches(subject):
        if isinstance(tokens, Tokens):
            try:
                yield _row_problem(subject, tokens)
            except Exception as error:
                yield f"{raised(error)}: {tokens.case}"


def _row_problem(subject: Subject, tokens: Tokens) -> Finding:
    row, op = [tokens.count // 2], subject.op
    whole = outputs_of(subject.run(copied(tokens.case.values)))
    expected = tokens.of(whole, row)
    if len(expected) < len(whole):
        return f"an output has no row for each token: {tokens.case}"
    values = [
        _only(v, row[0]) if i in op.activation_indices else v
        for i, v in enumerate(copied(tokens.case.values))
    ]
    among_others = tokens.of(outputs_of(subject.run(tuple(values))), row)
    alone = outputs_of(subject.run(tokens.some(row)))
    for found in (among_others, alone):
        problem = _near(tokens, expected, found)
        if problem:
            return f"row {row[0]} depends on others: {problem}: {tokens.case}"
    return None


def _only(t: Tensor, row: int) -> Tensor:
    """Return *t* with NaN in every other row."""
    changed = torch.full_like(t, float("nan"))
    changed[row] = t[row]
    return changed


def _near(tokens: Tokens, expected: Outputs, found: Outputs) -> Finding:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        problem = near_problem(a, b, tolerance_of(tokens.case, b))
        if problem:
            return f"output {i}: {problem.replace('native has', 'the whole had')}"
    return None


INVARIANCE = Check(
    "batch_invariance",
    "with the trait batch_invariant: a row has the same bits in any batch",
    _invariant,
    _claims_invariance,
)
ROWS = Check(
    "rowwise",
    "with the trait rowwise: an output row depends only on that row of the activations",
    _by_rows,
    _claims_rows,
)
