"""Embeddings from encoder models, and scores from cross-encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opweave import platforms
from opweave.config import EngineConfig, compilation_config
from opweave_engine.client.arguments import check_alone
from opweave_engine.embedding.pooling import Pooling
from opweave_engine.embedding.pooling_params import PoolingParams
from opweave_engine.embedding.sentence_config import SentenceConfig
from opweave_engine.errors import InvalidArgumentError, SamplingParamsError
from opweave_engine.loading.checkpoint import Checkpoint, Progress
from opweave_engine.loading.encoders import load_encoder
from opweave_engine.loading.loader import check_dtype
from opweave_engine.metrics.selection_report import SelectionReport
from opweave_engine.models.fields import Fields
from opweave_engine.priorities import PriorityLists, engine_priorities, private_context
from opweave_engine.request.io_processor import IOProcessors
from opweave_engine.request.outputs import EmbeddingOutput, ScoreOutput
from opweave_engine.request.prompts import Prompt, PromptReader, as_list, as_pairs
from opweave_engine.runner.cpu_threads import cpu_threads
from opweave_engine.sampling.parameter_checks import check_int
from opweave_engine.tokenization.tokenizer import tokenizer_of
from opweave_engine.transformers import TransformersCrossEncoder

# Paths that sentence-transformers writes for the two activation functions of scores.
_SIGMOID = ("torch.nn.modules.activation.Sigmoid", "torch.nn.Sigmoid")
_IDENTITY = ("torch.nn.modules.linear.Identity", "torch.nn.Identity")


class Embedder:
    """An encoder that turns prompts into embeddings, or a cross-encoder that scores pairs of texts.

    Args:
        model: the directory of a checkpoint. Pooling and normalization are those of its
            sentence-transformers files; without these, a text's vector is the mean.
        dtype: as for :class:`~opweave_engine.LLM`.
        ir_op_priority: providers to prefer, by op; only for this object's forward passes.
        config: these and all other settings; ``scheduler.max_num_batched_tokens`` limits a forward
            pass.
        progress: called while loading, with the number of tensors loaded so far and in total.

    Attributes:
        tokenizer: the checkpoint's tokenizer.
        max_model_len: the maximum number of tokens of a prompt.
        config: the configuration after the platform's changes.
        selection_report: the kernels that its forward passes run.

    Raises:
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.

    Example::

        (output,) = Embedder("path/to/checkpoint").embed("Hello")
        print(output.embedding)

        (output,) = Embedder("path/to/cross-encoder").score("a question", "an answer")
        print(output.score)
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        ir_op_priority: PriorityLists | None = None,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
    ) -> None:
        platform = platforms.current_platform
        self.config = platforms.configured(config or EngineConfig(), platform)
        check_alone(self.config)
        if self.config.parallel.tensor_parallel_size > 1:
            raise InvalidArgumentError(
                f"tensor_parallel_size={self.config.parallel.tensor_parallel_size}, but an encoder "
                "runs on one rank. Leave it out, and start one server for each device."
            )
        self._priorities = engine_priorities(ir_op_priority, self.config)
        checkpoint, named = Checkpoint(model), check_dtype(dtype)
        self.tokenizer = tokenizer_of(checkpoint, self.config)
        self._pooling, sentences = Pooling.of(checkpoint), SentenceConfig.of(checkpoint)
        if sentences.lowercases:
            self.tokenizer.lowercase()
        self._given = checkpoint.config()
        self._processors = IOProcessors(checkpoint, self.config)
        platform.set_device(0)
        self._device = torch.device(platform.device_type)
        with compilation_config(self.config.compilation), self._device:
            loaded = load_encoder(
                checkpoint,
                self.config,
                dtype=self.config.dtype if named == "auto" else named,
                progress=progress,
            )
        platform.post_load_model(loaded.to(self._device))
        self._model, self._names = loaded, count()
        self._scorer = loaded if isinstance(loaded, TransformersCrossEncoder) else None
        self._is_sigmoid = self._scorer is not None and _is_sigmoid(self._given)
        self.selection_report = SelectionReport()
        longest = loaded.max_positions
        self.max_model_len = min(longest, sentences.max_seq_length or longest)
        self._prompts = PromptReader(
            self.tokenizer, loaded.vocab_size, self.max_model_len, answers=False
        )

    @property
    def is_cross_encoder(self) -> bool:
        """Whether the model scores pairs of texts, and does not make embeddings."""
        return self._scorer is not None

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary: token ids are below it."""
        return self._prompts.vocab_size

    def tokens(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[int]:
        """Return the tokens of one prompt.

        Raises:
            PromptError: the prompt is empty, too long, or has token ids outside the vocabulary.
        """
        keep = truncate_prompt_tokens
        return self._prompts.tokens(
            prompt,
            add_special_tokens=add_special_tokens,
            keep=self.max_model_len if keep == -1 else keep,
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None = None,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """Return the embedding of each prompt, in order.

        Args:
            prompts: one or several prompts, each a text or a list of token ids.
            params: the pooling parameters; None: the checkpoint's.
            add_special_tokens: add the tokenizer's special tokens to texts.
            truncate_prompt_tokens: truncate prompts to their first tokens, this many, including
                special tokens; -1: the model's maximum; None: a prompt that is too long is an
                error.

        Raises:
            PromptError: a prompt is empty, too long, or has token ids outside the vocabulary.
            SamplingParamsError: the model does not support the dimensions in *params*, or
                *truncate_prompt_tokens* is out of range.
            InvalidArgumentError: the model is a cross-encoder.
        """
        _check_truncation(truncate_prompt_tokens)
        self._check_task(scores=False)
        params = self.check_params(params)
        tokens = [
            self.tokens(
                prompt,
                add_special_tokens=add_special_tokens,
                truncate_prompt_tokens=truncate_prompt_tokens,
            )
            for prompt in as_list(prompts)
        ]
        vectors = self.vectors(tokens, [params] * len(tokens))
        return [
            EmbeddingOutput(str(next(self._names)), ids, vector)
            for ids, vector in zip(tokens, vectors, strict=True)
        ]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoreOutput]:
        """Return the score of each pair of texts, in order.

        Args:
            text_1: the first text of all pairs, or one for each pair.
            text_2: the second texts.
            truncate_prompt_tokens: truncate pairs to this many tokens, including special tokens,
                the longer text first; -1: the model's maximum; None: a pair that is too long is an
                error.

        Raises:
            PromptError: a pair is too long, or the lengths of the arguments do not fit.
            SamplingParamsError: *truncate_prompt_tokens* is out of range.
            InvalidArgumentError: the model is not a cross-encoder.
        """
        _check_truncation(truncate_prompt_tokens)
        self._check_task(scores=True)
        keep = self.max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        pairs = [
            self.tokenizer.encode_pair(first, second, keep=keep)
            for first, second in as_pairs(text_1, text_2)
        ]
        tokens = [self.tokens(ids) for ids, _ in pairs]
        params = [
            self.check_params(PoolingParams(token_type_ids=types), len(ids)) for ids, types in pairs
        ]
        scores = self.vectors(tokens, params)
        return [
            ScoreOutput(str(next(self._names)), ids, score)
            for ids, (score,) in zip(tokens, scores, strict=True)
        ]

    def check_params(self, params: PoolingParams | None, length: int = 0) -> PoolingParams:
        """Return *params*, or the defaults.

        Args:
            params: of a prompt.
            length: the number of its tokens; only for pairs of texts.

        Raises:
            SamplingParamsError: the model does not support their dimensions or token types.
            InvalidArgumentError: they are for a pair and the model is not a cross-encoder, or it is
                one and they are not.
        """
        params = PoolingParams() if params is None else params
        types = params.token_type_ids
        self._check_task(scores=types is not None)
        limit = self._scorer.num_token_types if self._scorer is not None else 0
        if types is not None and limit:
            in_range = all(type(kind) is int and 0 <= kind < limit for kind in types)
            if len(types) != length or not in_range:
                raise SamplingParamsError(
                    f"token_type_ids={types!r:.200} must hold {length} integers from 0 to "
                    f"{limit - 1}, one for each token.",
                    "token_type_ids",
                )
        params.check_dimensions(
            1 if self._scorer is not None else self._model.hidden_size * len(self._pooling.modes),
            self._given.get("matryoshka_dimensions"),
            any_size=self._given.get("is_matryoshka") is True,
        )
        return params

    def _check_task(self, *, scores: bool) -> None:
        """Raise InvalidArgumentError unless the model scores pairs, or makes embeddings."""
        if scores == (self._scorer is not None):
            return
        name = ", ".join(Fields(self._given).texts("architectures"))
        if scores:
            raise InvalidArgumentError(
                f"The model is an encoder ({name}), which makes embeddings; it scores no pairs of "
                "texts. Use a cross-encoder, such as BertForSequenceClassification with one label."
            )
        raise InvalidArgumentError(
            f"The model is a cross-encoder ({name}), which scores pairs of texts; it makes no "
            "embeddings. Use Embedder.score, or /v1/score or /v1/rerank of a server."
        )

    def process(self, request: Any, *, io_processor: str | None = None) -> Any:
        """Process a request of an I/O processor plugin; see :meth:`opweave_engine.LLM.process`.

        Raises:
            UnknownPluginError: (a LookupError) there is no such plugin.
            InvalidArgumentError: no I/O processor is named, or it is for models that generate text.
            PromptError: as for :meth:`embed`.
        """
        processor = self._processors.get(io_processor, embeds=True)
        return processor.result(request, self.embed(processor.prompts(request)))

    def vectors(
        self, texts: Sequence[Sequence[int]], params: Sequence[PoolingParams]
    ) -> list[list[float]]:
        """Return the embeddings of tokenized texts, several per forward pass."""
        found: list[list[float]] = []
        limit = self.config.scheduler.max_num_batched_tokens
        with private_context(self._priorities) as context, cpu_threads(self.config.cpu_threads):
            start = 0
            while start < len(texts):
                end, size = start + 1, len(texts[start])
                while end < len(texts) and size + len(texts[end]) <= limit:
                    size += len(texts[end])
                    end += 1
                found += context.run(self._forward, texts[start:end], params[start:end])
                start = end
        return found

    def _forward(
        self, texts: Sequence[Sequence[int]], params: Sequence[PoolingParams]
    ) -> list[list[float]]:
        lengths = [len(text) for text in texts]
        ids = [token for text in texts for token in text]
        positions = [place for length in lengths for place in range(length)]
        starts = [0, *accumulate(lengths)]
        options: dict[str, Tensor] = {}
        if self._scorer is not None and self._scorer.num_token_types:
            types = [kind for pair in params for kind in pair.token_type_ids or ()]
            options["token_type_ids"] = torch.tensor(types, device=self._device)
        with platforms.current_platform.inference_mode(), self.selection_report.watch(len(ids)):
            hidden = self._model(
                torch.tensor(ids, device=self._device),
                torch.tensor(positions, device=self._device),
                cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=self._device),
                **options,
            )
            if self._scorer is not None:
                logits = hidden.float()[:, None]
                scores: list[list[float]] = (
                    logits.sigmoid() if self._is_sigmoid else logits
                ).tolist()
                return scores
            states = hidden.split_with_sizes(lengths)
            pooled = [self._pooling(*each) for each in zip(states, params, strict=True)]
            # One copy to the host for all, which may have several lengths.
            numbers: list[float] = torch.cat(pooled).tolist()
        ends = list(accumulate(len(vector) for vector in pooled))
        return [numbers[end - len(one) : end] for end, one in zip(ends, pooled, strict=True)]


def _check_truncation(keep: int | None) -> None:
    if keep not in (None, -1):
        check_int("truncate_prompt_tokens", keep, 1, "-1 or None")


def _is_sigmoid(config: Mapping[str, Any]) -> bool:
    """Return whether the sigmoid is a cross-encoder's activation function, not the identity.

    The keys and the default are those of sentence-transformers' ``CrossEncoder``.
    """
    fields, key = Fields(config), "activation_fn"
    settings = fields.nested("sentence_transformers")
    if key not in settings.values:
        settings, key = fields, "sbert_ce_default_activation_function"
    path = settings.text(key, _SIGMOID[0])
    return settings.require(key, path, *_SIGMOID, *_IDENTITY) in _SIGMOID
