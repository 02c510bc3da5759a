"""Registers, spills and shared memory of compiled kernels; needs no GPU (``make test-triton-aot``).

After a change that is meant, ``python tests/runs/triton_aot.py --update`` writes the new record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import opweave.kernels.triton
from opweave import ir
from opweave.ir.ops.low_bit import GGUF_BLOCKS
from opweave.kernels.triton.launch import INTERPRETED

from .compiled import GPUS, Usage, launches, launches_of, problems, read_record, usage

KERNELS = Path(opweave.kernels.triton.__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1: kernels are not compiled")
@pytest.mark.parametrize("gpu", GPUS)
def test_kernels_take_no_more_than_recorded(gpu: str) -> None:
    record, found = read_record(), []
    for call in launches(GPUS[gpu]):
        found += problems(call.name, gpu, usage(call, GPUS[gpu]), record)
    assert not found, "\n".join(found)


def low_bit_calls() -> Iterator[tuple[ir.IrOp, tuple[Any, ...]]]:
    """Yield calls of every tile with groups, blocks and formats that the record does not have."""
    w4, q, w8 = ir.ops.linear_w4a16, ir.ops.linear_q, ir.ops.linear_w8a8
    for tokens in (1, 20, 200):
        options: dict[str, Any] = {"num_tokens": tokens, "dtype": torch.float16}
        for hidden, group in ((192, 96), (64, 2), (512, 128), (1000, 1000)):
            yield w4, w4.generate_inputs(hidden_size=hidden, group_size=group, **options)
        for format in GGUF_BLOCKS:
            yield q, q.generate_inputs(format=format, **options)
        for dtype in (torch.int8, torch.float8_e4m3fn):
            yield w8, w8.generate_inputs(weight_dtype=dtype, **options)
            x, weight = torch.zeros(tokens, 96).to(dtype), torch.zeros(64, 96).to(dtype)
            yield w8, (x, torch.ones(tokens, 3), weight, torch.ones(2, 1), None, torch.float16)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1: kernels are not compiled")
@pytest.mark.parametrize("gpu", GPUS)
def test_low_bit_weights_of_every_form_compile(gpu: str) -> None:
    ir.current_registry().ensure_ready()
    for op, values in low_bit_calls():
        for call in launches_of(GPUS[gpu], op, values, op.name):
            used = usage(call, GPUS[gpu])
            assert used.shared <= GPUS[gpu].shared_memory, (call.name, call.constants)


def test_the_record_has_all_kernels_on_all_gpus() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in KERNELS.glob("*.py"))
    launched = set(re.findall(r"_kernels\.(\w+)", source))
    recorded: dict[str, set[str]] = {}
    for name, row in read_record().items():
        recorded.setdefault(name.rpartition(": ")[2], set()).update(row)
    assert set(recorded) == launched
    assert len(launched) == 15
    float8 = {"group_quant"}  # no int8 form, and not all GPUs have float8
    for kernel, gpus in recorded.items():
        assert gpus == ({"sm_90", "sm_100"} if kernel in float8 else set(GPUS)), kernel


def test_what_is_a_problem() -> None:
    record = {"a": {"sm_90": Usage(100, 8, 1024)}}
    for fine in (Usage(100, 8, 1024), Usage(114, 0, 232_448), Usage(10, 8, 0)):
        assert not problems("a", "sm_90", fine, record)
    assert problems("a", "sm_90", Usage(115, 8, 0), record) == [
        "a for sm_90: 115 registers instead of 100"
    ]
    assert problems("a", "sm_90", Usage(90, 9, 0), record) == ["a for sm_90: 9 spills instead of 8"]
    assert problems("a", "sm_90", Usage(90, 0, 232_449), record) == [
        "a for sm_90: 232449 bytes of shared memory of 232448"
    ]
    for name, gpu in (("b", "sm_90"), ("a", "sm_80")):
        assert problems(name, gpu, Usage(1, 0, 0), record) == [
            f"{name} for {gpu}: not in compiled.json"
        ]
