"""Layers: modules made of ops, which other packages can replace.

``CustomOp`` is an operation with a method for each platform; ``PluggableLayer`` is replaced as a
whole. Importing this package registers opweave's layers.
"""

from opweave.layers.activation import (
    XIELU,
    FastGELU,
    FatreluAndMul,
    GeluAndMul,
    GeluAndMulSparse,
    MulAndSilu,
    NewGELU,
    QuickGELU,
    ReLUSquaredActivation,
    SiluAndMul,
    SwigluOAIAndMul,
    get_act_and_mul_fn,
    get_act_fn,
)
from opweave.layers.attention import MLAModules, MMEncoderAttention, MultiHeadLatentAttentionWrapper
from opweave.layers.conv import Conv2dLayer, Conv3dLayer
from opweave.layers.custom_op import CustomOp
from opweave.layers.embedding import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding
from opweave.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from opweave.layers.mamba import MambaMixer, MambaMixer2, Plamo2MambaMixer, ShortConv
from opweave.layers.mamba_states import (
    SequenceStates,
    StateCache,
    StatefulLayer,
    sequence_states,
    stateful_layers,
)
from opweave.layers.moe import (
    FusedMoE,
    FusedMoEMethod,
    FusedMoEModularMethod,
    QuantizedFusedMoEMethod,
    TransformersFusedMoE,
    UnquantizedFusedMoEMethod,
)
from opweave.layers.moe_routing import GroupedTopk
from opweave.layers.norm import GemmaRMSNorm, Mixer2RMSNormGated, RMSNorm, RMSNormGated
from opweave.layers.parallel import TensorParallel, current_tensor_parallel, tensor_parallel
from opweave.layers.quant_fp8 import GroupShape, QuantFP8
from opweave.layers.registry import (
    DuplicateLayerError,
    InvalidLayerError,
    LayerArgumentError,
    LayerCallError,
    LayerError,
    LayerNameError,
    PluggableLayer,
    ReplacementError,
    ShardingError,
    WeightLoadError,
    op_registry,
    op_registry_oot,
    replacement,
)
from opweave.layers.rotary import (
    ApplyRotaryEmb,
    DualChunkRotaryEmbedding,
    MRotaryEmbedding,
    RotaryEmbedding,
    get_rope,
)

__all__ = [
    "ApplyRotaryEmb", "ColumnParallelLinear", "Conv2dLayer", "Conv3dLayer", "CustomOp",
    "DualChunkRotaryEmbedding", "DuplicateLayerError", "FastGELU", "FatreluAndMul", "FusedMoE",
    "FusedMoEMethod", "FusedMoEModularMethod", "GeluAndMul", "GeluAndMulSparse", "GemmaRMSNorm",
    "GroupShape", "GroupedTopk", "InvalidLayerError", "LayerArgumentError", "LayerCallError",
    "LayerError", "LayerNameError", "LinearBase", "LogitsProcessor", "MLAModules",
    "MMEncoderAttention", "MRotaryEmbedding", "MambaMixer", "MambaMixer2",
    "MergedColumnParallelLinear", "Mixer2RMSNormGated", "MulAndSilu",
    "MultiHeadLatentAttentionWrapper", "NewGELU", "ParallelLMHead", "Plamo2MambaMixer",
    "PluggableLayer", "QKVParallelLinear", "QuantFP8", "QuickGELU", "RMSNorm", "RMSNormGated",
    "ReLUSquaredActivation", "ReplacementError", "ReplicatedLinear", "RotaryEmbedding",
    "RowParallelLinear", "SequenceStates", "ShardingError", "ShortConv", "SiluAndMul",
    "StateCache", "StatefulLayer", "SwigluOAIAndMul", "TensorParallel", "TransformersFusedMoE",
    "QuantizedFusedMoEMethod", "UnquantizedFusedMoEMethod", "VocabParallelEmbedding",
    "WeightLoadError", "XIELU", "current_tensor_parallel", "get_act_and_mul_fn", "get_act_fn",
    "get_rope", "op_registry", "op_registry_oot", "replacement", "sequence_states",
    "stateful_layers", "tensor_parallel",
]  # fmt: skip
