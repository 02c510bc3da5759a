"""Linear layers and their method."""

from opweave.layers import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from opweave.layers.linear_methods import UnquantizedLinearMethod
from opweave_vllm.vllm_api.model_executor.layers.quantization.base_config import QuantizeMethodBase

__all__ = [
    "ColumnParallelLinear", "LinearBase", "LinearMethodBase", "MergedColumnParallelLinear",
    "QKVParallelLinear", "QuantizeMethodBase", "ReplicatedLinear", "RowParallelLinear",
    "UnquantizedLinearMethod",
]  # fmt: skip


class LinearMethodBase(QuantizeMethodBase):
    """Base class of methods of linear layers; a layer takes one from its ``quant_config``."""


LinearMethodBase.register(UnquantizedLinearMethod)
