"""The strategies of a linear layer: weight format and computation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.ir.ops.low_bit import GGUF_BLOCKS
from opweave.layers.parallel import describe, dim_of, fill, set_weight_attrs
from opweave.layers.registry import LayerArgumentError, ShardingError
from opweave.registration import bound

# The strategy of a linear layer: weight format and computation. Quantization replaces it.


class LinearMethod(Protocol):
    """Creates the parameters of a linear layer, and applies them. Layers may share an instance."""

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
        """Register the parameters on *layer*.

        Each parameter gets ``extra_weight_attrs`` as attributes, which include its loader, and the
        attributes ``output_dim`` and ``input_dim`` for the dimensions that it has. Ranks shard
        along these. Along ``output_dim``, merged outputs must have lengths proportional to their
        sizes.

        Args:
            layer: the linear layer.
            input_size_per_partition: input features of this rank.
            output_partition_sizes: output features of this rank, for each merged output.
            input_size, output_size: features on all ranks together.
            params_dtype: the dtype of weights that are not quantized.
        """

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``, ``(..., outputs of this rank)``."""


class QuantConfig(Protocol):
    """Chooses a method for each layer of a model."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethod | None:
        """Return the method for *layer*, called *prefix* in the model; None: not quantized."""


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a linear layer on one rank.

    Attributes:
        layer: the name of the layer, for errors.
        inputs: the number of input features of this rank; *all_inputs*, on all ranks together.
        outputs: the output features of this rank, for each merged output.
        dtype: the dtype of weights that are not quantized.
    """

    layer: str
    inputs: int
    all_inputs: int
    outputs: list[int]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """The number of output features of this rank."""
        return sum(self.outputs)

    def check_share(self, unit: int, unit_name: str) -> None:
        """Raise ShardingError if a rank's share of the inputs is not made of whole units."""
        if self.inputs != self.all_inputs and self.inputs % unit:
            raise ShardingError(
                f"{self.layer}: a rank's {self.inputs} of {self.all_inputs} inputs are not a "
                f"multiple of the {unit_name} of {unit} in the quantized weight. Use fewer "
                "tensor-parallel ranks."
            )


_OUTPUT_DIM, _BOTH_DIMS = {"output_dim": 0}, {"input_dim": 1, "output_dim": 0}


class Weight(NamedTuple):
    """A parameter of a linear layer on one rank, and the dimensions that are sharded."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: Mapping[str, int] = _BOTH_DIMS


class MethodOfWeights:
    """Base class of the methods that create a fixed list of parameters."""

    def weights(self, sizes: LayerSizes) -> Iterator[Weight]:
        """Yield the parameters of a layer of these *sizes*.

        Raises:
            ShardingError: the weight cannot be divided over the ranks.
        """
        raise NotImplementedError

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
        """Register the parameters on *layer*; see :class:`LinearMethod`."""
        sizes = LayerSizes(
            str(getattr(layer, "prefix", "")) or type(layer).__name__,
            input_size_per_partition,
            input_size,
            list(output_partition_sizes),
            params_dtype,
        )
        for weight in self.weights(sizes):
            data = torch.empty(weight.shape, dtype=weight.dtype)
            parameter = nn.Parameter(data, requires_grad=False)
            set_weight_attrs(parameter, **weight.dims, **extra_weight_attrs)
            layer.register_parameter(weight.name, parameter)


class UnquantizedLinearMethod(MethodOfWeights):
    """One weight ``(out, in)``, multiplied by ``ir.ops.linear``."""

    def weights(self, sizes: LayerSizes) -> Iterator[Weight]:
        yield Weight("weight", (sizes.rows, sizes.inputs), sizes.dtype)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = ir.ops.linear(x, layer.weight, bias)
        return output


class DeferredMethod(UnquantizedLinearMethod):
    """A weight without memory, until ``LinearBase.set_quant_method`` replaces it."""

    def create_weights(self, *args: Any, **extra_weight_attrs: Any) -> None:
        with torch.device("meta"):
            super().create_weights(*args, **extra_weight_attrs)


_defers: ContextVar[bool] = ContextVar("opweave_defers_weights", default=False)


def deferred_weights() -> AbstractContextManager[None]:
    """Inside the block, layers without a *quant_config* get no memory for weights.

    A checkpoint's tensors decide how each is kept, and the names of layers are known only when the
    model is whole.
    """
    return bound(_defers, True)


def weights_are_deferred() -> bool:
    """Return whether this is inside a block of :func:`deferred_weights`."""
    return _defers.get()


def default_method() -> LinearMethod:
    """Return the method of a layer for which no *quant_config* chooses one."""
    return DeferredMethod() if _defers.get() else UnquantizedLinearMethod()


# Linear methods of quantized checkpoints: weights of 4 and 8 bits, activations of 16 or 32.
#
# Methods compare equal when their parameters have the same form, so that merged outputs of one
# form share one product.


@dataclass(frozen=True)
class GroupedInt4Method(MethodOfWeights):
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

    def weights(self, sizes: LayerSizes) -> Iterator[Weight]:
        sizes.check_share(self.group, "group")
        if self.is_ordered and sizes.inputs != sizes.all_inputs:
            raise ShardingError(
                f"{sizes.layer}: the quantized weight "
                "reorders its inputs (act-order), which cannot be divided over tensor-parallel "
                "ranks. Use one rank."
            )
        yield Weight("weight", (sizes.rows, sizes.inputs // 2), torch.uint8)
        for name in ("scale", "offset")[: 1 + self.has_offset]:
            yield Weight(name, (sizes.rows, sizes.inputs // self.group), self.scale_dtype)
        if self.is_ordered:
            yield Weight("order", (sizes.inputs,), torch.int64, {})

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.is_ordered:
            x = x.index_select(-1, layer.get_parameter("order"))
        offset = layer.get_parameter("offset") if self.has_offset else None
        output: Tensor = ir.ops.linear_w4a16(x, layer.weight, layer.scale, offset, bias)
        return output


@dataclass(frozen=True)
class Weight8Method(MethodOfWeights):
    """Weights of 8 bits with a scale for each row: ``ir.ops.linear_w8a16``.

    Parameters: ``weight`` ``(out, in)``, ``scale`` ``(out,)`` float32.

    Attributes:
        dtype: int8 or float8_e4m3fn.
    """

    dtype: torch.dtype

    def weights(self, sizes: LayerSizes) -> Iterator[Weight]:
        yield Weight("weight", (sizes.rows, sizes.inputs), self.dtype)
        yield Weight("scale", (sizes.rows,), torch.float32, _OUTPUT_DIM)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = ir.ops.linear_w8a16(x, layer.weight, layer.scale, bias)
        return output


@dataclass(frozen=True)
class BlockMethod(MethodOfWeights):
    """Weights in blocks of GGUF, as the file has them: ``ir.ops.linear_q``.

    Parameters: ``weight`` ``(out, bytes of a row)`` uint8.

    Attributes:
        format: as ``linear_q`` calls it, such as ``"q4_k"``.
    """

    format: str

    def weights(self, sizes: LayerSizes) -> Iterator[Weight]:
        block = GGUF_BLOCKS[self.format]
        sizes.check_share(block.columns, "block")
        row_bytes = sizes.inputs // block.columns * block.size
        yield Weight("weight", (sizes.rows, row_bytes), torch.uint8)

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
        self.methods = {
            name: method or UnquantizedLinearMethod() for name, method in methods.items()
        }
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
            method.apply(part, x, part_bias)
            for part, method, part_bias in zip(parts, self.methods.values(), biases, strict=True)
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
        label = describe(self, self.prefix, param)
        fill(param.data, loaded, label, dim_of(param, "output_dim"), self.index, self.count)


# Linear method of quantized checkpoints with weights and activations of 8 bits.


GROUP = 128
"""Columns that share a scale, of activations and of blocks of weights."""


@dataclass(frozen=True)
class ActivationScheme:
    """How activations are quantized to 8 bits.

    Attributes:
        is_static: scales are parameters, one for each merged output; else each token has a scale.
        upper_bound: of the magnitude that determines a token's scale; float8 only.
        use_ue8m0: scales are rounded up to powers of two; for groups only.
    """

    is_static: bool = False
    upper_bound: float | None = None
    use_ue8m0: bool = False


@dataclass(frozen=True)
class W8A8Method(MethodOfWeights):
    """Weights and activations of 8 bits: ``ir.ops.linear_w8a8``.

    Parameters: ``weight`` ``(out, in)``; ``scale`` float32, ``(out,)``, or ``(out / block_rows, in
    / 128)`` for blocks; ``input_scale`` float32 ``(merged outputs,)``, of a static scheme.

    Attributes:
        dtype: int8 or float8_e4m3fn, of weights and activations.
        activations: how activations are quantized. With blocks of weights, each group of 128
            columns of a token has a scale.
        block_rows: the rows of a block of weights; None: each row has a scale. A checkpoint has
            128; a layer keeps fewer if its merged or sharded outputs are not multiples of 128.
    """

    dtype: torch.dtype
    activations: ActivationScheme = ActivationScheme()
    block_rows: int | None = None

    def weights(self, sizes: LayerSizes) -> Iterator[Weight]:
        yield Weight("weight", (sizes.rows, sizes.inputs), self.dtype)
        if self.block_rows is None:
            yield Weight("scale", (sizes.rows,), torch.float32, _OUTPUT_DIM)
        else:
            if self.for_outputs(sizes.outputs) != self:
                raise LayerArgumentError(
                    f"block_rows={self.block_rows} does not divide the outputs {sizes.outputs}; "
                    "use for_outputs."
                )
            sizes.check_share(GROUP, "block")
            blocks = (sizes.rows // self.block_rows, sizes.inputs // GROUP)
            yield Weight("scale", blocks, torch.float32)
        if self.activations.is_static:
            yield Weight("input_scale", (len(sizes.outputs),), torch.float32, {})

    def for_outputs(self, sizes: Sequence[int]) -> W8A8Method:
        """Return the method whose blocks do not cross the bounds of outputs of these *sizes*."""
        if self.block_rows is None:
            return self
        return replace(self, block_rows=gcd(self.block_rows, *sizes))

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        input_scale = layer.get_parameter("input_scale") if self.activations.is_static else None
        codes, x_scale = self.quantized(x, input_scale)
        output: Tensor = ir.ops.linear_w8a8(
            codes, x_scale, layer.weight, layer.scale, bias, x.dtype
        )
        return output

    def quantized(self, x: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return activations of 8 bits and their scales, as ``linear_w8a8`` takes them.

        Args:
            x: ``(..., in)``.
            input_scale: of a static scheme.
        """
        is_int, ops = self.dtype is torch.int8, ir.ops
        if input_scale is not None:
            largest = input_scale.max()  # one scale for all merged outputs, as in vLLM
            quantize = ops.static_quant_int8 if is_int else ops.static_quant_fp8
            return quantize(x, largest), largest
        if self.block_rows is not None:
            codes, scale = ops.per_token_group_quant_fp8(x, GROUP, self.activations.use_ue8m0)
        elif is_int:
            codes, scale = ops.dynamic_per_token_quant_int8(x)
        else:
            upper = self.activations.upper_bound
            bound = None if upper is None else torch.full((1,), upper, device=x.device)
            codes, scale = ops.dynamic_per_token_quant_fp8(x, bound)
        return codes, scale
