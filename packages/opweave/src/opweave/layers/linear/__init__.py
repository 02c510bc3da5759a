"""Linear layers, replicated or sharded over a tensor-parallel group."""

from opweave.layers.linear.base import LinearBase
from opweave.layers.linear.column import ColumnParallelLinear
from opweave.layers.linear.merged_column import MergedColumnParallelLinear
from opweave.layers.linear.method import LinearMethod, QuantConfig, UnquantizedLinearMethod
from opweave.layers.linear.qkv import QKVParallelLinear
from opweave.layers.linear.replicated import ReplicatedLinear
from opweave.layers.linear.row import RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "LinearBase",
    "LinearMethod",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "QuantConfig",
    "ReplicatedLinear",
    "RowParallelLinear",
    "UnquantizedLinearMethod",
]
