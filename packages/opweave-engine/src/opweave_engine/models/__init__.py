"""Models made of IR ops and layers. Forward is ``(input_ids, positions)``; needs no engine."""

from opweave_engine.models.bert import BertConfig, BertModel
from opweave_engine.models.blocks import (
    Attention,
    DecoderLayer,
    GatedMlp,
    LatentAttention,
    SelfAttention,
)
from opweave_engine.models.causal_lm import CausalLM, Decoder, Encoder, LanguageModel
from opweave_engine.models.config import (
    DuplicateModelError,
    InvalidConfigError,
    InvalidModelError,
    ModelError,
    UnsupportedModelError,
    WeightsError,
)
from opweave_engine.models.deepseek import DeepseekV3Config, DeepseekV3ForCausalLM
from opweave_engine.models.forward_context import (
    CachedAttention,
    CachedRows,
    ForwardContext,
    forward_context,
)
from opweave_engine.models.gemma3 import Gemma3Config, Gemma3ForCausalLM
from opweave_engine.models.gpt_oss import GptOssMoE
from opweave_engine.models.llama import SUPPORTED_ARCHITECTURES, LlamaConfig, LlamaForCausalLM
from opweave_engine.models.mamba2 import Mamba2Config, Mamba2ForCausalLM
from opweave_engine.models.mixture import MixtralForCausalLM, MixtureConfig, Qwen3MoeForCausalLM
from opweave_engine.models.registry import (
    build_model,
    model_class,
    register_model,
    supported_architectures,
)
from opweave_engine.models.weights import CheckpointModel

__all__ = [
    # Building blocks
    "Attention", "CausalLM", "CheckpointModel", "Decoder", "DecoderLayer", "Encoder", "GatedMlp",
    "LanguageModel", "LatentAttention", "SelfAttention",
    # Models and their configurations
    "BertConfig", "BertModel", "DeepseekV3Config", "DeepseekV3ForCausalLM", "Gemma3Config",
    "Gemma3ForCausalLM", "GptOssMoE", "LlamaConfig", "LlamaForCausalLM", "Mamba2Config",
    "Mamba2ForCausalLM", "MixtralForCausalLM", "MixtureConfig", "Qwen3MoeForCausalLM",
    # The registry
    "SUPPORTED_ARCHITECTURES", "build_model", "model_class", "register_model",
    "supported_architectures",
    # The context of a forward
    "CachedAttention", "CachedRows", "ForwardContext", "forward_context",
    # Errors
    "DuplicateModelError", "InvalidConfigError", "InvalidModelError", "ModelError",
    "UnsupportedModelError", "WeightsError",
]  # fmt: skip
