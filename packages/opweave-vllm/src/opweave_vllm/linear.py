"""Linear layers and the LM head: a quantization method that calls opweave's linear op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers import linear
from vllm.model_executor.layers import vocab_parallel_embedding as embedding

from opweave import ir
from opweave_vllm.replacing import replace

_LAYERS = (
    linear.ReplicatedLinear,
    linear.ColumnParallelLinear,
    linear.MergedColumnParallelLinear,
    linear.QKVParallelLinear,
    linear.RowParallelLinear,
    embedding.ParallelLMHead,
    embedding.VocabParallelEmbedding,  # the LM head of a model with tied weights
)


class OpweaveLinearMethod(linear.UnquantizedLinearMethod):
    """Unquantized linear layer by opweave's op."""

    def process_weights_after_loading(self, layer: Any) -> None:
        # vLLM would pack the weight for oneDNN and drop it. A plain Parameter, because vLLM's
        # subclass makes every call go through the dispatcher.
        layer.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ir.ops.linear(x, layer.weight, bias)


class HeadMethod(embedding.UnquantizedEmbeddingMethod):
    """Unquantized LM head by opweave's linear op."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # The weight stays as it is: an embedding may share it.
        pass

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ir.ops.linear(x, layer.weight, bias)


def _replacement(base: Any) -> Any:
    class Layer(base):  # type: ignore[misc]
        quant_method: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if type(self.quant_method) is linear.UnquantizedLinearMethod:
                self.quant_method = OpweaveLinearMethod()
            elif type(self.quant_method) is embedding.UnquantizedEmbeddingMethod:
                self.quant_method = HeadMethod()

    Layer.__name__ = Layer.__qualname__ = f"Opweave{base.__name__}"
    return Layer


def register() -> None:
    """Replace vLLM's linear layers and LM head; quantized layers keep their own method."""
    for base in _LAYERS:
        replace(base, _replacement(base))
