"""Language models made of IR ops. Forward is ``(input_ids, positions)``; no engine is known."""

from opweave.models.config import SUPPORTED_ARCHITECTURES, LlamaConfig
from opweave.models.errors import InvalidConfigError, ModelError, UnsupportedModelError
from opweave.models.forward_context import ForwardContext, KeyValueCache, forward_context
from opweave.models.linear import checkpoint_tensors
from opweave.models.llama import LlamaForCausalLM
from opweave.models.rope import RopeConfig

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "ForwardContext",
    "InvalidConfigError",
    "KeyValueCache",
    "LlamaConfig",
    "LlamaForCausalLM",
    "ModelError",
    "RopeConfig",
    "UnsupportedModelError",
    "checkpoint_tensors",
    "forward_context",
]
