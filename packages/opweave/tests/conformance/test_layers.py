"""The kit for layers: what it finds, with layers that are right and layers that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from opweave.conformance import NonconformingError, layers
from opweave.conformance.layers import Rank, on_ranks

FULL = torch.randn(6, 8)


class Column(nn.Module):
    """A linear layer whose outputs are divided over ranks, and gathered."""

    def __init__(self, rank: Rank | None = None, *, forgets: int = 0, shift: int = 0) -> None:
        super().__init__()
        self.rank, self.forgets, self.shift = rank, forgets, shift
        self.weight = nn.Parameter(torch.empty(6 // (rank.size if rank else 1), 8))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, param: nn.Parameter, full: Tensor) -> None:
        part = full.chunk(self.rank.size)[self.rank.rank - self.shift] if self.rank else full
        rows = part.shape[0] - self.forgets
        param.data[:rows] = part[:rows]

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight)
        return self.rank.all_gather(y) if self.rank else y


def test_an_oracle() -> None:
    layer = Column()
    layers.load(layer, [("weight", FULL)])
    x = torch.randn(3, 8)
    layers.check_oracle(layer, lambda x: x @ FULL.T, x)
    with pytest.raises(NonconformingError, match=r"output 0 .* the oracle"):
        layers.check_oracle(layer, lambda x: x @ FULL.T + 1e-3, x)


def test_loading() -> None:
    layers.check_loading(Column(), [("weight", FULL)])
    with pytest.raises(NonconformingError, match="8 of 48 elements of 'weight' are not loaded"):
        layers.check_loading(Column(forgets=1), [("weight", FULL)])
    with pytest.raises(NonconformingError, match="depends on the order"):
        layers.check_loading(Column(), [("weight", FULL), ("weight", 2 * FULL)])
    with pytest.raises(NonconformingError, match=r"no parameter 'bias'.*\['weight'\]"):
        layers.load(Column(), [("bias", FULL)])
    with pytest.raises(NonconformingError, match="no weight_loader"):
        layers.load(nn.Linear(8, 6), [("weight", FULL)])


@pytest.mark.parametrize("size", [2, 3])
def test_ranks(size: int) -> None:
    def build(shift: int) -> Callable[[Rank | None], Column]:
        def make(rank: Rank | None) -> Column:
            layer = Column(rank, shift=shift)
            layers.load(layer, [("weight", FULL)])
            return layer

        return make

    x = torch.randn(4, 8)
    layers.check_ranks(build(0), x, size=size)
    with pytest.raises(NonconformingError, match=f"rank 0 of {size}"):
        layers.check_ranks(build(1), x, size=size)


def test_collectives() -> None:
    def run(rank: Rank) -> tuple[Tensor, Tensor]:
        x = torch.full((2, 3), float(rank.rank))
        total = x
        for _ in range(20):
            total = rank.all_reduce(x)
        return total, rank.all_gather(x, 0)

    for total, gathered in on_ranks(3, run):
        assert torch.equal(total, torch.full((2, 3), 3.0))
        assert gathered[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_sums_keep_their_dtype_and_are_added_in_order(dtype: torch.dtype) -> None:
    values = torch.tensor([100.0, 0.3, 0.3]).to(dtype)
    expected = (values[0] + values[1]) + values[2]
    for total in on_ranks(3, lambda rank: rank.all_reduce(values[rank.rank])):
        assert total.dtype == dtype
        assert torch.equal(total, expected)


def test_a_tensor_that_was_sent_may_be_overwritten() -> None:
    def run(rank: Rank) -> Tensor:
        x, total = torch.ones(20_000), torch.zeros(())
        for _ in range(20):
            total = rank.all_reduce(x)
            x.zero_().add_(1)
        return total

    for total in on_ranks(3, run):
        assert torch.equal(total, torch.full((20_000,), 3.0))


def test_a_rank_that_raises_releases_the_others() -> None:
    def run(rank: Rank) -> Any:
        if rank.rank == 1:
            raise KeyError("lost")
        return rank.all_reduce(torch.ones(1))

    with pytest.raises(KeyError, match="lost"):
        on_ranks(3, run)
