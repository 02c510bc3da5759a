"""Base classes of models, and of language models: embedding, decoder layers, norm, logits."""

from collections.abc import Iterable, Iterator
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from opweave.layers import LogitsProcessor, ParallelLMHead, RMSNorm, VocabParallelEmbedding
from opweave_engine.models.config import DecoderConfig, WeightsError
from opweave_engine.models.weights import CheckpointModel, Merged

# Base class of models that compute a vector for every token of a text.


class Encoder(CheckpointModel):
    """A model whose forward takes ids and positions of packed texts, and ``cu_seqlens=``.

    ``cu_seqlens`` is ``(texts + 1,)``, int32: the start of each text, and the end of the last. The
    result is ``(T, hidden_size)``.

    Attributes:
        hidden_size: the size of a vector.
        vocab_size: the size of the vocabulary.
        max_positions: the longest text, in tokens.
    """

    hidden_size: int
    vocab_size: int
    max_positions: int


# Base class of models that predict the next token.


class LanguageModel(CheckpointModel):
    """A model that predicts the next token of packed sequences.

    Attributes:
        vocab_size: the number of logits.
        max_positions: the longest sequence that the model supports; None: any length.
        needs_whole_prompts: whether the hidden states of a prompt's tokens depend on the tokens
            that follow, or on their number, so that a prompt must not be split over steps.
    """

    vocab_size: int
    max_positions: int | None
    needs_whole_prompts: bool = False

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden state of every token: ``(T, hidden_size)``.

        Args:
            input_ids: ``(T,)``, integer. One sequence, unless a forward context says otherwise.
            positions: ``(T,)``, integer: the index of each token in its sequence.
        """
        raise NotImplementedError

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token, ``(N, vocab_size)``, of ``(N, hidden_size)``."""
        raise NotImplementedError


# Base of language models: embedding, decoder layers, final norm, logits.


HEAD = "lm_head.weight"  # the output matrix in checkpoints


class Decoder(nn.Module):
    """Embedding, decoder layers and final norm, connected by a hidden state and a residual.

    Args:
        embed_tokens: maps ids to hidden states.
        layers: each takes positions, hidden state and residual (None in the first layer), and
            returns hidden state and residual.
        norm: adds the residual, and normalizes.
        embed_scale: factor on the embedding.
    """

    def __init__(
        self,
        embed_tokens: VocabParallelEmbedding,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        embed_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens, self.layers, self.norm = embed_tokens, nn.ModuleList(layers), norm
        self.embed_scale = embed_scale

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        if self.embed_scale is not None:
            hidden = hidden * self.embed_scale
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        normed: Tensor = self.norm(hidden, residual)[0]
        return normed


class CausalLM(LanguageModel):
    """A language model of opweave's layers; :meth:`load_weights` fills it.

    Args:
        model: maps ids to hidden states.
        vocab_size, hidden_size: sizes from the configuration.
        dtype: dtype of weights and activations.
        tied: whether the embedding is also the output matrix.
        max_positions: the maximum sequence length; None: unlimited.
        soft_cap: the soft cap of the logits.
    """

    merged: ClassVar[Merged] = {
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }

    def __init__(
        self,
        model: Decoder,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        tied: bool,
        max_positions: int | None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.model, self.dtype = model, dtype
        self.lm_head = ParallelLMHead(vocab_size, hidden_size, params_dtype=dtype)
        if tied:
            self.lm_head = self.lm_head.tie_weights(model.embed_tokens)
        self.logits_processor = LogitsProcessor(vocab_size, soft_cap=soft_cap)
        self.requires_grad_(False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.logits_processor(self.lm_head, hidden)
        return logits

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        # Older checkpoints also hold the rotary frequencies, which follow from the configuration.
        weights = ((n, t) for n, t in tensors if not n.endswith("rotary_emb.inv_freq"))
        super().load_weights(self._tied(weights) if self.is_tied else weights)

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is also the output matrix."""
        return self.lm_head.weight is self.model.embed_tokens.weight

    @property
    def embedding_name(self) -> str:
        """The name of the embedding in checkpoints."""
        weight = self.model.embed_tokens.weight
        return next(n for n, place in self.places().items() if place.parameter is weight)

    def _tied(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the matrix that is embedding and output once, whichever names a checkpoint uses."""
        matrix, embedding = None, self.embedding_name
        for name, tensor in tensors:
            if name not in (HEAD, embedding):
                yield name, tensor
            elif matrix is None or matrix.shape != tensor.shape:  # the second one will not fit
                matrix = tensor
                yield embedding, tensor
            elif not tensor.is_meta and not torch.equal(
                *(t.to(self.dtype) for t in (matrix, tensor))
            ):
                raise WeightsError(
                    f"config.json ties the embeddings, but {HEAD} differs from {embedding}. Set "
                    "'tie_word_embeddings' to false in config.json to use both."
                )


# Language models with pre-norm blocks, which differ only in the blocks.


Config = TypeVar("Config", bound=DecoderConfig)


class PreNormLM(CausalLM, Generic[Config]):
    """An embedding, blocks, a norm and the output matrix.

    Args:
        config: the configuration.
        dtype: dtype of weights and activations.
        norm: the last norm; by default RMSNorm.
        embed_scale: factor on the embedding.
        soft_cap: the soft cap of the logits.
    """

    def __init__(
        self,
        config: Config,
        *,
        dtype: torch.dtype = torch.float32,
        norm: nn.Module | None = None,
        embed_scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        vocabulary, size = config.vocab_size, config.hidden_size
        embedding = VocabParallelEmbedding(vocabulary, size, params_dtype=dtype)
        layers = (self.layer(config, i, dtype) for i in range(config.num_hidden_layers))
        norm = norm or RMSNorm(size, config.rms_norm_eps, dtype=dtype)
        super().__init__(
            Decoder(embedding, layers, norm, embed_scale),
            vocabulary,
            size,
            dtype=dtype,
            tied=config.tie_word_embeddings,
            max_positions=config.max_positions,
            soft_cap=soft_cap,
        )
        self.config = config

    @classmethod
    def layer(cls, config: Config, layer: int, dtype: torch.dtype) -> nn.Module:
        """Build one block."""
        raise NotImplementedError
