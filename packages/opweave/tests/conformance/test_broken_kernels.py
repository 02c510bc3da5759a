"""Each kernel of two tables of wrong ones is rejected."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from opweave import ir
from opweave.conformance import CHECKS, Result, Subject, verify
from opweave.conformance.checks import COMPILING, QUICK
from opweave.conformance.kernel_process import Verifier, VerifyTask
from opweave.ir.testing import restored

SLOW = tuple(name for name in CHECKS if name not in (*QUICK, *COMPILING))

# A kernel of each kind that only one check finds, and the check.
CAUGHT_BY = {
    "clamps_ids": "misfits",
    "forgets_inputs_before_short_sequences": "combinations",
    "has_a_predicate_that_walks": "predicate",
    "has_no_gradient_for_batches": "gradients",
    "has_one_gradient_for_both": "gradients",
    "keeps_a_weight_by_its_first_number": "staleness",
    "keeps_large_results": "leaks",
    "knows_no_scalars": "dimensions",
    "knows_three_dimensions": "dimensions",
    "leaves_files_open": "leaks",
    "loses_a_bias_of_float64": "dtypes",
    "loses_rows_with_many_threads": "threads",
    "overwrites_three_dimensions": "donation",
    "replicates_circular_padding": "options",
    "returns_x_where_the_residual_is_zero": "extremes",
    "rounds_ties_away_from_zero": "values",
    "saturates_pairs_of_products": "extremes",
    "sees_one_key_less": "options",
    "stops_at_an_empty_sequence": "values",
    "stops_the_garbage_collector": "global_state",
    "takes_a_start_of_zero_for_nothing": "options",
}


@pytest.fixture(scope="module")
def ops_of_kernels() -> Iterator[dict[str, ir.IrOp]]:
    """The op of each wrong kernel, all of which are registered as long as the fixture lives."""
    with ExitStack() as stack:
        for op in ir.current_registry().ops.values():
            stack.enter_context(restored(op))
        kernels = importlib.import_module("conformance.wrong_kernels").KERNELS
        yield {provider: getattr(ir.ops, op) for op, provider in kernels}


@pytest.mark.parametrize("provider", CAUGHT_BY)
def test_a_wrong_kernel_is_rejected(ops_of_kernels: dict[str, ir.IrOp], provider: str) -> None:
    result = verify(Subject(ops_of_kernels[provider], provider), [CAUGHT_BY[provider]])
    assert result.status == "failed", result


@pytest.mark.slow
@pytest.mark.parametrize(("module", "count"), [("broken_kernels", 46), ("wrong_kernels", 58)])
def test_every_kernel_is_rejected(monkeypatch: pytest.MonkeyPatch, module: str, count: int) -> None:
    """Each runs in a process, with every check until one of them finds it."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with Verifier(VerifyTask((module,), (), 0), timeout=60.0) as verifier:
        subjects = verifier.subjects()
    missed = [s for s in subjects if s.origin and s.origin["registered"].startswith(f"{module}:")]
    assert len(missed) >= count
    for checks in (QUICK, SLOW, COMPILING):
        with Verifier(VerifyTask((module,), checks, 0), timeout=60.0) as verifier:
            results = list[Result](map(verifier.verify, missed))
        missed = [result.subject for result in results if result.status != "failed"]
    assert not missed, list(map(str, missed))
