"""Tensor parallelism: what a layer is told, and torch.distributed behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing
from torch.testing._internal.distributed import fake_pg

from opweave.layers import (
    ColumnParallelLinear,
    ShardingError,
    TensorParallel,
    current_tensor_parallel,
    tensor_parallel,
)

from .two_ranks import RANKS, Model, run_rank


def no_gather(x: Tensor, dim: int = -1) -> Tensor:
    raise AssertionError


def rank_of(rank: int, size: int) -> TensorParallel:
    return TensorParallel(rank, size, torch.neg, no_gather)


def test_by_default_there_is_one_rank() -> None:
    parallel, x = current_tensor_parallel(), torch.ones(2)
    assert (parallel.rank, parallel.size) == (0, 1)
    assert parallel.all_reduce(x) is x
    assert parallel.all_gather(x, dim=0) is x


def test_a_scope_ends() -> None:
    with tensor_parallel(rank_of(1, 4)):
        assert current_tensor_parallel().rank == 1
        layer = ColumnParallelLinear(3, 8)
        with tensor_parallel(TensorParallel()):
            assert current_tensor_parallel().size == 1
        assert current_tensor_parallel().size == 4
    assert current_tensor_parallel().size == 1
    assert (layer.tp_rank, layer.tp_size) == (1, 4)


def test_mistakes() -> None:
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ShardingError, match=f"rank={rank}.*size={size}"):
            rank_of(rank, size)
    with pytest.raises(ShardingError, match="size=2 ranks need all_reduce"):
        TensorParallel(0, 2)
    with pytest.raises(ShardingError, match=r"heads=6.*4 tensor-parallel ranks"):
        rank_of(0, 4).divide(6, "heads")
    with pytest.raises(ShardingError, match="init_process_group"):
        TensorParallel.from_process_group()


def test_two_processes(tmp_path: Path) -> None:
    spawn: Any = multiprocessing.spawn  # type: ignore[attr-defined]
    spawn(run_rank, (tmp_path,), nprocs=RANKS)
    for rank in range(RANKS):
        outcome = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert outcome == {"place": [rank, RANKS], "gathered": True, "reduced": True, "model": True}


@pytest.fixture
def pretended_group() -> Iterator[None]:
    """Two ranks, of which only the second exists, and nothing is exchanged."""
    distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=1, world_size=RANKS)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("pretended_group")
def test_collectives_are_traced() -> None:
    parallel = TensorParallel.from_process_group()
    assert (parallel.rank, parallel.size) == (1, RANKS)
    with tensor_parallel(parallel):
        model = Model()
    torch.compiler.reset()
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    found = torch.compile(model, backend=backend, fullgraph=True)(torch.tensor([1, 2]))
    assert found.shape == (2, 6)
    (targets,) = graphs
    assert sum("all_reduce" in target for target in targets) == 2
    assert sum("all_gather_into_tensor" in target for target in targets) == 1


@pytest.mark.usefixtures("pretended_group")
def test_groups_of_some_processes() -> None:
    alone = distributed.new_group([1])
    assert TensorParallel.from_process_group(alone) == TensorParallel()
    with pytest.raises(ShardingError, match="rank 1 of all, is not in"):
        TensorParallel.from_process_group(distributed.new_group([0]))
