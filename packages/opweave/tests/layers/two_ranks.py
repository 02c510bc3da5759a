"""Program of the two processes of a tensor-parallel group; imports little, as each imports it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from opweave.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    tensor_parallel,
)

RANKS = 2


class Model(nn.Module):
    """Every layer with a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(50, 8, padding_size=2)
        self.up = ColumnParallelLinear(8, 16, return_bias=False)
        self.down = RowParallelLinear(16, 8, return_bias=False)
        self.out = ColumnParallelLinear(8, 6, gather_output=True, return_bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.out(self.down(self.up(self.embed(ids))))
        return result


def _model() -> Model:
    model = Model()
    generator = torch.Generator().manual_seed(0)
    with tensor_parallel(TensorParallel()):
        whole = Model()
    for own, parameter in zip(model.parameters(), whole.parameters(), strict=True):
        values = torch.randn(parameter.shape, generator=generator)
        own.weight_loader(own, values[:50])  # type: ignore[attr-defined]
    return model


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    try:
        outcome = _outcome(rank)
    finally:
        distributed.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")


def _outcome(rank: int) -> dict[str, object]:
    parallel = TensorParallel.from_process_group()
    x = torch.arange(24.0).view(2, 3, 4) + 100 * torch.arange(RANKS).view(RANKS, 1, 1, 1)
    gathered = all(
        torch.equal(parallel.all_gather(x[rank], dim), torch.cat(x.unbind(), dim))
        for dim in (-1, 0, 1)
    )
    gathered &= parallel.all_gather(x[rank, :, :0], -1).shape == (2, 0, 8)
    gathered &= torch.equal(
        parallel.all_gather(x[rank].transpose(0, 2), 1), torch.cat(x.transpose(1, 3).unbind(), 1)
    )
    ids = torch.tensor([[3, 49, 0]])
    expected = _model()(ids)
    with tensor_parallel(parallel):
        model = _model()
    return {
        "place": [parallel.rank, parallel.size],
        "gathered": gathered,
        "reduced": torch.equal(parallel.all_reduce(x[rank]), x.sum(0)),
        "model": torch.allclose(model(ids), expected, atol=1e-5),
    }
