"""Every Triton kernel against native, by the checks that take seconds in the interpreter.

All checks run on a GPU: ``packages/opweave/tests/conformance/test_verify.py``."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from opweave import ir
from opweave.conformance import Subject, inputs, subjects
from opweave.kernels.triton.launch import INTERPRETED
from support.adapter_certificates import verify_adapter

ALL = subjects(providers=["triton"])
CHECKS = ["values", "options", "none", "layouts", "dtypes", "empty", "dimensions", "extremes"]


def test_there_are_kernels() -> None:
    assert len(ALL) == 27


@pytest.fixture
def _small_weights(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out large square weights, for which the interpreter takes minutes."""
    if INTERPRETED and subject.op.name.startswith("linear"):
        monkeypatch.setattr(inputs, "_WIDTHS", [size for size in inputs._WIDTHS if size < 300])
        monkeypatch.setattr(
            inputs, "_SWEPT_SIZES", [size for size in inputs._SWEPT_SIZES if size < 300]
        )


@pytest.mark.adapter
@pytest.mark.usefixtures("_small_weights")
@pytest.mark.parametrize("subject", ALL, ids=str)
def test_it_computes_what_native_computes(subject: Subject, device: str) -> None:
    verify_adapter(replace(subject, device=device), CHECKS)


# Rows that are wide, far apart or empty; numbers that are out of range; devices.


@pytest.mark.parametrize("width", [1, 1000, 20_000])
def test_rows_of_any_width_and_distance(device: str, width: int) -> None:
    x = torch.randn(3, 2 * width + 7, device=device)
    for rows in (x[:, :width], x[:, 5 : 5 + width], x[::2, :width]):
        weight = torch.randn(width, device=device)
        found = ir.ops.rms_norm.using("triton!")(rows, weight, 1e-6)
        torch.testing.assert_close(found, ir.ops.rms_norm.native(rows, weight, 1e-6))
    halves = x[:, : 2 * width]
    found = ir.ops.silu_and_mul.using("triton!")(halves)
    torch.testing.assert_close(found, ir.ops.silu_and_mul.native(halves))


def test_wider_rows_than_registers_hold_are_refused(device: str) -> None:
    x = torch.zeros(1, 65537, device=device)
    reason = ir.ops.rms_norm.impls["triton"].rejection(ir.ops.rms_norm.bind(x, None, 1e-6))
    assert reason == "x: rows of 65537 elements (supports up to 65536)"


def test_a_position_that_is_not_in_the_table_gives_nan(device: str) -> None:
    x = torch.randn(2, 16, device=device)
    positions = torch.tensor([9, 1], device=device)
    table = torch.randn(9, 16, device=device)
    query, _ = ir.ops.rotary_embedding.using("triton!")(x, x.clone(), positions, table, 16)
    assert query[0].isnan().all()
    assert not query[1].isnan().any()


def test_slots_that_are_not_in_the_cache_are_skipped(device: str) -> None:
    key, value = torch.randn(2, 4, 2, 8, device=device)
    caches = torch.zeros(2, 3, 2, 16, 8, device=device)
    slots = torch.tensor([-1, 47, 48, -2], device=device)
    write = ir.ops.reshape_and_cache.using("triton!").maybe_inplace
    with torch.no_grad():
        keys, values = write(key, value, caches[0], caches[1], slots)
    assert keys.data_ptr() == caches[0].data_ptr()
    torch.testing.assert_close(keys[2, :, 15], key[1])
    torch.testing.assert_close(values[2, :, 15], value[1])
    assert int(caches.count_nonzero()) == 2 * 16


def test_a_sequence_that_cannot_advance_has_no_slot(device: str) -> None:
    lengths = torch.tensor([15, 16, 32, -1], dtype=torch.int32, device=device)
    tables = torch.arange(8, dtype=torch.int32, device=device).view(4, 2)
    zeros = torch.zeros(4, dtype=torch.int64, device=device)
    sampled = torch.tensor([5, 6, 7, 8], device=device)
    tokens, positions, _, slots = ir.ops.advance_step_flashattn.using("triton!")(
        zeros, sampled, zeros, lengths, zeros, tables, 16
    )
    assert tokens.tolist() == [5, 6, 7, 8]
    assert positions.tolist() == [15, 16, 32, -1]
    assert slots.tolist() == [15, 3 * 16, -1, -1]


def test_compiled_calls_have_one_node_for_a_kernel(device: str) -> None:
    import opweave.compile

    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, _ = ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, weight, 1e-6)
        out: torch.Tensor = ir.ops.silu_and_mul(y)
        return out

    arguments = [torch.randn(4, 64, device=device), torch.randn(4, 64, device=device)]
    arguments.append(torch.randn(64, device=device))
    with ir.priority(fused_add_rms_norm=["triton"], silu_and_mul=["triton"]), torch.no_grad():
        compiled = torch.compile(block, backend=opweave.compile.backend, fullgraph=True)
        found = compiled(*(a.clone() for a in arguments))
        report = opweave.compile.report()
    assert [node.chosen for node in report.nodes] == ["triton", "triton"]
    y, _ = ir.ops.fused_add_rms_norm.native(*arguments, 1e-6)
    torch.testing.assert_close(found, ir.ops.silu_and_mul.native(y))


def test_triton_is_not_imported_before_a_kernel_is_called() -> None:
    code = (
        "import sys; from opweave import ir; ir.current_registry().ensure_ready();"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
