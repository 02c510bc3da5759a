"""An embedding with the vocabulary sharded over ranks."""

from __future__ import annotations

from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.layers.errors import LayerArgumentError, WeightLoadError
from opweave.layers.linear import LinearMethod, QuantConfig, UnquantizedLinearMethod
from opweave.layers.linear.has_method import HasLinearMethod
from opweave.layers.parallel import ALONE, current_tensor_parallel
from opweave.layers.pluggable_layer import PluggableLayer
from opweave.layers.vocab_shard import VocabShard
from opweave.layers.weight_loading import describe, dim_of, fill


@runtime_checkable
class EmbeddingMethod(LinearMethod, Protocol):
    """The strategy of a vocabulary table: a :class:`LinearMethod` that can also look up rows."""

    def embedding(self, layer: VocabParallelEmbedding, input_ids: Tensor) -> Tensor:
        """Return the rows of *input_ids*, and zeros for ids that are not in ``layer.shard``."""


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod):
    """One table ``(rows, embedding_dim)``: ``ir.ops.embedding`` and ``ir.ops.masked_embedding``."""

    def embedding(self, layer: VocabParallelEmbedding, input_ids: Tensor) -> Tensor:
        shard = layer.shard
        if shard.size == 1 and shard.num_added == 0:
            whole: Tensor = ir.ops.embedding(input_ids, layer.weight)
            return whole
        first = shard.org_start, shard.org_end
        second = shard.added_start, shard.added_end, shard.org_rows
        own: Tensor = ir.ops.masked_embedding(input_ids, layer.weight, *first, *second)
        return own


@PluggableLayer.register("vocab_parallel_embedding")
class VocabParallelEmbedding(HasLinearMethod):
    """A padded embedding table, sharded over the ranks by rows.

    Composed of ``ir.ops.embedding`` or ``ir.ops.masked_embedding``, and ``all_reduce``. For any
    number of ranks, the result equals the lookup in the whole table, bit for bit. The rows of added
    ids follow the padding of the base ids (see :class:`VocabShard`). ``weight.weight_loader`` fills
    the parameter. Source: Megatron-LM, arXiv:1909.08053.

    Args:
        num_embeddings: the number of ids, including added ones.
        embedding_dim: the size of a vector.
        params_dtype: dtype of the table; by default ``torch.get_default_dtype()``.
        org_num_embeddings: the number of ids without the added ones; by default all.
        padding_size: the numbers of rows are padded to a multiple of this size.
        quant_config: chooses the quantization of the table; by default none.
        prefix: name of the layer in the model, for *quant_config* and errors.
        disable_tp: replicate the table on every rank.
        reduce_results: sum over the ranks; False: return this rank's rows, and zeros for others.

    Attributes:
        shard: the ids and rows of this rank.
        org_vocab_size_padded, num_embeddings_padded: with padding, on all ranks together.
        num_embeddings_per_partition: the rows of this rank.

    Raises:
        ShardingError: the number of ranks does not divide the padded sizes.
        LayerArgumentError: the sizes are inconsistent, or the method of *quant_config* does not
            have ``embedding``.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = 64,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        *,
        disable_tp: bool = False,
        reduce_results: bool = True,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.org_vocab_size = num_embeddings if org_num_embeddings is None else org_num_embeddings
        self.padding_size, self.prefix = padding_size, prefix
        self.reduce_results = reduce_results
        self.parallel = ALONE if disable_tp else current_tensor_parallel()
        self.tp_rank, self.tp_size = self.parallel.rank, self.parallel.size
        self.shard = VocabShard.of(num_embeddings, self.org_vocab_size, padding_size, self.parallel)
        self.num_embeddings_per_partition = self.shard.rows
        self.org_vocab_size_padded = self.shard.org_rows * self.tp_size
        self.num_embeddings_padded = self.shard.rows * self.tp_size
        self.params_dtype = params_dtype or torch.get_default_dtype()
        chosen = None if quant_config is None else quant_config.get_quant_method(self, prefix)
        self.quant_method = chosen or UnquantizedEmbeddingMethod()
        self._create_weights()

    def _create_weights(self) -> None:
        self._check_method()
        self._create_by_method(
            self.embedding_dim, [self.shard.rows], self.embedding_dim, self.num_embeddings_padded
        )

    def _check_method(self) -> None:
        if not isinstance(self.quant_method, EmbeddingMethod):
            raise LayerArgumentError(
                f"{type(self.quant_method).__name__} has no embedding(layer, input_ids), which "
                f"{type(self).__name__} {self.prefix} needs; let the quant_config return None for "
                "embeddings."
            )

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Fill *param*. Padding rows, and rows that *loaded_weight* does not have, become zero.

        Args:
            param: a parameter of this layer.
            loaded_weight: the rows of all base ids, of all ids, or, with several ranks, of this
                rank.

        Raises:
            WeightLoadError: *loaded_weight* has another shape.
        """
        dim, what = dim_of(param, "output_dim"), describe(self, self.prefix, param)
        if dim is None:
            return fill(param.data, loaded_weight, what)
        shard, sizes = self.shard, (self.org_vocab_size, self.num_embeddings)
        if loaded_weight.ndim != param.ndim or loaded_weight.shape[dim] not in sizes:
            return self._load_part(param, loaded_weight, dim, what)
        ids = loaded_weight.narrow(dim, shard.org_start, shard.num_org)
        # Not zeros_like: where shapes alone are loaded (on meta), torch imports sympy for it.
        values = param.data.new_zeros(param.shape)
        fill(values.narrow(dim, 0, shard.num_org), ids, what)
        if loaded_weight.shape[dim] > self.org_vocab_size:
            ids = loaded_weight.narrow(dim, shard.added_start, shard.num_added_here)
            fill(values.narrow(dim, shard.org_rows, shard.num_added_here), ids, what)
        return fill(param.data, values, what)

    def _load_part(self, param: nn.Parameter, loaded: Tensor, dim: int, what: str) -> None:
        """Fill *param* with this rank's rows, padding included.

        Not for a single rank: a table of its padded size belongs to another vocabulary.
        """
        if self.tp_size > 1 and loaded.shape == param.shape:
            return fill(param.data, loaded, what)
        wanted = [list(param.shape) for _ in range(2)]
        wanted[0][dim], wanted[1][dim] = self.org_vocab_size, self.num_embeddings
        shapes = " or ".join(dict.fromkeys(str(tuple(shape)) for shape in wanted))
        part = f", or {tuple(param.shape)}, the part of this rank" if self.tp_size > 1 else ""
        raise WeightLoadError(
            f"{what} is loaded with a tensor of shape {tuple(loaded.shape)}; it takes {shapes}, a "
            f"row for each id{part}. The checkpoint and the model's configuration disagree."
        )

    def get_sharded_to_full_mapping(self) -> list[int] | None:
        """Return the index of each row of the whole table in the ranks' concatenated rows.

        Rows of base ids come first, then those of added ids, then padding. None for a single rank.
        """
        return self.shard.order() if self.tp_size > 1 else None

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return ``(*input_ids.shape, embedding_dim)``.

        Args:
            input_ids: any shape, int32 or int64, values in ``[0, num_embeddings)``.
        """
        method = cast("EmbeddingMethod", self.quant_method)  # checked when the layer was built
        rows = method.embedding(self, input_ids)
        if not self.reduce_results or self.tp_size == 1:
            return rows
        if rows.dtype.itemsize == 1:  # no sums in 8 bits: but every byte has one owner
            return self.parallel.all_reduce(rows.view(torch.int8)).view(rows.dtype)
        return self.parallel.all_reduce(rows)

    def extra_repr(self) -> str:
        """Return sizes, for ``repr(model)``."""
        ranks = f", rank={self.tp_rank} of {self.tp_size}" if self.tp_size > 1 else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{ranks}"
