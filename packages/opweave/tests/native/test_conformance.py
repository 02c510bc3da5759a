"""Every C++ implementation against the definition of its op, on every instruction set.

The kit compares values, strides, dtypes and omitted tensors with native, and rows alone with rows
of a batch. The other files of this folder hold what the kit cannot express: bits, instruction sets,
sizes at which a kernel changes its way, memory that it must not touch, and error messages.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave.conformance import CHECKS, Subject, draw, inputs, subjects, verify
from opweave.conformance.checks import COMPILING
from opweave.ir import IrOp

from .conftest import ISAS
from .oracle import FP8, as_tuple, same_bits, using_threads

ALL = subjects(providers=["opweave_c", "opweave_c_int8"])
OF_KERNELS = ["values", "options", "none", "layouts", "dtypes", "precision", "extremes"]
OF_CALLS = [
    *("empty", "dimensions", "combinations", "mutation", "donation", "aliases", "determinism"),
    *("inference_mode", "threads", "batch_invariance", "rowwise", "keywords", "predicate"),
    *("misfits", "gradients", "rounding"),
]
COMPILED = [
    subject
    for subject in ALL
    if subject.op.name
    in (
        *("dynamic_per_token_quant_fp8", "fused_add_rms_norm_dynamic_per_token_quant_int8"),
        *("linear", "linear_w8a16", "linear_w4a16", "linear_q", "qk_norm_rope"),
        *("rope_reshape_and_cache", "paged_attention", "attention_quant"),
    )
]
each_subject = pytest.mark.parametrize("subject", ALL, ids=str)


@pytest.fixture(autouse=True)
def _few_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw few sizes: slow tests and ``make verify`` draw more."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(inputs, "_SWEEP_SECONDS", 0.02)
        monkeypatch.setattr(inputs, "_SLOW_SECONDS", 0.01)
        monkeypatch.setattr(inputs, "_WIDTHS", (1, 3, 17, 64, 129, 1000))
        monkeypatch.setattr(draw, "_SECONDS", 1.0)
        monkeypatch.setattr(draw, "_LARGEST", 2000)


@each_subject
def test_kernel(isa: str, subject: Subject) -> None:
    is_best = isa == ISAS[0]
    result = verify(subject, OF_KERNELS if is_best else ["values", "layouts", "extremes"])
    result.raise_if_failed()
    assert result.status == "passed"


@each_subject
def test_calls(module: ModuleType, subject: Subject) -> None:
    verify(subject, OF_CALLS).raise_if_failed()


@pytest.mark.parametrize("subject", COMPILED, ids=str)
def test_compiled_calls(module: ModuleType, subject: Subject) -> None:
    verify(subject, ["compiled", "dynamic_shapes"]).raise_if_failed()


@pytest.mark.slow
@each_subject
def test_every_check(isa: str, subject: Subject) -> None:
    checks = [name for name in CHECKS if name not in COMPILING]
    verify(subject, checks).raise_if_failed()
    for seed in range(1, 100):
        verify(subject, ["combinations", "extremes"], seed=seed).raise_if_failed()


# Roundings and rows, which the tolerances of the kit would hide.


# Sums of products are rounded to bfloat16, or weights are; queries and keys are rotated in float32.
OTHER_ROUNDINGS = ("linear_w4a16", "linear_q", "rotary_embedding", "paged_attention")
BLOCKS = {"linear_q": 1280, "linear_w4a16": 1280}  # multiples of these are accepted as widths


def generated(op: IrOp, dtype: torch.dtype, tokens: int, width: int) -> tuple[Any, ...]:
    torch.manual_seed(7)
    sizes = {"num_tokens": tokens, "hidden_size": BLOCKS.get(op.name, width), "dtype": dtype}
    known = inputs.options_of(Subject(op, "native"))
    return op.generate_inputs(**{name: size for name, size in sizes.items() if name in known})


def copies(values: tuple[Any, ...]) -> list[Any]:
    return [v.clone() if isinstance(v, Tensor) else v for v in values]


@each_subject
def test_rounds_where_the_definition_rounds(isa: str, subject: Subject) -> None:
    """Leaving out a rounding to 16 bits changes about a fifth of the results by one unit."""
    op = subject.op
    if op.name in OTHER_ROUNDINGS:
        pytest.skip(f"{op.name} rounds otherwise")
    for dtype in (torch.bfloat16, torch.float16):
        values = generated(op, dtype, 67, 2998)
        found = as_tuple(subject.impl.impl_fn(*copies(values)))
        for mine, theirs in zip(found, as_tuple(op.native(*values)), strict=True):
            share = (mine.float() == theirs.float()).double().mean()
            assert share > (0.95 if mine.dtype == FP8 else 0.99)


ROWWISE = [
    subject
    for subject in ALL
    if "batch_invariant" in subject.impl.traits and "hidden_size" in inputs.options_of(subject)
]


@pytest.mark.parametrize(
    "tokens_and_width", [(1101, 2050), pytest.param((301, 4098), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("subject", ROWWISE, ids=str)
def test_a_row_has_the_same_bits_in_a_large_batch(
    isa: str, subject: Subject, tokens_and_width: tuple[int, int]
) -> None:
    """So large that threads share it, weights are widened once, and results are looked up."""
    tokens, width = tokens_and_width
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = generated(subject.op, dtype, tokens, width)
        with using_threads(2):
            whole = as_tuple(subject.impl.impl_fn(*copies(values)))
        for row in (0, tokens // 2, tokens - 1):
            rows = slice(row, row + 1)
            alone = [
                v[rows].clone() if isinstance(v, Tensor) and v.shape[:1] == (tokens,) else v
                for v in values
            ]
            for one, all_rows in zip(as_tuple(subject.impl.impl_fn(*alone)), whole, strict=True):
                assert same_bits(one, all_rows[rows])
