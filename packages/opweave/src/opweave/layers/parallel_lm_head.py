"""The language model head, with the vocabulary sharded over ranks."""

from __future__ import annotations

from typing import NoReturn, Self

import torch
from torch import Tensor, nn

from opweave.layers.errors import LayerArgumentError, LayerCallError
from opweave.layers.linear import QuantConfig
from opweave.layers.pluggable_layer import PluggableLayer
from opweave.layers.vocab_parallel_embedding import VocabParallelEmbedding
from opweave.layers.weight_loading import set_weight_attrs


@PluggableLayer.register("parallel_lm_head")
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
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = 64,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        *,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            params_dtype,
            org_num_embeddings,
            padding_size,
            quant_config,
            prefix,
            disable_tp=disable_tp,
        )
        if bias:
            values = torch.empty(self.shard.rows, dtype=self.params_dtype)
            self.bias = nn.Parameter(values, requires_grad=False)
            set_weight_attrs(self.bias, weight_loader=self.weight_loader, output_dim=0)
        else:
            self.register_parameter("bias", None)
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
            raise LayerArgumentError(
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
        raise LayerCallError(
            f"{type(self).__name__} is not called: pass it to a LogitsProcessor, "
            "logits_processor(lm_head, hidden_states)."
        )
