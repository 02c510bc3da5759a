"""A linear layer whose outputs are sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opweave.layers.errors import LayerArgumentError, WeightLoadError
from opweave.layers.linear.base import LinearBase, Result, ShardId
from opweave.layers.linear.method import QuantConfig
from opweave.layers.pluggable_layer import PluggableLayer
from opweave.layers.weight_loading import dim_of, fill


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


@PluggableLayer.register("column_parallel_linear")
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
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )
        self.gather_output = gather_output
        self.parts = self._parts()
        sizes = [part.size for part in self.parts.values()]
        self._create_parameters(bias, input_size, sizes, output_dim=0)

    def _parts(self) -> Mapping[ShardId, Part]:
        """Return this rank's shard of each merged output, in order."""
        return {0: self._part(self.output_size, "output_size")}

    def _part(self, size: int, what: str) -> Part:
        return Part(self.parallel.divide(size, what), self.tp_rank, self.tp_size)

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
        dim, what = dim_of(param, "output_dim"), self._describe(param)
        if dim is not None and loaded_weight.ndim == param.ndim:
            rows = [self._rows(key, param.shape[dim])[1] for key in self.parts]
            counts = [part.count for part in self.parts.values()]
            whole = [size * count for size, count in zip(rows, counts, strict=True)]
            if loaded_weight.shape[dim] == sum(whole):
                split = torch.split_with_sizes(loaded_weight, whole, dim)
                for key, tensor in zip(self.parts, split, strict=True):
                    self._load_part(param, tensor, key)
                return None
        # This rank's part; or no fit, and then the error names the shapes of a layer without
        # replicated heads, the only ones with different counts.
        return fill(param.data, loaded_weight, what, dim, self.tp_rank, self.tp_size)

    def _load_part(self, param: nn.Parameter, loaded: Tensor, shard_id: ShardId) -> None:
        if shard_id not in self.parts:
            known = ", ".join(map(repr, self.parts))
            raise LayerArgumentError(
                f"{self._describe(param)}: loaded_shard_id={shard_id!r} is not one of {known}."
            )
        part, dim = self.parts[shard_id], dim_of(param, "output_dim")
        what = f"{self._describe(param)}, part {shard_id!r},"
        if dim is None and loaded.numel() == 1 and param.shape == (len(self.parts),):
            # One number for each merged output, such as the scale of its weight.
            place = list(self.parts).index(shard_id)
            return fill(param.data[place : place + 1], loaded, what)
        if dim is None:
            return fill(param.data, loaded, what)
        target = param.data.narrow(dim, *self._rows(shard_id, param.shape[dim]))
        return fill(target, loaded, what, dim, part.index, part.count)

    def _rows(self, shard_id: ShardId, rows: int) -> tuple[int, int]:
        """Return start and length of a merged output in a parameter with *rows* rows."""
        sizes = {key: part.size for key, part in self.parts.items()}
        keys, total = list(sizes), sum(sizes.values())
        start = sum(sizes[key] for key in keys[: keys.index(shard_id)])
        if start * rows % total or sizes[shard_id] * rows % total:
            raise WeightLoadError(
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
