"""Base classes of quantization methods."""

from opweave.integrations.vllm_api.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
)

__all__ = ["QuantizationConfig"]
