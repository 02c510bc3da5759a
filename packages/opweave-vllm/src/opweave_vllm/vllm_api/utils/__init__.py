"""vLLM's helpers."""

from opweave_vllm.vllm_api.utils.math_utils import cdiv, next_power_of_2, round_down, round_up
from opweave_vllm.vllm_api.utils.torch_utils import direct_register_custom_op

__all__ = ["cdiv", "direct_register_custom_op", "next_power_of_2", "round_down", "round_up"]
