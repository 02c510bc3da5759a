"""The projections of queries, keys and values, computed in one matrix product."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from opweave.layers.errors import ShardingError
from opweave.layers.linear.base import ShardId
from opweave.layers.linear.column import ColumnParallelLinear, Part
from opweave.layers.linear.method import QuantConfig
from opweave.layers.parallel import ALONE, TensorParallel, current_tensor_parallel
from opweave.layers.pluggable_layer import PluggableLayer


@PluggableLayer.register("qkv_parallel_linear")
class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections with concatenated outputs, sharded by heads.

    If there are more ranks than key heads, neighboring ranks share one. The weight loaders take
    ``"q"``, ``"k"`` or ``"v"`` after the tensor, or only the tensor if it contains all three.

    Args:
        hidden_size: features of the input.
        head_size: features of a head.
        total_num_heads: heads of queries on all ranks together.
        total_num_kv_heads: heads of keys, and of values; default: *total_num_heads*.
        v_head_size: features of a head of values; default: *head_size*.

    See :class:`ColumnParallelLinear` for the others.

    Attributes:
        num_heads, num_kv_heads: the numbers of heads of this rank.
        num_kv_head_replicas: the number of ranks that share a key head.

    Raises:
        ShardingError: the heads cannot be divided among the ranks, or the ranks among the key
            heads.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        v_head_size: int | None = None,
    ) -> None:
        parallel = ALONE if disable_tp else current_tensor_parallel()
        kv_heads = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        self.hidden_size, self.head_size = hidden_size, head_size
        self.v_head_size = head_size if v_head_size is None else v_head_size
        self.total_num_heads, self.total_num_kv_heads = total_num_heads, kv_heads
        self.num_heads = parallel.divide(total_num_heads, "total_num_heads")
        self.num_kv_head_replicas = _replicas(kv_heads, parallel)
        self.num_kv_heads = kv_heads * self.num_kv_head_replicas // parallel.size
        super().__init__(
            hidden_size,
            total_num_heads * head_size + kv_heads * (head_size + self.v_head_size),
            bias,
            False,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )

    def _parts(self) -> Mapping[ShardId, Part]:
        replicas = self.num_kv_head_replicas
        kv_share = self.tp_rank // replicas, self.tp_size // replicas
        return {
            "q": Part(self.num_heads * self.head_size, self.tp_rank, self.tp_size),
            "k": Part(self.num_kv_heads * self.head_size, *kv_share),
            "v": Part(self.num_kv_heads * self.v_head_size, *kv_share),
        }


def _replicas(kv_heads: int, parallel: TensorParallel) -> int:
    """Return the number of ranks that share a key head."""
    if parallel.size <= kv_heads:
        parallel.divide(kv_heads, "total_num_kv_heads")
        return 1
    if kv_heads < 1 or parallel.size % kv_heads:
        raise ShardingError(
            f"total_num_kv_heads={kv_heads} cannot be shared by {parallel.size} tensor-parallel "
            "ranks: each must have the same number of heads, or each head the same number of ranks."
        )
    return parallel.size // kv_heads
