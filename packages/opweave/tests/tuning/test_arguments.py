"""Descriptions of arguments, and arguments built from them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave.tuning.trace import TraceError, build, describe, signature


def rebuilt(value: Any) -> Any:
    described = json.loads(json.dumps(describe(value)))
    return build(described, lambda given: pytest.fail("nothing is stored"), {})


@pytest.mark.parametrize(
    "value", [1, 1.5, True, None, "gelu", -0.25, [1, 2, None], torch.bfloat16, torch.device("cpu")]
)
def test_plain_values_come_back(value: Any) -> None:
    assert rebuilt(value) == value
    assert type(rebuilt(value)) is type(value)


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "columns": lambda t: t[:, 2:5],
    "rows": lambda t: t[1:4],
    "expanded": lambda t: t[:1].expand(7, -1),
    "overlapping": lambda t: t.view(-1).as_strided((4, 5), (2, 1), 3),
    "empty": lambda t: t[:0],
    "scalar": lambda t: t[2, 1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_integers_come_back_in_their_layout(layout: str, dtype: torch.dtype) -> None:
    tensor = LAYOUTS[layout](torch.randint(0, 2 if dtype is torch.bool else 99, (6, 8)).to(dtype))
    found = rebuilt(tensor)
    assert torch.equal(found, tensor)
    assert (found.dtype, signature(found)) == (dtype, signature(tensor))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
)
def test_random_floats_have_the_layout_and_the_range(layout: str, dtype: torch.dtype) -> None:
    tensor = LAYOUTS[layout]((torch.rand(6, 8) + 0.5).to(dtype))
    found = rebuilt(tensor)
    assert signature(found) == signature(tensor)
    if found.numel():
        assert found.to(torch.float64).min() >= 0.5  # scales must stay positive
        assert found.to(torch.float64).max() <= 1.5


def test_random_floats_have_the_mean_and_the_deviation() -> None:
    torch.manual_seed(0)
    found = rebuilt(torch.randn(40_000) * 3 - 7)
    assert found.mean().item() == pytest.approx(-7, abs=0.1)
    assert found.std().item() == pytest.approx(3, abs=0.1)


def test_statistics_leave_out_what_is_not_finite() -> None:
    found = rebuilt(torch.tensor([1.0, float("nan"), float("inf"), 3.0]))
    assert found.isfinite().all()
    assert 1 <= found.min() <= found.max() <= 3


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_packed_weights_are_random_in_their_range(dtype: torch.dtype) -> None:
    weight = torch.randint(3, 50, (2**17,)).to(dtype)
    described = describe(weight)
    assert described["type"] == "random"
    found = rebuilt(weight)
    assert found.dtype is dtype
    assert (int(found.min()), int(found.max())) == (3, 49)


def test_tensors_in_lists() -> None:
    given = [torch.arange(3), None, torch.ones(2, 2)]
    found = rebuilt(given)
    assert torch.equal(found[0], given[0])
    assert found[1] is None
    assert torch.equal(found[2], given[2])


def test_stored_tensors_come_back() -> None:
    tensor = torch.randn(6, 8)[:, 1:4]
    stored: dict[str, Tensor] = {}

    def keep(value: Tensor) -> str:
        stored["key"] = value.clone()
        return "key"

    described = describe(tensor, keep)
    found = build(described, lambda given: stored[given["tensor_key"]], {})
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()


def test_equal_numbers_of_other_types_have_other_signatures() -> None:
    assert len({signature(value) for value in (1, 1.0, True, "1", None)}) == 5


def test_sparse_tensors_cannot_be_recorded() -> None:
    with pytest.raises(TraceError, match=r"layout torch\.sparse_coo cannot be recorded"):
        describe(torch.eye(3).to_sparse())
