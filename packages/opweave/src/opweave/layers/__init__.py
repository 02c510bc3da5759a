"""Layers: modules made of ops, which other packages can replace.

``CustomOp`` is an operation with a method for each platform; ``PluggableLayer`` is replaced as a
whole. Importing this package registers opweave's layers.
"""

from opweave.layers.activation import (
    FatreluAndMul,
    GeluAndMul,
    GeluAndMulSparse,
    MulAndSilu,
    SiluAndMul,
    SwigluOAIAndMul,
)
from opweave.layers.activation_names import get_act_and_mul_fn, get_act_fn
from opweave.layers.conv import Conv2dLayer, Conv3dLayer
from opweave.layers.custom_op import CustomOp
from opweave.layers.errors import (
    DuplicateLayerError,
    InvalidLayerError,
    LayerArgumentError,
    LayerCallError,
    LayerError,
    LayerNameError,
    ReplacementError,
    ShardingError,
    WeightLoadError,
)
from opweave.layers.gated_norm import RMSNormGated
from opweave.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from opweave.layers.logits_processor import LogitsProcessor
from opweave.layers.mamba import (
    MambaMixer,
    MambaMixer2,
    Plamo2MambaMixer,
    SequenceStates,
    ShortConv,
    StateCache,
    StatefulLayer,
    sequence_states,
    stateful_layers,
)
from opweave.layers.mixer2_gated_norm import Mixer2RMSNormGated
from opweave.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from opweave.layers.mm_encoder_attention import MMEncoderAttention
from opweave.layers.moe import (
    FusedMoE,
    FusedMoEMethod,
    FusedMoEModularMethod,
    GroupedTopk,
    QuantizedFusedMoEMethod,
    TransformersFusedMoE,
    UnquantizedFusedMoEMethod,
)
from opweave.layers.norm import GemmaRMSNorm, RMSNorm
from opweave.layers.parallel import TensorParallel, current_tensor_parallel, tensor_parallel
from opweave.layers.parallel_lm_head import ParallelLMHead
from opweave.layers.pluggable_layer import PluggableLayer
from opweave.layers.pointwise import XIELU, FastGELU, NewGELU, QuickGELU, ReLUSquaredActivation
from opweave.layers.quant_fp8 import GroupShape, QuantFP8
from opweave.layers.registry import op_registry, op_registry_oot, replacement
from opweave.layers.rotary import (
    ApplyRotaryEmb,
    DualChunkRotaryEmbedding,
    MRotaryEmbedding,
    RotaryEmbedding,
    get_rope,
)
from opweave.layers.vocab_parallel_embedding import VocabParallelEmbedding

__all__ = [
    "ApplyRotaryEmb",
    "ColumnParallelLinear",
    "Conv2dLayer",
    "Conv3dLayer",
    "CustomOp",
    "DualChunkRotaryEmbedding",
    "DuplicateLayerError",
    "FastGELU",
    "FatreluAndMul",
    "FusedMoE",
    "FusedMoEMethod",
    "FusedMoEModularMethod",
    "GeluAndMul",
    "GeluAndMulSparse",
    "GemmaRMSNorm",
    "GroupShape",
    "GroupedTopk",
    "InvalidLayerError",
    "LayerArgumentError",
    "LayerCallError",
    "LayerError",
    "LayerNameError",
    "LinearBase",
    "LogitsProcessor",
    "MLAModules",
    "MMEncoderAttention",
    "MRotaryEmbedding",
    "MambaMixer",
    "MambaMixer2",
    "MergedColumnParallelLinear",
    "Mixer2RMSNormGated",
    "MulAndSilu",
    "MultiHeadLatentAttentionWrapper",
    "NewGELU",
    "ParallelLMHead",
    "Plamo2MambaMixer",
    "PluggableLayer",
    "QKVParallelLinear",
    "QuantFP8",
    "QuickGELU",
    "RMSNorm",
    "RMSNormGated",
    "ReLUSquaredActivation",
    "ReplacementError",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SequenceStates",
    "ShardingError",
    "ShortConv",
    "SiluAndMul",
    "StateCache",
    "StatefulLayer",
    "SwigluOAIAndMul",
    "TensorParallel",
    "TransformersFusedMoE",
    "QuantizedFusedMoEMethod",
    "UnquantizedFusedMoEMethod",
    "VocabParallelEmbedding",
    "WeightLoadError",
    "XIELU",
    "current_tensor_parallel",
    "get_act_and_mul_fn",
    "get_act_fn",
    "get_rope",
    "op_registry",
    "op_registry_oot",
    "replacement",
    "sequence_states",
    "stateful_layers",
    "tensor_parallel",
]
