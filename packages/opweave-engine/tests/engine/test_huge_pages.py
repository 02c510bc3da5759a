"""Memory in huge pages: where it is, and that it is ordinary memory."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from opweave_engine.load import loader

MIB = 2**20
CPU = torch.device("cpu")

on_linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_it_is_a_tensor_like_any_other(dtype: torch.dtype) -> None:
    tensor = loader.empty((3, 1 << 20, 1), dtype, CPU)
    assert tensor.shape == (3, 1 << 20, 1)
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    tensor.fill_(1)
    assert tensor.clone().sum() == tensor.sum() == 3 << 20
    tensor.add_(1)
    assert tensor.max() == tensor.min() == 2


@on_linux
def test_large_tensors_begin_where_a_huge_page_does() -> None:
    assert loader.empty((5 * MIB,), torch.int8, CPU).data_ptr() % (2 * MIB) == 0


@on_linux
@pytest.mark.skipif(
    "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    else True,
    reason="the system gives no huge pages",
)
def test_the_system_has_taken_the_advice() -> None:
    tensor = loader.empty((8 * MIB,), torch.int8, CPU)
    flags = _flags_of(tensor.data_ptr())
    assert "hg" in flags  # "huge page advise flag", proc_pid_smaps(5)


def test_small_tensors_and_other_devices_are_left_to_torch() -> None:
    assert loader.empty((3,), torch.float32, CPU).shape == (3,)
    meta = torch.device("meta")
    assert loader.empty((8 * MIB,), torch.int8, meta).device == meta


def test_memory_is_given_back() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    gc.collect()
    before = mapped()
    tensor = loader.empty((512 * MIB,), torch.int8, CPU)
    view = tensor[MIB:]
    del tensor
    assert view.numel() == 511 * MIB
    assert mapped() > before + 500 * MIB
    del view
    assert mapped() < before + 256 * MIB


def test_parameters_are_moved_and_stay_parameters() -> None:
    layer = nn.Linear(1024, 1024)
    layer.weight.weight_loader = "of the layer"  # type: ignore[assignment]
    weight, bias = layer.weight, layer.bias.detach().clone()
    address = layer.weight.data_ptr()
    loader.move_parameters(layer)
    assert layer.weight is weight
    assert weight.shape == (1024, 1024)
    assert weight.weight_loader == "of the layer"
    assert torch.equal(layer.bias, bias)  # it is small
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert weight.data_ptr() != address


def _flags_of(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that *address* is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            first, last = (int(part, 16) for part in name.split("-"))
            inside = first <= address < last
        elif inside and name == "VmFlags:":
            return rest
    return []
