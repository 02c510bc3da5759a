"""Linear layers, replicated or sharded over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opweave.layers import registry
from opweave.layers.linear_methods import LinearMethod, QuantConfig, default_method
from opweave.layers.parallel import (
    ALONE,
    TensorParallel,
    current_tensor_parallel,
    describe,
    dim_of,
    fill,
    set_weight_attrs,
)

# Base class of layers whose weights a linear method creates and applies.


class HasLinearMethod(registry.PluggableLayer):
    """A layer whose weights can be kept in another way before they are loaded.

    Attributes:
        quant_method: creates and applies the weights.
        params_dtype: dtype of weights that are not quantized.
    """

    quant_method: LinearMethod
    params_dtype: torch.dtype

    def set_quant_method(self, method: LinearMethod) -> None:
        """Keep the weights as *method* does; they are uninitialized afterwards."""
        for name in self._weight_names:  # others, such as a bias, stay
            del self._parameters[name]
        self.quant_method = method
        self._create_weights()

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Fill *param*, a parameter of this layer.

        Raises:
            WeightLoadError: the shape of *loaded_weight* does not fit.
        """
        raise NotImplementedError

    def _weight_sizes(self) -> tuple[int, Sequence[int], int, int]:
        """Return this rank's inputs and outputs, and the inputs and outputs of all ranks."""
        raise NotImplementedError

    def _create_bias(self, size: int | None, **attrs: object) -> None:
        """Create the parameter ``bias`` of this *size*; None: it is None."""
        bias = None
        if size is not None:
            values = torch.empty(size, dtype=self.params_dtype)
            bias = nn.Parameter(values, requires_grad=False)
            set_weight_attrs(bias, weight_loader=self.weight_loader, **attrs)
        self.register_parameter("bias", bias)

    def _create_weights(self) -> None:
        others = set(self._parameters)
        self.quant_method.create_weights(
            self, *self._weight_sizes(), self.params_dtype, weight_loader=self.weight_loader
        )
        self._weight_names = self._parameters.keys() - others


# Base class of linear layers.


ShardId = int | str
Result = Tensor | tuple[Tensor, Tensor | None]


def tensor_of(result: Result) -> Tensor:
    """Return the tensor in the result of a linear layer."""
    return result[0] if isinstance(result, tuple) else result


class LinearBase(HasLinearMethod):
    """``y = x @ weight.T + bias``, possibly sharded over a tensor-parallel group.

    Parameters are uninitialized and do not require gradients. ``param.weight_loader(param,
    tensor)`` fills them from a checkpoint's tensor or from this rank's shard of it.

    Args:
        input_size: features of ``x``, on all ranks together.
        output_size: features of ``y``, on all ranks together.
        bias: whether to add a bias.
        skip_bias_add: return the bias instead of adding it, for a caller that adds it later.
        params_dtype: dtype of the parameters; by default ``torch.get_default_dtype()``.
        quant_config: chooses the quantization of the weights; by default none.
        prefix: name of the layer in the model, for *quant_config* and errors.
        return_bias: return ``(y, bias or None)`` instead of ``y``. The bias is None unless
            *skip_bias_add* is set.
        disable_tp: replicate the layer on every rank.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, input_size: int, output_size: int, skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None, quant_config: QuantConfig | None = None,
        prefix: str = "", *, return_bias: bool = True, disable_tp: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add, self.return_bias = skip_bias_add, return_bias
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_config, self.prefix, self.disable_tp = quant_config, prefix, disable_tp
        self.parallel = ALONE if disable_tp else current_tensor_parallel()
        self.tp_rank, self.tp_size = self.parallel.rank, self.parallel.size
        chosen = None if quant_config is None else quant_config.get_quant_method(self, prefix)
        self.quant_method = chosen or default_method()

    def extra_repr(self) -> str:
        """Return sizes, for ``repr(model)``."""
        ranks = f", rank={self.tp_rank} of {self.tp_size}" if self.tp_size > 1 else ""
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}{ranks}"

    def _create_parameters(
        self, bias: bool, input_size: int, output_sizes: Sequence[int], **bias_attrs: object
    ) -> None:
        """Create weight and bias for a rank's *input_size* and *output_sizes*."""
        self.input_size_per_partition = input_size
        self.output_partition_sizes = list(output_sizes)
        self.output_size_per_partition = sum(output_sizes)
        self._create_weights()
        self._create_bias(self.output_size_per_partition if bias else None, **bias_attrs)

    def _weight_sizes(self) -> tuple[int, Sequence[int], int, int]:
        outputs = self.output_partition_sizes
        return self.input_size_per_partition, outputs, self.input_size, self.output_size

    def _result(self, y: Tensor, bias: Tensor | None) -> Result:
        if not self.return_bias:
            return y
        return y, bias if self.skip_bias_add else None

    def _describe(self, param: Tensor) -> str:
        return describe(self, self.prefix, param)


# A linear layer that is replicated on every rank.


@registry.PluggableLayer.register("replicated_linear")
class ReplicatedLinear(LinearBase):
    """A linear layer that is the same on every rank. Arguments: see :class:`LinearBase`.

    Composed of ``ir.ops.linear``.
    """

    def __init__(
        self, input_size: int, output_size: int, bias: bool = True, skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None, quant_config: QuantConfig | None = None,
        prefix: str = "", *, return_bias: bool = True, disable_tp: bool = False,
    ) -> None:  # fmt: skip
        common = (skip_bias_add, params_dtype, quant_config, prefix)
        super().__init__(
            input_size, output_size, *common, return_bias=return_bias, disable_tp=disable_tp
        )
        self._create_parameters(bias, input_size, [output_size])

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Fill *param* with all of *loaded_weight*.

        Raises:
            WeightLoadError: *loaded_weight* has another shape.
        """
        fill(param.data, loaded_weight, self._describe(param))

    def forward(self, x: Tensor) -> Result:
        """Map ``(..., input_size)`` to ``(..., output_size)``; see *return_bias*."""
        y = self.quant_method.apply(self, x, None if self.skip_bias_add else self.bias)
        return self._result(y, self.bias)


# A linear layer whose outputs are sharded over ranks.


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's shard of one merged output.

    Attributes:
        size: the number of features.
        index: the index of the shard.
        count: the number of shards of the output.
    """

    size: int
    index: int
    count: int


@registry.PluggableLayer.register("column_parallel_linear")
class ColumnParallelLinear(LinearBase):
    """A linear layer sharded by outputs: each rank has some rows of weight and bias.

    Composed of ``ir.ops.linear``, and ``all_gather`` with *gather_output*. Source: Megatron-LM,
    arXiv:1909.08053.

    Args:
        gather_output: return the features of all ranks, and their bias.

    See :class:`LinearBase` for the others.

    Raises:
        ShardingError: the number of ranks does not divide *output_size*.
    """

    def __init__(
        self, input_size: int, output_size: int, bias: bool = True, gather_output: bool = False,
        skip_bias_add: bool = False, params_dtype: torch.dtype | None = None,
        quant_config: QuantConfig | None = None, prefix: str = "", *, return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:  # fmt: skip
        common = (skip_bias_add, params_dtype, quant_config, prefix)
        super().__init__(
            input_size, output_size, *common, return_bias=return_bias, disable_tp=disable_tp
        )
        self.gather_output = gather_output
        self.parts = self._parts()
        sizes = [part.size for part in self.parts.values()]
        self._create_parameters(bias, input_size, sizes, output_dim=0)

    def _parts(self) -> Mapping[ShardId, Part]:
        """Return this rank's shard of each merged output, in order."""
        return {0: self._part(self.output_size, "output_size")}

    def _part(self, size: int, label: str) -> Part:
        return Part(self.parallel.divide(size, label), self.tp_rank, self.tp_size)

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: Tensor, loaded_shard_id: ShardId | None = None
    ) -> None:
        """Fill *param*, or the rows of one merged output.

        Args:
            param: a parameter of this layer.
            loaded_weight: the tensor for all ranks, or this rank's shard.
            loaded_shard_id: the merged output that *loaded_weight* belongs to; None: it contains
                all of them, concatenated.

        Raises:
            WeightLoadError: the shape of *loaded_weight* does not fit.
            LayerArgumentError: the merged output does not exist.
        """
        if loaded_shard_id is not None:
            return self._load_part(param, loaded_weight, loaded_shard_id)
        dim, label = dim_of(param, "output_dim"), self._describe(param)
        if dim is not None and loaded_weight.ndim == param.ndim:
            rows = [self._rows(key, param.shape[dim])[1] for key in self.parts]
            counts = [part.count for part in self.parts.values()]
            whole = [size * count for size, count in zip(rows, counts, strict=True)]
            if loaded_weight.shape[dim] == sum(whole):
                split = torch.split_with_sizes(loaded_weight, whole, dim)
                for key, tensor in zip(self.parts, split, strict=True):
                    self._load_part(param, tensor, key)
                return None
        # Of merged outputs that are divided differently, only this rank's shard is left to accept.
        is_even = all(part.count == self.tp_size for part in self.parts.values())
        shards = (dim, self.tp_rank, self.tp_size) if is_even else ()
        return fill(param.data, loaded_weight, label, *shards)

    def _load_part(self, param: nn.Parameter, loaded: Tensor, shard_id: ShardId) -> None:
        if shard_id not in self.parts:
            keys = ", ".join(map(repr, self.parts))
            raise registry.LayerArgumentError(
                f"{self._describe(param)}: loaded_shard_id={shard_id!r} is not one of {keys}."
            )
        part, dim = self.parts[shard_id], dim_of(param, "output_dim")
        label = f"{self._describe(param)}, part {shard_id!r},"
        if dim is None and loaded.numel() == 1 and param.shape == (len(self.parts),):
            # One number for each merged output, such as the scale of its weight.
            place = list(self.parts).index(shard_id)
            return fill(param.data[place : place + 1], loaded, label)
        if dim is None:
            return fill(param.data, loaded, label)
        target = param.data.narrow(dim, *self._rows(shard_id, param.shape[dim]))
        return fill(target, loaded, label, dim, part.index, part.count)

    def _rows(self, shard_id: ShardId, rows: int) -> tuple[int, int]:
        """Return start and length of a merged output in a parameter with *rows* rows."""
        sizes = {key: part.size for key, part in self.parts.items()}
        keys, total = list(sizes), sum(sizes.values())
        start = sum(sizes[key] for key in keys[: keys.index(shard_id)])
        if start * rows % total or sizes[shard_id] * rows % total:
            raise registry.WeightLoadError(
                f"{type(self).__name__} {self.prefix}: {rows} rows of a parameter cannot be shared "
                f"in proportion to the merged outputs, {list(sizes.values())}. Its quant_method "
                "should give it another shape, or a weight_loader of its own."
            )
        return start * rows // total, sizes[shard_id] * rows // total

    def forward(self, x: Tensor) -> Result:
        """Return ``(..., features)``, of this rank or, with *gather_output*, of all ranks.

        With *return_bias*, return the bias too.

        Args:
            x: ``(..., input_size)``.
        """
        y = self.quant_method.apply(self, x, None if self.skip_bias_add else self.bias)
        bias: Tensor | None = self.bias if self.skip_bias_add else None
        if self.gather_output and self.tp_size > 1:
            y = self._gather(y)
            bias = None if bias is None else self._gather(bias)
        return self._result(y, bias)

    def _gather(self, y: Tensor) -> Tensor:
        """Gather each merged output separately, so that the order is the same as on one rank."""
        outputs = torch.split_with_sizes(y, self.output_partition_sizes, -1)
        gathered = [self.parallel.all_gather(output, -1) for output in outputs]
        return gathered[0] if len(gathered) == 1 else torch.cat(gathered, -1)


# Several column-parallel layers with the same input, computed in one matrix product.


@registry.PluggableLayer.register("merged_column_parallel_linear")
class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers with concatenated outputs; each is sharded separately.

    The weight loaders take the index of an output (``0``, ``1``, …) after the tensor, or only the
    tensor if it contains all outputs.

    Args:
        output_sizes: the features of each output, on all ranks together.

    See :class:`ColumnParallelLinear` for the others.

    Raises:
        ShardingError: the number of ranks does not divide one of *output_sizes*.
        LayerArgumentError: *output_sizes* is empty.
    """

    def __init__(
        self, input_size: int, output_sizes: Sequence[int], bias: bool = True,
        gather_output: bool = False, skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None, quant_config: QuantConfig | None = None,
        prefix: str = "", *, return_bias: bool = True, disable_tp: bool = False,
    ) -> None:  # fmt: skip
        if not output_sizes:
            raise registry.LayerArgumentError(
                "output_sizes is empty; it has one size for each output."
            )
        self.output_sizes = list(output_sizes)
        common = (bias, gather_output, skip_bias_add, params_dtype, quant_config, prefix)
        total = sum(output_sizes)
        super().__init__(input_size, total, *common, return_bias=return_bias, disable_tp=disable_tp)

    def _parts(self) -> Mapping[ShardId, Part]:
        return {
            i: self._part(size, f"output_sizes[{i}]") for i, size in enumerate(self.output_sizes)
        }


# The projections of queries, keys and values, computed in one matrix product.


@registry.PluggableLayer.register("qkv_parallel_linear")
class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections with concatenated outputs, sharded by heads.

    If there are more ranks than key heads, neighboring ranks share one. The weight loaders take
    ``"q"``, ``"k"`` or ``"v"`` after the tensor, or only the tensor if it contains all three.

    Args:
        hidden_size: features of the input.
        head_size: features of a head.
        total_num_heads: heads of queries on all ranks together.
        total_num_kv_heads: heads of keys, and of values; default: *total_num_heads*.
        v_head_size: features of a head of values; default: *head_size*.

    See :class:`ColumnParallelLinear` for the others.

    Attributes:
        num_heads, num_kv_heads: the numbers of heads of this rank.
        num_kv_head_replicas: the number of ranks that share a key head.

    Raises:
        ShardingError: the heads cannot be divided among the ranks, or the ranks among the key
            heads.
    """

    def __init__(
        self, hidden_size: int, head_size: int, total_num_heads: int,
        total_num_kv_heads: int | None = None, bias: bool = True, skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None, quant_config: QuantConfig | None = None,
        prefix: str = "", *, return_bias: bool = True, disable_tp: bool = False,
        v_head_size: int | None = None,
    ) -> None:  # fmt: skip
        parallel = ALONE if disable_tp else current_tensor_parallel()
        kv_heads = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        self.hidden_size, self.head_size = hidden_size, head_size
        self.v_head_size = head_size if v_head_size is None else v_head_size
        self.total_num_heads, self.total_num_kv_heads = total_num_heads, kv_heads
        self.num_heads = parallel.divide(total_num_heads, "total_num_heads")
        self.num_kv_head_replicas = _replicas(kv_heads, parallel)
        self.num_kv_heads = kv_heads * self.num_kv_head_replicas // parallel.size
        common = (bias, False, skip_bias_add, params_dtype, quant_config, prefix)
        total = total_num_heads * head_size + kv_heads * (head_size + self.v_head_size)
        super().__init__(
            hidden_size, total, *common, return_bias=return_bias, disable_tp=disable_tp
        )

    def _parts(self) -> Mapping[ShardId, Part]:
        replicas = self.num_kv_head_replicas
        kv_share = self.tp_rank // replicas, self.tp_size // replicas
        return {
            "q": Part(self.num_heads * self.head_size, self.tp_rank, self.tp_size),
            "k": Part(self.num_kv_heads * self.head_size, *kv_share),
            "v": Part(self.num_kv_heads * self.v_head_size, *kv_share),
        }


def _replicas(kv_heads: int, parallel: TensorParallel) -> int:
    """Return the number of ranks that share a key head."""
    if parallel.size <= kv_heads:
        parallel.divide(kv_heads, "total_num_kv_heads")
        return 1
    if kv_heads < 1 or parallel.size % kv_heads:
        raise registry.ShardingError(
            f"total_num_kv_heads={kv_heads} cannot be shared by {parallel.size} tensor-parallel "
            "ranks: each must have the same number of heads, or each head the same number of ranks."
        )
    return parallel.size // kv_heads


# A linear layer whose inputs are sharded over ranks.


@registry.PluggableLayer.register("row_parallel_linear")
class RowParallelLinear(LinearBase):
    """A linear layer sharded by inputs: each rank has some columns, and the outputs are summed.

    Composed of ``ir.ops.linear`` and ``all_reduce``. The bias is added once: on rank 0, before the
    sum. Source: Megatron-LM, arXiv:1909.08053.

    Args:
        input_is_parallel: ``x`` has only this rank's features, as a column-parallel layer returns
            them; False: ``x`` has all features, and the layer selects this rank's.
        reduce_results: sum over the ranks; False: return this rank's partial sum.

    See :class:`LinearBase` for the others.

    Raises:
        ShardingError: the number of ranks does not divide *input_size*.
        LayerArgumentError: *reduce_results* is False, and a bias would be added to a partial sum.
    """

    def __init__(
        self, input_size: int, output_size: int, bias: bool = True, input_is_parallel: bool = True,
        skip_bias_add: bool = False, reduce_results: bool = True,
        params_dtype: torch.dtype | None = None, quant_config: QuantConfig | None = None,
        prefix: str = "", *, return_bias: bool = True, disable_tp: bool = False,
    ) -> None:  # fmt: skip
        if bias and not reduce_results and not skip_bias_add:
            raise registry.LayerArgumentError(
                "reduce_results=False returns a part of the sum, to which a bias should not be "
                "added; use skip_bias_add=True and add it after the sum, or bias=False."
            )
        common = (skip_bias_add, params_dtype, quant_config, prefix)
        super().__init__(
            input_size, output_size, *common, return_bias=return_bias, disable_tp=disable_tp
        )
        self.input_is_parallel, self.reduce_results = input_is_parallel, reduce_results
        local_size = self.parallel.divide(input_size, "input_size")
        self._create_parameters(bias, local_size, [output_size])

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Fill *param* from the whole tensor, or from this rank's columns.

        Raises:
            WeightLoadError: *loaded_weight* has another shape.
        """
        dim, label = dim_of(param, "input_dim"), self._describe(param)
        fill(param.data, loaded_weight, label, dim, self.tp_rank, self.tp_size)

    def forward(self, x: Tensor) -> Result:
        """Return ``(..., output_size)``, and the bias with *return_bias*.

        Args:
            x: ``(..., input_size / ranks)``, or ``(..., input_size)`` without *input_is_parallel*.
        """
        if not self.input_is_parallel and self.tp_size > 1:
            local_size = self.input_size_per_partition
            x = x.narrow(-1, self.tp_rank * local_size, local_size)
        adds_bias = self.tp_rank == 0 and not self.skip_bias_add
        y = self.quant_method.apply(self, x, self.bias if adds_bias else None)
        if self.reduce_results and self.tp_size > 1:
            y = self.parallel.all_reduce(y)
        return self._result(y, self.bias)
