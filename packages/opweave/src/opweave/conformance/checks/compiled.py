"""Compiled calls: one graph for any number of tokens, and torch's opcheck."""

from __future__ import annotations

from functools import partial

from opweave.conformance import inputs
from opweave.conformance.compare import outputs_problem
from opweave.conformance.inputs import Tokens, tokens_of
from opweave.conformance.snapshot import copied
from opweave.conformance.subject import Case, Check, Finding, Findings, Subject, each

# opcheck: ``torch.library.opcheck`` with this implementation.


def _compilable(subject: Subject, count: int = 1) -> list[Case]:
    """Return those of the first *count* usual cases that the predicate accepts in a graph."""
    return [c for c in list(inputs.usual(subject))[:count] if subject.compiles(c.values)]


def _in_layouts(subject: Subject) -> list[Case]:
    """Return a usual case, and one with transposed tensors, that are accepted in a graph."""
    cases = [c for c in inputs.laid_out(subject, 1) if c.label.endswith(" transposed")][:1]
    return [*_compilable(subject), *(c for c in cases if subject.compiles(c.values))]


def _passes(subject: Subject, case: Case) -> Finding:
    failed = subject.ask("opcheck", copied(case.values))
    return " ".join(" ".join(failed).split())[:300] if failed else None


OPCHECK = Check(
    "opcheck", "torch.library.opcheck passes", each(partial(_compilable, count=2), _passes)
)


# Compiled calls: the eager result, in one graph for any number of tokens.


_TOKEN_COUNTS = (5, 8, 13, 64, 257)
_MAX_GRAPHS = 2  # one for few tokens and one for many


def _as_eager(subject: Subject, case: Case) -> Finding:
    for donating in (False, True)[: 1 + subject.op.allow_inplace]:
        result = subject.ask("compiled", copied(case.values), donating=donating)
        problem = outputs_problem(case, result)
        if problem:
            return f"compiled{', donating' if donating else ''}: {problem}"
    return None


def _of_any_size(subject: Subject) -> Findings:
    tokens = tokens_of(subject)
    if not isinstance(tokens, Tokens) or not subject.compiles(tokens.case.values):
        return
    generated = (inputs.generated(subject, num_tokens=count) for count in _TOKEN_COUNTS)
    cases = [case for case in generated if case is not None and case.refusal is None]
    cases = [case for case in cases if subject.accepts(case.values)]
    batches = [copied(case.values) for case in cases]
    if not batches:
        return
    results, graphs = subject.ask("compiled_once", batches, tokens.inputs)
    for case, result in zip(cases, results, strict=True):
        problem = outputs_problem(case, result)
        yield f"{problem}: {case}" if problem else None
    if graphs > _MAX_GRAPHS:
        yield f"{graphs} graphs for {len(cases)} numbers of tokens: it recompiles"


COMPILED = Check("compiled", "a compiled call gives the eager result", each(_in_layouts, _as_eager))
DYNAMIC = Check("dynamic_shapes", "one graph works for any number of tokens", _of_any_size)
