"""Base classes of quantization methods."""

from opweave_vllm.vllm_api.model_executor.layers.quantization.base_config import QuantizationConfig

__all__ = ["QuantizationConfig"]
