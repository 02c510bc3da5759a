"""Embedding, language model head and logits, with the vocabulary sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, Self, cast, runtime_checkable

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.ir.ops.low_bit import dequantized_blocks
from opweave.layers import linear_methods, registry
from opweave.layers.linear import HasLinearMethod
from opweave.layers.parallel import (
    ALONE,
    TensorParallel,
    current_tensor_parallel,
    describe,
    dim_of,
    fill,
)

# The rows of a vocabulary table on one rank, and their ids.


def pad_vocab_size(size: int, multiple: int) -> int:
    """Return *size*, rounded up to a multiple.

    >>> pad_vocab_size(1010, 64)
    1024
    """
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class VocabShard:
    """The rows of one rank: base ids, padding, added ids, padding.

    Base and added ids are sharded separately, so that base ids stay on their rank when ids are
    added. A single rank has the same order of rows.

    Attributes:
        org_vocab_size, num_added: the numbers of base ids and of added ids.
        org_rows, added_rows: a rank's numbers of rows for them, including padding.
        org_start, org_end: the base ids of this rank.
        added_start, added_end: its added ids.
        size: the number of ranks.
    """

    org_vocab_size: int
    num_added: int
    org_rows: int
    added_rows: int
    org_start: int
    org_end: int
    added_start: int
    added_end: int
    size: int

    @classmethod
    def of(
        cls, num_embeddings: int, org_vocab_size: int, padding_size: int, parallel: TensorParallel
    ) -> VocabShard:
        """Shard a table of *num_embeddings* ids, of which *org_vocab_size* are base ids.

        Raises:
            LayerArgumentError: there are more base ids than ids, or *padding_size* is not positive.
            ShardingError: the number of ranks does not divide the padded sizes.
        """
        if not 0 < org_vocab_size <= num_embeddings or padding_size < 1:
            raise registry.LayerArgumentError(
                f"num_embeddings={num_embeddings} is the number of all ids, "
                f"org_num_embeddings={org_vocab_size} that of those that were not added, and "
                f"padding_size={padding_size} is at least 1."
            )
        org = pad_vocab_size(org_vocab_size, padding_size)
        added = num_embeddings - org_vocab_size
        total = pad_vocab_size(org + added, padding_size)
        padded = f"padded to a multiple of {padding_size}"
        org_rows = parallel.divide(org, f"the vocabulary ({padded})")
        added_rows = parallel.divide(total - org, f"the added vocabulary ({padded})")

        def owned(rows: int, first: int, count: int) -> tuple[int, int]:
            start, end = (min(rows * rank, count) for rank in (parallel.rank, parallel.rank + 1))
            return first + start, first + end

        return cls(
            org_vocab_size,
            added,
            org_rows,
            added_rows,
            *owned(org_rows, 0, org_vocab_size),
            *owned(added_rows, org_vocab_size, added),
            parallel.size,
        )

    @property
    def rows(self) -> int:
        """The number of rows of this rank."""
        return self.org_rows + self.added_rows

    @property
    def num_org(self) -> int:
        """The number of base ids of this rank."""
        return self.org_end - self.org_start

    @property
    def num_added_here(self) -> int:
        """The number of added ids of this rank."""
        return self.added_end - self.added_start

    def order(self) -> list[int]:
        """Return, for each row of the whole table, its index in the ranks' concatenated rows.

        The table has base ids, then added ids, then padding: element ``i`` is the row of id ``i``.
        """
        base = [rank * self.rows + row for rank in range(self.size) for row in range(self.org_rows)]
        added = [
            rank * self.rows + self.org_rows + row
            for rank in range(self.size)
            for row in range(self.added_rows)
        ]
        org, more = self.org_vocab_size, self.num_added
        return base[:org] + added[:more] + base[org:] + added[more:]


# An embedding with the vocabulary sharded over ranks.


@runtime_checkable
class EmbeddingMethod(linear_methods.LinearMethod, Protocol):
    """The strategy of a vocabulary table: a :class:`LinearMethod` that can also look up rows."""

    def embedding(self, layer: VocabParallelEmbedding, input_ids: Tensor) -> Tensor:
        """Return the rows of *input_ids*, and zeros for ids that are not in ``layer.shard``."""


class UnquantizedEmbeddingMethod(linear_methods.UnquantizedLinearMethod):
    """One table ``(rows, embedding_dim)``: ``ir.ops.embedding`` and ``ir.ops.masked_embedding``."""

    def embedding(self, layer: VocabParallelEmbedding, input_ids: Tensor) -> Tensor:
        shard = layer.shard
        if shard.size == 1 and shard.num_added == 0:
            whole: Tensor = ir.ops.embedding(input_ids, layer.weight)
            return whole
        first = shard.org_start, shard.org_end
        second = shard.added_start, shard.added_end, shard.org_rows
        rows: Tensor = ir.ops.masked_embedding(input_ids, layer.weight, *first, *second)
        return rows


@registry.PluggableLayer.register("vocab_parallel_embedding")
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
        self, num_embeddings: int, embedding_dim: int, params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None, padding_size: int = 64,
        quant_config: linear_methods.QuantConfig | None = None, prefix: str = "", *,
        disable_tp: bool = False, reduce_results: bool = True,
    ) -> None:  # fmt: skip
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
        super()._create_weights()

    def _weight_sizes(self) -> tuple[int, Sequence[int], int, int]:
        width = self.embedding_dim
        return width, [self.shard.rows], width, self.num_embeddings_padded

    def _check_method(self) -> None:
        if not isinstance(self.quant_method, EmbeddingMethod):
            raise registry.LayerArgumentError(
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
        dim, label = dim_of(param, "output_dim"), describe(self, self.prefix, param)
        if dim is None:
            return fill(param.data, loaded_weight, label)
        shard, sizes = self.shard, (self.org_vocab_size, self.num_embeddings)
        if loaded_weight.ndim != param.ndim or loaded_weight.shape[dim] not in sizes:
            return self._load_part(param, loaded_weight, dim, label)
        ids = loaded_weight.narrow(dim, shard.org_start, shard.num_org)
        # Not zeros_like: where shapes alone are loaded (on meta), torch imports sympy for it.
        values = param.data.new_zeros(param.shape)
        fill(values.narrow(dim, 0, shard.num_org), ids, label)
        if loaded_weight.shape[dim] > self.org_vocab_size:
            ids = loaded_weight.narrow(dim, shard.added_start, shard.num_added_here)
            fill(values.narrow(dim, shard.org_rows, shard.num_added_here), ids, label)
        return fill(param.data, values, label)

    def _load_part(self, param: nn.Parameter, loaded: Tensor, dim: int, label: str) -> None:
        """Fill *param* with this rank's rows, padding included.

        Not for a single rank: a table of its padded size belongs to another vocabulary.
        """
        if self.tp_size > 1 and loaded.shape == param.shape:
            return fill(param.data, loaded, label)
        accepted = [list(param.shape) for _ in range(2)]
        accepted[0][dim], accepted[1][dim] = self.org_vocab_size, self.num_embeddings
        shapes = " or ".join(dict.fromkeys(str(tuple(shape)) for shape in accepted))
        part = f", or {tuple(param.shape)}, the part of this rank" if self.tp_size > 1 else ""
        raise registry.WeightLoadError(
            f"{label} is loaded with a tensor of shape {tuple(loaded.shape)}; it takes {shapes}, a "
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


# A vocabulary table in blocks of GGUF.


_BLOCK_ROWS = UnquantizedEmbeddingMethod()


@dataclass(frozen=True)
class BlockEmbeddingMethod(linear_methods.BlockMethod):
    """A table in blocks, as the file has them: only the rows that are looked up are dequantized.

    Blocks of zeros, in rows that a rank does not have, are zeros in every format.
    """

    def embedding(self, layer: VocabParallelEmbedding, input_ids: Tensor) -> Tensor:
        rows = _BLOCK_ROWS.embedding(layer, input_ids).reshape(-1, layer.weight.shape[1])
        values = dequantized_blocks(rows, self.format, torch.float32).to(layer.params_dtype)
        return values.reshape(*input_ids.shape, layer.embedding_dim)


# The language model head, with the vocabulary sharded over ranks.


@registry.PluggableLayer.register("parallel_lm_head")
class ParallelLMHead(VocabParallelEmbedding):
    """The weights of the language model head, for :class:`LogitsProcessor`; not callable.

    Args:
        bias: whether there is a bias, sharded like the rows. It is added only if it is passed as
            ``embedding_bias``.

    See :class:`VocabParallelEmbedding` for the others.
    """

    bias: nn.Parameter | None
    row_of_id: Tensor

    def __init__(
        self, num_embeddings: int, embedding_dim: int, bias: bool = False,
        params_dtype: torch.dtype | None = None, org_num_embeddings: int | None = None,
        padding_size: int = 64, quant_config: linear_methods.QuantConfig | None = None,
        prefix: str = "", *, disable_tp: bool = False,
    ) -> None:  # fmt: skip
        common = (params_dtype, org_num_embeddings, padding_size, quant_config, prefix)
        super().__init__(num_embeddings, embedding_dim, *common, disable_tp=disable_tp)
        self._create_bias(self.shard.rows if bias else None, output_dim=0)
        if self.shard.num_added:  # without added ids, the rows are in the order of ids already
            order = torch.tensor(self.shard.order()[:num_embeddings])
            self.register_buffer("row_of_id", order, persistent=False)

    def _check_method(self) -> None:
        """Accept any method, because rows are multiplied, not looked up."""

    def tie_weights(self, embed_tokens: VocabParallelEmbedding) -> Self:
        """Use the table of *embed_tokens*, and return this layer.

        Raises:
            LayerArgumentError: the table of *embed_tokens* has another shape.
        """
        if embed_tokens.weight.shape != self.weight.shape:
            raise registry.LayerArgumentError(
                f"the weight of {type(self).__name__} {self.prefix} has shape "
                f"{tuple(self.weight.shape)} and cannot be tied to one of shape "
                f"{tuple(embed_tokens.weight.shape)}; build both with the same sizes."
            )
        self.weight = embed_tokens.weight
        return self

    def columns_of_ids(self, logits: Tensor, count: int) -> Tensor:
        """Return the logits of the first *count* ids.

        Args:
            logits: ``(..., num_embeddings_padded)``, the ranks' logits, concatenated.
            count: at most ``num_embeddings``.
        """
        if self.shard.num_added == 0 or (self.tp_size == 1 and count <= self.org_vocab_size):
            return logits[..., :count]
        return logits.index_select(-1, self.row_of_id[:count])

    def forward(self, input_ids: Tensor) -> NoReturn:
        """Not supported: pass the head to :class:`LogitsProcessor`.

        Raises:
            LayerCallError: (a RuntimeError) always.
        """
        raise registry.LayerCallError(
            f"{type(self).__name__} is not called: pass it to a LogitsProcessor, "
            "logits_processor(lm_head, hidden_states)."
        )


# Logits of the next token: computed by the head, gathered, trimmed, capped and scaled.


_NO_ID = torch.iinfo(torch.int64).max  # comes after every id


@registry.PluggableLayer.register("logits_processor")
class LogitsProcessor(registry.PluggableLayer):
    """``scale * soft_cap * tanh(hidden @ weight.T / soft_cap)``, for every token id.

    Composed of ``ir.ops.linear`` and ``all_gather``; the rest is plain PyTorch. The soft cap (as in
    Gemma 2, arXiv:2408.00118) is applied before the scale (as in Granite and Cohere).

    Args:
        vocab_size: the number of ids.
        org_vocab_size: return the logits of the first *org_vocab_size* ids; by default, of all.
        scale: the factor of the logits.
        logits_as_input: the layer is called with logits instead of hidden states.
        soft_cap: bound of the magnitude of the logits; None: unbounded.
        head_dtype: the dtype to compute and return logits in; by default, that of the hidden
            states.
    """

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        logits_as_input: bool = False,
        soft_cap: float | None = None,
        *,
        head_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.org_vocab_size = vocab_size if org_vocab_size is None else org_vocab_size
        self.scale, self.soft_cap = scale, soft_cap
        self.logits_as_input, self.head_dtype = logits_as_input, head_dtype

    def forward(
        self,
        lm_head: ParallelLMHead,
        hidden_states: Tensor,
        embedding_bias: Tensor | None = None,
        skip_gather: bool = False,
    ) -> Tensor:
        """Return ``(..., org_vocab_size)``: a logit for each id.

        Args:
            lm_head: the head. Its bias is added only if it is passed as *embedding_bias*.
            hidden_states: ``(..., embedding_dim)``, or ``(..., org_vocab_size)`` with
                *logits_as_input*.
            embedding_bias: a bias for the head's rows on this rank, or None.
            skip_gather: return the logits of this rank's rows, padding included.

        Raises:
            LayerArgumentError: *head_dtype* is set, and the head is quantized.
        """
        if self.logits_as_input:
            return self._capped(hidden_states)
        logits = self._project(lm_head, hidden_states, embedding_bias)
        if skip_gather:
            return self._capped(logits)
        if lm_head.tp_size > 1:
            logits = lm_head.parallel.all_gather(logits, -1)
        return self._capped(lm_head.columns_of_ids(logits, self.org_vocab_size))

    def get_top_tokens(
        self, lm_head: ParallelLMHead, hidden_states: Tensor, embedding_bias: Tensor | None = None
    ) -> Tensor:
        """Return ``forward(…).argmax(-1)``, int64, without gathering the logits.

        Each rank sends its largest logit and the id. On ties, the lowest id wins.

        Raises:
            LayerArgumentError: *scale* is not positive; or *head_dtype*, as in :meth:`forward`.
        """
        if not self.scale > 0:
            raise registry.LayerArgumentError(
                f"get_top_tokens needs a positive scale; it is {self.scale}. Use forward(…)."
            )
        if self.logits_as_input:
            return self._capped(hidden_states).argmax(-1)
        logits = self._capped(self._project(lm_head, hidden_states, embedding_bias))
        ids = self._ids(lm_head, logits.device)
        logits = logits.masked_fill(ids >= self.org_vocab_size, float("-inf"))
        # The rows of a rank are in the order of their ids: the first one wins.
        row = logits.argmax(-1)
        tokens = ids[row]
        if lm_head.tp_size == 1:
            return tokens
        values = logits.gather(-1, row.unsqueeze(-1))
        values = lm_head.parallel.all_gather(values, -1)
        tokens = lm_head.parallel.all_gather(tokens.unsqueeze(-1), -1)
        wins = (values == values.amax(-1, keepdim=True)) | values.isnan()
        return tokens.masked_fill(~wins, _NO_ID).amin(-1)

    def _project(self, lm_head: ParallelLMHead, hidden: Tensor, bias: Tensor | None) -> Tensor:
        dtype, method = self.head_dtype, lm_head.quant_method
        if dtype is None:
            return method.apply(lm_head, hidden, bias)
        if not isinstance(method, UnquantizedEmbeddingMethod):
            raise registry.LayerArgumentError(
                f"head_dtype={dtype} is for heads that are not quantized; this one has "
                f"{type(method).__name__}. Leave head_dtype out."
            )
        bias = None if bias is None else bias.to(dtype)
        logits: Tensor = ir.ops.linear(hidden.to(dtype), lm_head.weight.to(dtype), bias)
        return logits

    def _capped(self, logits: Tensor) -> Tensor:
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits if self.scale == 1.0 else logits * self.scale

    def _ids(self, lm_head: ParallelLMHead, device: torch.device) -> Tensor:
        """Return the id of each row on this rank; for padding, a number above all ids."""
        shard = lm_head.shard
        rows = torch.arange(shard.rows, device=device)
        base, added = rows + shard.org_start, rows - shard.org_rows + shard.added_start
        ids = torch.where(rows < shard.org_rows, base, added)
        is_padding = (base >= shard.org_end) & (rows < shard.org_rows) | (added >= shard.added_end)
        return ids.masked_fill(is_padding, _NO_ID)
