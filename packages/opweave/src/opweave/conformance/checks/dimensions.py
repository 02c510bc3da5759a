"""Dimensions: zero, one or two token dimensions, if native supports them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from opweave.conformance import inputs
from opweave.conformance.case import Case
from opweave.conformance.check import Check, Finding, each
from opweave.conformance.checks.metadata import as_told
from opweave.conformance.checks.values import is_right
from opweave.conformance.subject import Subject
from opweave.conformance.tokens import Tokens, tokens_of

_FORMS: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "rows in two dimensions": (6, (2, 3)),
    "a batch of one": (3, (1, 3)),
    "no rows in two dimensions": (0, (2, 0)),
    "a row without its dimension": (1, ()),
}
"""How many tokens to ask for, and what to make of the dimension that counts them."""


def _cases(subject: Subject) -> Iterator[Case]:
    tokens = tokens_of(subject)
    if not isinstance(tokens, Tokens) or not tokens.are_rows:
        return
    for name, (count, sizes) in _FORMS.items():
        for case in inputs.of_tokens(subject, count):
            pairs = zip(case.values, tokens.inputs, strict=True)
            yield case.with_values(
                name, [v if a is None else _formed(v, a, sizes) for v, a in pairs]
            )


def _formed(t: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
    return t.reshape((*t.shape[:axis], *sizes, *t.shape[axis + 1 :]))


def _as_native(subject: Subject, case: Case) -> Finding:
    return is_right(subject, case) or as_told(subject, case)


CHECK = Check(
    "dimensions",
    "activations without or with two token dimensions work, if native supports them",
    each(_cases, _as_native),
)
