"""vLLM's helpers for torch."""

from opweave.integrations.vllm_api.utils.torch_utils import direct_register_custom_op

__all__ = ["direct_register_custom_op"]
