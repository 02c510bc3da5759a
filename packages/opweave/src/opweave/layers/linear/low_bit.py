"""Linear methods of quantized checkpoints: weights of 4 and 8 bits, activations of 16 or 32.

Methods compare equal when their parameters have the same form, so that merged outputs of one form
share one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.ir.ops.gguf_blocks import GGUF_BLOCKS
from opweave.layers.errors import ShardingError
from opweave.layers.linear.method import LinearMethod, UnquantizedLinearMethod
from opweave.layers.weight_loading import describe, dim_of, fill, set_weight_attrs


def register(layer: nn.Module, name: str, data: Tensor, **attrs: Any) -> None:
    """Register *data* as a parameter of *layer* with the attributes that loaders read."""
    parameter = nn.Parameter(data, requires_grad=False)
    set_weight_attrs(parameter, **attrs)
    layer.register_parameter(name, parameter)


def _named(layer: nn.Module) -> str:
    return str(getattr(layer, "prefix", "")) or type(layer).__name__


def check_share(layer: nn.Module, own: int, whole: int, unit: int, what: str) -> None:
    """Raise ShardingError if a rank's share of the inputs is not made of whole units."""
    if own != whole and own % unit:
        raise ShardingError(
            f"{_named(layer)}: a rank's {own} of {whole} "
            f"inputs are not a multiple of the {what} of {unit} in the quantized weight. Use fewer "
            "tensor-parallel ranks."
        )


@dataclass(frozen=True)
class GroupedInt4Method:
    """Weights of 4 bits with a scale for each group of inputs: ``ir.ops.linear_w4a16``.

    Parameters: ``weight`` ``(out, in / 2)`` uint8, ``scale`` ``(out, in / group)``, and ``offset``
    like it, where there is one.

    Attributes:
        group: inputs that share a scale.
        scale_dtype: of scale and offset.
        has_offset: whether there is an offset; without, it is ``-8 * scale``.
        is_ordered: whether the inputs of the weight are in another order, which the parameter
            ``order`` ``(in,)`` int64 lists (act-order of GPTQ, arXiv:2210.17323).
    """

    group: int
    scale_dtype: torch.dtype
    has_offset: bool = False
    is_ordered: bool = False

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows, own = sum(output_partition_sizes), input_size_per_partition
        check_share(layer, own, input_size, self.group, "group")
        if self.is_ordered and own != input_size:
            raise ShardingError(
                f"{_named(layer)}: the quantized weight "
                "reorders its inputs (act-order), which cannot be divided over tensor-parallel "
                "ranks. Use one rank."
            )
        attrs = {"input_dim": 1, "output_dim": 0, **extra_weight_attrs}
        register(layer, "weight", torch.empty(rows, own // 2, dtype=torch.uint8), **attrs)
        for name in ("scale", "offset")[: 1 + self.has_offset]:
            data = torch.empty(rows, own // self.group, dtype=self.scale_dtype)
            register(layer, name, data, **attrs)
        if self.is_ordered:
            register(layer, "order", torch.empty(own, dtype=torch.int64), **extra_weight_attrs)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.is_ordered:
            x = x.index_select(-1, layer.get_parameter("order"))
        offset = layer.get_parameter("offset") if self.has_offset else None
        output: Tensor = ir.ops.linear_w4a16(x, layer.weight, layer.scale, offset, bias)
        return output


@dataclass(frozen=True)
class Weight8Method:
    """Weights of 8 bits with a scale for each row: ``ir.ops.linear_w8a16``.

    Parameters: ``weight`` ``(out, in)``, ``scale`` ``(out,)`` float32.

    Attributes:
        dtype: int8 or float8_e4m3fn.
    """

    dtype: torch.dtype

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows = sum(output_partition_sizes)
        weight = torch.empty(rows, input_size_per_partition, dtype=self.dtype)
        register(layer, "weight", weight, input_dim=1, output_dim=0, **extra_weight_attrs)
        scale = torch.empty(rows, dtype=torch.float32)
        register(layer, "scale", scale, output_dim=0, **extra_weight_attrs)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = ir.ops.linear_w8a16(x, layer.weight, layer.scale, bias)
        return output


@dataclass(frozen=True)
class BlockMethod:
    """Weights in blocks of GGUF, as the file has them: ``ir.ops.linear_q``.

    Parameters: ``weight`` ``(out, bytes of a row)`` uint8.

    Attributes:
        format: as ``linear_q`` calls it, such as ``"q4_k"``.
    """

    format: str

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        block = GGUF_BLOCKS[self.format]
        check_share(layer, input_size_per_partition, input_size, block.columns, "block")
        size = input_size_per_partition // block.columns * block.size
        data = torch.empty(sum(output_partition_sizes), size, dtype=torch.uint8)
        register(layer, "weight", data, input_dim=1, output_dim=0, **extra_weight_attrs)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = ir.ops.linear_q(x, layer.weight, bias, self.format)
        return output


class SeparatePartsMethod:
    """Merged outputs whose weights have different forms: one product each, concatenated.

    Each part is a child module with its own parameters.

    Args:
        methods: of each part, by the name of its child.
        shards: of each part, which share of its rows this rank has, and the number of shares.
    """

    def __init__(
        self, methods: dict[str, LinearMethod | None], shards: dict[str, tuple[int, int]]
    ) -> None:
        self.methods = {name: own or UnquantizedLinearMethod() for name, own in methods.items()}
        self.shards = shards

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        for (name, method), rows in zip(self.methods.items(), output_partition_sizes, strict=True):
            index, count = self.shards[name]
            part = LinearPart(name, rows, index, count)
            method.create_weights(
                part,
                input_size_per_partition,
                [rows],
                input_size,
                rows * count,
                params_dtype,
                weight_loader=part.weight_loader,
            )
            layer.add_module(name, part)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = [layer.get_submodule(name) for name in self.methods]
        sizes = [int(part.rows) for part in parts if isinstance(part, LinearPart)]
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        outputs = [
            method.apply(part, x, own)
            for part, method, own in zip(parts, self.methods.values(), biases, strict=True)
        ]
        return torch.cat(outputs, -1)


class LinearPart(nn.Module):
    """The weights of one output of a merged layer; the layer multiplies by them.

    Args:
        prefix: its name, for errors.
        rows: the features of this rank.
        index: which of the ranks' shares of its rows it has.
        count: the number of shares.
    """

    def __init__(self, prefix: str, rows: int, index: int, count: int) -> None:
        super().__init__()
        self.prefix, self.rows, self.index, self.count = prefix, rows, index, count

    def weight_loader(self, param: nn.Parameter, loaded: Tensor) -> None:
        """Fill *param* from the whole tensor, or from this rank's rows of it."""
        what = describe(self, self.prefix, param)
        fill(param.data, loaded, what, dim_of(param, "output_dim"), self.index, self.count)
