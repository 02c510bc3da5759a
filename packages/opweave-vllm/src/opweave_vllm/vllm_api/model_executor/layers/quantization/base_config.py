"""Base classes of quantization methods, from which packages for vLLM derive theirs."""

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor, nn

__all__ = ["QuantizationConfig", "QuantizeMethodBase"]


class QuantizeMethodBase(ABC):
    """Creates the weights of a layer and computes with them."""

    @abstractmethod
    def create_weights(
        self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any
    ) -> None:
        """Create the parameters of *layer*."""

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of *layer*."""

    def embedding(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Return the rows of an embedding; not supported by default."""
        raise NotImplementedError(f"{type(self).__name__} does not support embeddings")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Transform the loaded weights; nothing by default."""
        return


class QuantizationConfig(ABC):
    """The configuration of a quantization method.

    opweave's models do not read it: a package uses it with layers of its own.
    """

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_name(self) -> str:
        """Return the name of the method."""

    @abstractmethod
    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the supported dtypes of activations."""

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int:
        """Return the lowest compute capability of a GPU, such as 70 for Volta, or -1."""

    @staticmethod
    @abstractmethod
    def get_config_filenames() -> list[str]:
        """Return the names of configuration files in a checkpoint."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return the configuration for a checkpoint's dict."""

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method for a layer, or None if it is not quantized."""

    @staticmethod
    def get_from_keys(config: dict[str, Any], keys: list[str]) -> Any:
        """Return the value of the first of *keys* in *config*; raise ValueError without any."""
        for key in keys:
            if key in config:
                return config[key]
        raise ValueError(f"none of {keys} is in the quantization config {config!r}")

    @staticmethod
    def get_from_keys_or(config: dict[str, Any], keys: list[str], default: Any) -> Any:
        """Return the value of the first of *keys* in *config*, else *default*."""
        return next((config[key] for key in keys if key in config), default)
