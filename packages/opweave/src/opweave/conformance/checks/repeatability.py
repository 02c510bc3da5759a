"""Repeatability: the same bits for the same call, in any thread, batch, mode and process."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import combinations, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from opweave.conformance import inputs
from opweave.conformance.checks.memory import takes
from opweave.conformance.checks.values import is_right
from opweave.conformance.compare import bits_problem, near_problem, outputs_problem, tolerance_of
from opweave.conformance.inputs import Packed, Tokens, tokens_of
from opweave.conformance.snapshot import copied, overlap
from opweave.conformance.subject import (
    Case,
    Check,
    Finding,
    Findings,
    Outputs,
    Subject,
    accepted,
    claims,
    each,
    not_native,
    outputs_of,
    raised,
)
from opweave.ir.rules import BATCH_INVARIANT, ROWWISE

# Determinism: the same call gives the same bits, regardless of stale output memory.
#
# A later call must not write into the results of an earlier one.


_REPEATS = 4
_SMALL_REPEATS = 20  # for small results, whose memory the allocator reuses in turn
_MAX_SMALL_ELEMENTS = 4096


_of_several_sizes = inputs.chained(inputs.usual, inputs.few_and_many)


def _repeats(subject: Subject, case: Case) -> Finding:
    is_small = sum(t.numel() for t in case.native) <= _MAX_SMALL_ELEMENTS
    count = _SMALL_REPEATS if is_small else _REPEATS
    # All are kept: otherwise the memory of a result is reused, which is correct.
    results = list(map(outputs_of, subject.ask("repeat", case.values, count, keep=True)))
    for result in results[1:]:
        problem = bits_problem(results[0], result)
        if problem:
            return f"a second call differs: {problem}".replace("native has", "the first had")
    if _share_memory(results):
        return "a later call writes over the result of an earlier one; return new memory each time"
    filled = outputs_of(subject.ask("filled", copied(case.values)))
    problem = bits_problem(results[0], filled)
    return f"not all of the result is written: {problem}" if problem else None


def _share_memory(results: list[Outputs]) -> bool:
    """Whether the results of two calls, which had different copies of the arguments, overlap."""
    pairs = combinations(results, 2)
    return any(overlap(a, b) for one, other in pairs for a in one for b in other)


DETERMINISM = Check(
    "determinism",
    "repeated calls give the same bits, write every element, and keep earlier results",
    each(_of_several_sizes, _repeats),
)


# Repetition: a call has the same result after thousands of other calls, and some time later.
#
# It runs last, so that all other checks run between the first call and this one.


_REPETITION_SECONDS = 0.5  # for each case
_MIN_CALLS, _MAX_CALLS = 3, 256  # between two comparisons
_MAX_REPEATED_CASES = 2


def _accepted(subject: Subject, cases: Iterable[Case]) -> Iterator[Case]:
    return (c for c in cases if c.refusal is None and subject.accepts(c.values))


def _stays(subject: Subject, case: Case) -> Finding:
    # Here an argument that is written and restored ends the process, after all other checks.
    problem = is_right(subject, case, read_only=True)
    if problem:
        return problem
    first = outputs_of(subject.run(copied(case.values)))
    start, calls, count = time.perf_counter(), 1, _MIN_CALLS
    while calls == 1 or time.perf_counter() - start < _REPETITION_SECONDS:
        [last] = subject.ask("repeat", case.values, count, keep=False)
        calls, count = calls + count, min(2 * count, _MAX_CALLS)
        problem = bits_problem(first, outputs_of(last))
        if problem:
            problem = problem.replace("native has", "the first had")
            passed = time.perf_counter() - start
            return f"call {calls}, {passed:.2f} s after the first, differs: {problem}"
    return None


REPETITION = Check(
    "repetition",
    "a call gives the same bits after thousands of other calls, and some time later",
    each(lambda s: islice(_accepted(s, _of_several_sizes(s)), _MAX_REPEATED_CASES), _stays),
    not_native,
)


# Leaks: the memory, files and threads of the process do not grow with the number of calls.


_LEAK_SECONDS, _MAX_LEAK_CALLS = 0.15, 2000  # of a round
_LEAK_ROUNDS = 4
_MIN_LEAK = 512 * 1024  # bytes in a round; less may be the allocator's own


def _trim_heap() -> None:
    """Return free memory to the system: what a kernel keeps could fill it unseen."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _leaks(subject: Subject, case: Case) -> Finding:
    subject.ask("repeat", case.values, _MIN_CALLS, keep=False)  # the first one takes longer
    start = time.perf_counter()
    subject.ask("repeat", case.values, _MIN_CALLS, keep=False)
    seconds = (time.perf_counter() - start) / _MIN_CALLS
    count = int(min(_MAX_LEAK_CALLS, max(_MIN_CALLS, _LEAK_SECONDS / seconds)))
    _trim_heap()
    sizes = []
    for _ in range(_LEAK_ROUNDS):
        subject.ask("repeat", case.values, count, keep=False)
        sizes.append(subject.resources)
    grown = [[b - a for a, b in pairwise(each)] for each in zip(*sizes[1:], strict=True)]
    memory, files, threads = map(min, grown)  # the first calls fill caches
    if max(files, threads) >= count:
        return f"{count} calls leave {files} files open and {threads} threads running"
    return f"each call keeps {memory // count} bytes of memory" if memory > _MIN_LEAK else None


def _leak_cases(subject: Subject) -> Iterator[Case]:
    yield from islice(_accepted(subject, inputs.usual(subject)), 1)
    yield from islice(_accepted(subject, inputs.of_tokens(subject, _LARGE_COUNTS[0])), 1)


LEAKS = Check(
    "leaks", "repeated calls do not use more and more memory, files or threads",
    each(_leak_cases, _leaks), lambda subject: not subject.is_native and subject.resources[0] > 0,
)  # fmt: skip


# Threads: calls at the same time, and with another number of threads inside a call.


_CALLS_PER_THREAD = 16
_INTRA_OP_THREADS = (1, 3, 7)


def _threads_findings(subject: Subject) -> Findings:
    generate = inputs.chained(partial(inputs.of_tokens, count=33, dtypes=1), inputs.few_and_many)
    # Each of them ends where its cases take long, so one may have more than the other.
    for case, other in zip(generate(subject), generate(subject), strict=False):
        yield from accepted(subject, case, partial(_at_once, other=other))
        yield from accepted(subject, case, _with_other_numbers)


def _at_once(subject: Subject, case: Case, other: Case) -> Finding:
    """Call with two sets of arguments at the same time; with equal ones, mixed-up memory hides."""
    both = (case, other)
    batches = subject.ask("at_once", [c.values for c in both], _CALLS_PER_THREAD)
    pairs = [(c, result) for c, all_of_c in zip(both, batches, strict=True) for result in all_of_c]
    problems = (outputs_problem(c, result) for c, result in pairs)
    problem = next(filter(None, problems), None)
    return f"with another call at the same time: {problem}" if problem else None


def _with_other_numbers(subject: Subject, case: Case) -> Finding:
    for count in _INTRA_OP_THREADS:
        problem = is_right(subject, case, threads=count)
        if problem:
            return f"with {count} threads: {problem}"
    return None


THREADS = Check(
    "threads",
    "two concurrent calls, and any number of intra-op threads, give the results of native",
    _threads_findings,
    applies=lambda subject: os.environ.get("TRITON_INTERPRET") != "1",  # which has one thread
)


# Batch invariance and row-wise ops: rows must not depend on the rest of the batch.


_SAMPLE_SIZES = (1, 2, 3, 5, 16)
_LARGE_COUNTS = (257, 1031)  # tokens; a kernel may choose another order of additions for them


def _batches(subject: Subject) -> Iterator[Tokens | Packed]:
    """Yield batches of each dtype, large ones, and of rows with tails, that are accepted."""
    known = inputs.options_of(subject)
    sizes: list[dict[str, Any]] = [{}, *({"count": n} for n in _LARGE_COUNTS)]
    sizes += [{"hidden_size": n} for n in (7, 1031) if "hidden_size" in known]
    dtypes = [{"dtype": d} for d in inputs.DTYPES] if "dtype" in known else [{}]
    for options in ({**dtype, **size} for dtype in dtypes for size in sizes):
        tokens = tokens_of(subject, **options)
        if tokens is not None and subject.accepts(tokens.case.values):
            yield tokens


def _invariant(subject: Subject) -> Findings:
    if _is_exact(subject):
        yield None  # the check of the values compares the bits
        return
    has_batches = False
    for tokens in _batches(subject):
        has_batches = True
        try:
            yield from _in_other_batches(subject, tokens)
        except Exception as error:
            yield f"{raised(error)}: {tokens.case}"
    if not has_batches and inputs.accepts_any(subject):
        yield (
            f"claims {BATCH_INVARIANT}, and no batch shows it: its input generator needs "
            "num_tokens, or the op an entry in opweave.conformance.inputs"
        )


def _in_other_batches(subject: Subject, tokens: Tokens | Packed) -> Findings:
    run = partial(subject.run, requires=(BATCH_INVARIANT,))  # also of the ops that it calls
    whole = outputs_of(run(copied(tokens.case.values)))
    for which in _choices(tokens.count):
        part = tokens.of_some(outputs_of(run(tokens.some(which))), which)
        problem = bits_problem(tokens.of(whole, which), part)
        if problem:
            problem = problem.replace("native has", "the whole batch had")
            yield f"rows {which[:4]} alone: {problem}: {tokens.case}"
        else:
            yield None


def _choices(count: int) -> Iterator[list[int]]:
    for i in range(0, count, max(5, count // 8)):
        yield [i]
    for size in _SAMPLE_SIZES:
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
    "batch_invariance", "with the trait batch_invariant: a row has the same bits in any batch",
    _invariant, claims(BATCH_INVARIANT),
)  # fmt: skip
ROWS = Check(
    "rowwise", "with the trait rowwise: an output row depends only on that row of the activations",
    _by_rows, claims(ROWWISE),
)  # fmt: skip


# Inference mode, in which models run: tensors do not have version counters.


def _in_inference_mode(subject: Subject, case: Case) -> Finding:
    problem = is_right(subject, case, inference=True)
    if problem or not subject.op.allow_inplace:
        return problem
    return takes(subject, case, inference=True)


INFERENCE_MODE = Check(
    "inference_mode", "results are the same under torch.inference_mode, with inference tensors",
    each(inputs.usual, _in_inference_mode),
)  # fmt: skip


# Global state: a call does not change the global state of the process.


def _leaves_alone(subject: Subject, case: Case) -> Finding:
    changed = subject.ask("changes", copied(case.values))
    return f"changed {' and '.join(changed)}" if changed else None


GLOBAL_STATE = Check(
    "global_state",
    "torch settings, random state, the environment and the working directory do not change",
    each(_of_several_sizes, _leaves_alone),
)
