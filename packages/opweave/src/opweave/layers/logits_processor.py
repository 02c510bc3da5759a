"""Logits of the next token: computed by the head, gathered, trimmed, capped and scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave import ir
from opweave.layers.errors import LayerArgumentError
from opweave.layers.parallel_lm_head import ParallelLMHead
from opweave.layers.pluggable_layer import PluggableLayer
from opweave.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

_NO_ID = torch.iinfo(torch.int64).max  # comes after every id


@PluggableLayer.register("logits_processor")
class LogitsProcessor(PluggableLayer):
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
        self,
        lm_head: ParallelLMHead,
        hidden_states: Tensor,
        embedding_bias: Tensor | None = None,
    ) -> Tensor:
        """Return ``forward(…).argmax(-1)``, int64, without gathering the logits.

        Each rank sends its largest logit and the id. On ties, the lowest id wins.

        Raises:
            LayerArgumentError: *scale* is not positive; or *head_dtype*, as in :meth:`forward`.
        """
        if not self.scale > 0:
            raise LayerArgumentError(
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
            raise LayerArgumentError(
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
