"""Where a model's weights come from: named tensors, some of them quantized."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from opweave.layers.linear import LinearMethod


class TensorSource(Protocol):
    """Named tensors, as the model's checkpoints in Hugging Face's format name them."""

    @property
    def file(self) -> Path:
        """The file, for errors."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name, without reading one."""

    def tensor(self, name: str) -> Tensor:
        """Read one tensor; a quantized one is dequantized."""


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """Tensors of which some are quantized."""

    @property
    def methods(self) -> Mapping[str, LinearMethod]:
        """How a linear layer keeps each quantized weight, by the name of the module."""

    def parameters(self, module: str, method: LinearMethod) -> dict[str, Tensor]:
        """Return the parameters of a module of ``methods``, by the names that *method* uses.

        Args:
            module: its name.
            method: that of ``methods``, or the form of it that the layer keeps.
        """
