"""What vLLM's helpers for torch are called."""

from opweave.integrations.vllm_api.utils.torch_utils import direct_register_custom_op

__all__ = ["direct_register_custom_op"]
