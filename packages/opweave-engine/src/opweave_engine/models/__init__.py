"""Models made of IR ops and layers. Forward is ``(input_ids, positions)``; needs no engine."""

from opweave_engine.models.attention import Attention
from opweave_engine.models.bert import BertModel
from opweave_engine.models.bert_config import BertConfig
from opweave_engine.models.causal_lm import CausalLM, Decoder
from opweave_engine.models.config import SUPPORTED_ARCHITECTURES, LlamaConfig
from opweave_engine.models.decoder_layer import DecoderLayer
from opweave_engine.models.deepseek import DeepseekV3ForCausalLM
from opweave_engine.models.deepseek_config import DeepseekV3Config
from opweave_engine.models.encoder import Encoder
from opweave_engine.models.errors import (
    DuplicateModelError,
    InvalidConfigError,
    InvalidModelError,
    ModelError,
    UnsupportedModelError,
    WeightsError,
)
from opweave_engine.models.forward_context import (
    CachedAttention,
    CachedRows,
    ForwardContext,
    forward_context,
)
from opweave_engine.models.gemma3 import Gemma3ForCausalLM
from opweave_engine.models.gemma3_config import Gemma3Config
from opweave_engine.models.gpt_oss import GptOssMoE
from opweave_engine.models.language_model import LanguageModel
from opweave_engine.models.latent_attention import LatentAttention
from opweave_engine.models.llama import LlamaForCausalLM
from opweave_engine.models.mamba2 import Mamba2ForCausalLM
from opweave_engine.models.mamba2_config import Mamba2Config
from opweave_engine.models.mixtral import MixtralForCausalLM
from opweave_engine.models.mixture_config import MixtureConfig
from opweave_engine.models.mlp import GatedMlp
from opweave_engine.models.patch_grid import PatchGrid, PatchGridError
from opweave_engine.models.qwen2_vision import Qwen2VisionTransformer
from opweave_engine.models.qwen2_vision_config import Qwen2VisionConfig
from opweave_engine.models.qwen3_moe import Qwen3MoeForCausalLM
from opweave_engine.models.registry import (
    build_model,
    model_class,
    register_model,
    supported_architectures,
)
from opweave_engine.models.self_attention import SelfAttention
from opweave_engine.models.weights import CheckpointModel

__all__ = [
    "SelfAttention",
    "GatedMlp",
    "LanguageModel",
    "LatentAttention",
    "DecoderLayer",
    "Decoder",
    "Attention",
    "SUPPORTED_ARCHITECTURES",
    "BertConfig",
    "BertModel",
    "CachedRows",
    "CausalLM",
    "CheckpointModel",
    "DeepseekV3Config",
    "DeepseekV3ForCausalLM",
    "DuplicateModelError",
    "Encoder",
    "ForwardContext",
    "Gemma3Config",
    "Gemma3ForCausalLM",
    "GptOssMoE",
    "InvalidConfigError",
    "InvalidModelError",
    "CachedAttention",
    "LlamaConfig",
    "LlamaForCausalLM",
    "Mamba2Config",
    "Mamba2ForCausalLM",
    "MixtralForCausalLM",
    "MixtureConfig",
    "ModelError",
    "PatchGrid",
    "PatchGridError",
    "Qwen2VisionConfig",
    "Qwen2VisionTransformer",
    "Qwen3MoeForCausalLM",
    "UnsupportedModelError",
    "WeightsError",
    "build_model",
    "forward_context",
    "model_class",
    "register_model",
    "supported_architectures",
]
