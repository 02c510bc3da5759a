"""Models made of IR ops and layers. Forward is ``(input_ids, positions)``; needs no engine."""

from opweave.models.attention import Attention
from opweave.models.bert import BertModel
from opweave.models.bert_config import BertConfig
from opweave.models.causal_lm import CausalLM, Decoder
from opweave.models.config import SUPPORTED_ARCHITECTURES, LlamaConfig
from opweave.models.decoder_layer import DecoderLayer
from opweave.models.deepseek import DeepseekV3ForCausalLM
from opweave.models.deepseek_config import DeepseekV3Config
from opweave.models.encoder import Encoder
from opweave.models.errors import (
    DuplicateModelError,
    InvalidConfigError,
    InvalidModelError,
    ModelError,
    UnsupportedModelError,
    WeightsError,
)
from opweave.models.forward_context import (
    CachedAttention,
    CachedRows,
    ForwardContext,
    forward_context,
)
from opweave.models.gemma3 import Gemma3ForCausalLM
from opweave.models.gemma3_config import Gemma3Config
from opweave.models.gpt_oss import GptOssMoE
from opweave.models.language_model import LanguageModel
from opweave.models.latent_attention import LatentAttention
from opweave.models.llama import LlamaForCausalLM
from opweave.models.mamba2 import Mamba2ForCausalLM
from opweave.models.mamba2_config import Mamba2Config
from opweave.models.mixtral import MixtralForCausalLM
from opweave.models.mixture_config import MixtureConfig
from opweave.models.mlp import GatedMlp
from opweave.models.patch_grid import PatchGrid, PatchGridError
from opweave.models.qwen2_vision import Qwen2VisionTransformer
from opweave.models.qwen2_vision_config import Qwen2VisionConfig
from opweave.models.qwen3_moe import Qwen3MoeForCausalLM
from opweave.models.registry import (
    build_model,
    model_class,
    register_model,
    supported_architectures,
)
from opweave.models.self_attention import SelfAttention
from opweave.models.weights import CheckpointModel

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
