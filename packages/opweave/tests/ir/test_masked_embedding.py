"""``masked_embedding``: summed over ranks it is the lookup in the whole table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opweave import ir

masked = ir.ops.masked_embedding
opcheck: Any = torch.library.opcheck
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(50,), (2, 3), (0,), ()], ids=str)
def test_each_id_by_itself(shape: tuple[int, ...], index: torch.dtype, dtype: torch.dtype) -> None:
    weight = torch.randn(24, 5).to(dtype)
    weight.view(torch.uint8)[23] = 0x7F  # NaN: of no id
    ids = torch.randint(-3, 40, shape, dtype=index)
    found = masked(ids, weight, 8, 22, 32, 36, 16)
    assert (found.shape, found.dtype) == ((*shape, 5), dtype)
    for i, row in zip(ids.flatten().tolist(), found.reshape(-1, 5), strict=True):
        place = i - 8 if 8 <= i < 22 else i - 16 if 32 <= i < 36 else None
        expected = torch.zeros(5) if place is None else weight[place].float()
        assert torch.equal(row.float(), expected), i


def test_one_range_is_enough_and_strides_do_not_matter() -> None:
    weight = torch.randn(5, 16).t()[:, 1:4]
    found = masked(torch.tensor([[3], [9], [10]]), weight, 3, 10)
    assert torch.equal(found[:, 0], torch.stack([weight[0], weight[6], torch.zeros(3)]))


def test_gradient_and_the_torch_op() -> None:
    ids, weight, *ranges = masked.generate_inputs(hidden_size=3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda w: masked(ids, w, *ranges), weight.requires_grad_())
    opcheck(masked.torch_op, masked.generate_inputs(), test_utils="test_faketensor")


def test_a_range_that_does_not_fit() -> None:
    with pytest.raises(IndexError, match="index"):
        masked(torch.tensor([9]), torch.randn(4, 2), 0, 10)
