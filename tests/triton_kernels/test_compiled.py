"""Registers, spills and shared memory of compiled kernels; needs no GPU (``make test-triton-aot``).

After a change that is meant, ``python tests/runs/triton_aot.py --update`` writes the new record.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import opweave.kernels.triton
from opweave.kernels.triton.registration import INTERPRETED

from .compiled import GPUS, Usage, launches, problems, read_record, usage

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
