"""The memory of results is what torch's own functions would have made."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from opweave.kernels.opweave_c import calls

SHAPES = [(8,), (3, 8), (1, 8), (0, 8), (3, 0), (2, 3, 8), (2, 0, 8)]


@pytest.mark.parametrize("dtype", [None, torch.int8, torch.float32], ids=str)
@pytest.mark.parametrize("width", [0, 1, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_new_rows(shape: tuple[int, ...], width: int, dtype: torch.dtype | None) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    got = calls.new_rows(x, width, dtype)
    wanted = x.new_empty((*shape[:-1], width), dtype=dtype)
    assert got.dtype is wanted.dtype
    assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_half_of_has_the_strides_of_a_gated_result(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for tensor in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
        width = tensor.shape[-1] // 2
        wanted = torch.empty_like(tensor[..., :width] * tensor[..., width : 2 * width])
        got = calls.half_of(tensor)
        assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())


def test_modes_see_the_memory() -> None:
    with FakeTensorMode():
        assert isinstance(calls.new_rows(torch.empty(3, 8), 5), FakeTensor)


def test_dynamo_traces_the_memory() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def make(x: torch.Tensor) -> torch.Tensor:
        return calls.new_rows(x, 5, torch.int8)

    assert make(torch.empty(3, 8)).shape == (3, 5)
