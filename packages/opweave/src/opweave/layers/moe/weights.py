"""Loads the weights of one expert or of all experts, whole or sharded."""

from __future__ import annotations

from torch import Tensor

from opweave.layers.errors import LayerArgumentError, WeightLoadError
from opweave.layers.moe.placement import ExpertPlacement

SHARDS = {"w13": ("w1", "w3", "w13"), "w2": ("w2",)}


def load_expert(
    expert: Tensor,
    loaded: Tensor,
    shard_id: str,
    placement: ExpertPlacement,
    *,
    gated: bool,
    interleaved: bool,
) -> None:
    """Fill the parameter of one expert, or the part *shard_id* of it.

    Args:
        expert: this rank's ``(rows, hidden)``, ``(hidden, intermediate)``, or bias.
        loaded: the tensor of a checkpoint: for all ranks, or this rank's shard.
        shard_id: ``"w1"``: gate, or the only projection; ``"w3"``: up; ``"w13"``: both; ``"w2"``:
            down.
        placement: the placement of this rank.
        gated: whether there is a gate.
        interleaved: the rows of gate and up alternate, in *expert* and in a *loaded* ``"w13"``.

    Raises:
        WeightLoadError: the shape of *loaded* does not fit.
        LayerArgumentError: ``"w3"`` without a gate.
    """
    if shard_id == "w2":
        return _fill(expert, loaded, 1 if expert.ndim == 2 else None, placement, shard_id)
    if not gated:
        if shard_id == "w3":
            raise LayerArgumentError(
                "shard_id='w3', but these experts have no gate: 'w1' is all there is."
            )
        return _fill(expert, loaded, 0, placement, shard_id)
    if shard_id == "w13" and interleaved:
        return _fill(expert, loaded, 0, placement, shard_id)
    if shard_id == "w13":
        for half, rows in zip(expert.chunk(2), loaded.chunk(2), strict=True):
            _fill(half, rows, 0, placement, shard_id)
        return None
    second = int(shard_id == "w3")
    part = expert[second::2] if interleaved else expert.chunk(2)[second]
    return _fill(part, loaded, 0, placement, shard_id)


def _fill(
    target: Tensor, loaded: Tensor, dim: int | None, placement: ExpertPlacement, shard_id: str
) -> None:
    """Copy *loaded*, or this rank's shard of it along *dim*; None: not sharded."""
    source = loaded
    if dim is not None and loaded.ndim == target.ndim and placement.tp_size > 1:
        size = target.shape[dim]
        if loaded.shape[dim] == size * placement.tp_size:
            source = loaded.narrow(dim, placement.tp_rank * size, size)
    if source.shape != target.shape:
        raise WeightLoadError(
            f"{shard_id} of an expert has shape {tuple(loaded.shape)}; it must have "
            f"{tuple(target.shape)}, or be that of all {placement.tp_size} ranks. A checkpoint "
            "with weights (in, out) needs is_transposed=True."
        )
    target.copy_(source)
