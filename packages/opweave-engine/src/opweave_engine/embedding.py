"""Encoder models: one vector per text."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opweave import platforms
from opweave.config import EngineConfig, compilation_config
from opweave_engine.client import check_alone
from opweave_engine.core import PriorityLists, engine_priorities, private_context
from opweave_engine.errors import CheckpointError, InvalidArgumentError, SamplingParamsError
from opweave_engine.load.checkpoint import Checkpoint, Progress
from opweave_engine.load.loader import check_dtype, load_encoder
from opweave_engine.metrics import SelectionReport
from opweave_engine.models.config import Fields
from opweave_engine.outputs import EmbeddingOutput, PoolingParams, ScoreOutput
from opweave_engine.prompts import IOProcessors, Prompt, PromptReader, as_list, as_pairs
from opweave_engine.runner import cpu_threads
from opweave_engine.sampling.params import check_truncation
from opweave_engine.tokenizer import tokenizer_of
from opweave_engine.transformers.encoder import TransformersCrossEncoder

# Settings of sentence-transformers that decide which tokens a text becomes.


_log = logging.getLogger(__name__)

# The library reads the first of these that exists.
_CONFIG_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_MODEL, _TOKENIZER = "config_sentence_transformers.json", "tokenizer_config.json"
_LENGTH, _TOKENIZER_LENGTH = "max_seq_length", "model_max_length"
# Keys of which only some values are supported; null is supported, too.
_TEXT_KEYS: Mapping[str, tuple[object, ...]] = {
    "do_lower_case": (True, False),
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    **dict.fromkeys(("config_args", "config_kwargs", "processing_kwargs"), ({},)),
    **dict.fromkeys(("tokenizer_args", "processor_kwargs"), ({},)),
}
_TEXT_FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
# Options of the library's own forward, and of its models of several vectors per text.
_HARMLESS = ("unpad_inputs", "query_length", "document_length", "query_expansion")


@dataclass(frozen=True)
class SentenceConfig:
    """How sentence-transformers reads a text.

    Attributes:
        max_seq_length: the most tokens of a text; None: as many as the model has positions for.
        lowercases: whether texts are lowercased before they are split into tokens.
    """

    max_seq_length: int | None = None
    lowercases: bool = False

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> SentenceConfig:
        """Read the files of *checkpoint*; a setting that is not followed is logged.

        Raises:
            CheckpointError: a file is damaged, has a wrong value, or asks for something that is not
                supported.
        """
        name = next((name for name in _CONFIG_FILES if checkpoint.has(name)), _CONFIG_FILES[0])
        settings, file = checkpoint.json(name) or {}, checkpoint.path / name
        check_keys(settings, file, _TEXT_KEYS, _LENGTH, "modality_config", *_HARMLESS)
        if (modalities := settings.get("modality_config")) is not None:
            # The vectors of tokens must be the model's last hidden states.
            text_settings = modalities.get("text") if isinstance(modalities, Mapping) else None
            if text_settings != _TEXT_FORWARD:
                raise CheckpointError(
                    f"{file} has modality_config={modalities!r:.200}, which is not supported. "
                    f"Supported for 'text': {_TEXT_FORWARD}."
                )
        longest = _length(settings, _LENGTH, file)
        if longest is None:
            tokenizer = checkpoint.json(_TOKENIZER) or {}
            longest = _length(tokenizer, _TOKENIZER_LENGTH, checkpoint.path / _TOKENIZER)
        model = checkpoint.json(_MODEL) or {}
        read = ("__version__", "prompts", "default_prompt_name", "similarity_fn_name")
        check_keys(model, checkpoint.path / _MODEL, {"model_type": ("SentenceTransformer",)}, *read)
        if (prompt := model.get("default_prompt_name")) is not None:
            _log.warning(
                "%s: default_prompt_name=%r is not followed; put the prompt before the texts",
                checkpoint.path / _MODEL, prompt,
            )  # fmt: skip
        return cls(longest, settings.get("do_lower_case") is True)


def check_keys(
    settings: Mapping[str, Any], file: Path, supported: Mapping[str, tuple[object, ...]], *read: str
) -> None:
    """Check *settings* for values that change embeddings and are not supported.

    Unknown keys are logged.

    Args:
        settings: the object in *file*.
        file: for errors.
        supported: values of keys, besides null.
        read: other keys that are read, or change nothing.

    Raises:
        CheckpointError: a value is not supported.
    """
    for key, values in supported.items():
        value = settings.get(key)
        if value is not None and value not in values:
            accepted = ", ".join(map(repr, values))
            raise CheckpointError(
                f"{file} has {key}={value!r:.100}, which is not supported. Supported: {accepted}."
            )
    Fields(settings, str(file)).warn_unread(*supported, *read)


def _length(settings: Mapping[str, Any], key: str, file: Path) -> int | None:
    """Return the maximum number of tokens in *settings*, or None."""
    value = settings.get(key)
    # Tokenizers without a maximum have 1e30, which some versions write as a float.
    if isinstance(value, float) and value.is_integer() and key == _TOKENIZER_LENGTH:
        value = int(value)
    if value is not None and (type(value) is not int or value < 1):
        raise CheckpointError(f"{file} has {key}={value!r}; it must be a positive integer or null.")
    return value


# Pooling of token vectors, as configured in sentence-transformers checkpoints.


_DEFAULTS = PoolingParams()
_MODULES, _PACKAGE = "modules.json", "sentence_transformers"
_PREFIX, _POOLING, _NORMALIZE = "pooling_mode_", "Pooling", "Normalize"
_KINDS = ("Transformer", _POOLING, _NORMALIZE)
_VECTOR = ("sentence_embedding",)
_NORMALIZE_KEYS = {"module_input_name": _VECTOR, "module_output_name": _VECTOR}
# Pooling mode -> its flag in older checkpoints; in the order of concatenation.
_MODES = {
    "cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}  # fmt: skip


@dataclass(frozen=True)
class Pooling:
    """Pools the hidden states of a text into one vector.

    Attributes:
        modes: one or more of ``cls`` (the first token), ``max``, ``mean``, ``mean_sqrt_len_tokens``
            (the sum divided by the square root of the length), ``weightedmean`` (with weights 1, 2,
            3, ...) and ``lasttoken``; the results are concatenated.
        normalizes: whether the vector is divided by its length.
    """

    modes: tuple[str, ...] = ("mean",)
    normalizes: bool = False

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Pooling:
        """Read ``modules.json`` and the files it names; without it, use the mean.

        Raises:
            CheckpointError: a file is damaged, or asks for unsupported pooling.
        """
        modules = checkpoint.json_list(_MODULES)
        if modules is None:
            return cls()
        modes: tuple[str, ...] = cls.modes
        file = checkpoint.path / _MODULES
        kinds = [_kind(module) for module in modules]
        for kind, module in zip(kinds, modules, strict=True):
            if kind not in _KINDS:
                raise CheckpointError(
                    f"{file} has a module of type {kind!r}. Supported: {', '.join(_KINDS)}."
                )
            check_keys(module, file, {}, "idx", "name", "path", "type", "kwargs")
            path = str(module.get("path") or "")
            checkpoint.inside(path, _MODULES)
            if kind == _POOLING:
                modes = _modes(checkpoint, f"{path}/config.json")
            elif kind == _NORMALIZE:
                settings = checkpoint.json(f"{path}/config.json") if path else None
                check_keys(settings or {}, checkpoint.path / path / "config.json", _NORMALIZE_KEYS)
        order = [_KINDS.index(kind) for kind in kinds]
        if order != sorted(set(order)):
            raise CheckpointError(
                f"{file} has the modules {', '.join(kinds)}. Supported: {', '.join(_KINDS)}, in "
                "this order."
            )
        return cls(modes, _NORMALIZE in kinds)

    def __call__(self, hidden: Tensor, params: PoolingParams = _DEFAULTS) -> Tensor:
        """Return a vector from the hidden states of one text, ``(tokens, size)``.

        It has ``modes * size`` numbers, or the first *dimensions* of them.
        """
        # Sums over many tokens are taken in float32.
        states = hidden.float()
        pooled = torch.cat([_pool(states, mode) for mode in self.modes])[: params.dimensions]
        normalizes = self.normalizes if params.normalize is None else params.normalize
        return functional.normalize(pooled, dim=0) if normalizes else pooled


def _kind(module: Mapping[str, Any]) -> str:
    """Return the class of a module; with its path, if it is not one of the library's."""
    path = str(module.get("type", ""))
    package, _, _ = path.partition(".")
    return path.rpartition(".")[2] if package == _PACKAGE else path


def _modes(checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
    config = checkpoint.json(name)
    if config is None:
        raise CheckpointError(f"{checkpoint.path} has no {name}, which modules.json names.")
    flags = [key for key in config if key.startswith(_PREFIX)]
    sizes = ("word_embedding_dimension", "embedding_dimension")
    check_keys(config, checkpoint.path / name, {}, "pooling_mode", "include_prompt", *sizes, *flags)
    if config.get("include_prompt") is False:
        _log.warning(
            "%s: include_prompt=False is not followed: the tokens of a prompt before the text are "
            "pooled, too",
            checkpoint.path / name,
        )
    if (modes := config.get("pooling_mode")) is not None:
        modes = modes if isinstance(modes, list) else [modes]
    else:
        by_flag = {flag: mode for mode, flag in _MODES.items()}
        names = [key.removeprefix(_PREFIX) for key in flags if config[key] is True]
        modes = [by_flag.get(flag, flag) for flag in names]
    unknown = [mode for mode in modes if mode not in _MODES]
    if unknown or not modes:
        raise CheckpointError(
            f"{checkpoint.path / name} asks for pooling by {unknown or 'nothing'}. Supported: "
            f"{', '.join(_MODES)}."
        )
    return tuple(mode for mode in _MODES if mode in modes)


def _pool(states: Tensor, mode: str) -> Tensor:
    count = len(states)
    if mode in ("cls", "lasttoken"):
        return states[0 if mode == "cls" else -1]
    if mode == "max":
        return states.amax(0)
    if mode == "mean_sqrt_len_tokens":
        return states.sum(0) / float(count**0.5)
    weights = torch.ones(count, device=states.device)
    if mode == "weightedmean":
        weights = weights.cumsum(0)
    return (weights / weights.sum()) @ states


# Embeddings from encoder models, and scores from cross-encoders.


# Paths that sentence-transformers writes for the two activation functions of scores.
_SIGMOID = ("torch.nn.modules.activation.Sigmoid", "torch.nn.Sigmoid")
_IDENTITY = ("torch.nn.modules.linear.Identity", "torch.nn.Identity")
Vectors = list[list[float]]


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
        vocab_size: the size of the vocabulary: token ids are below it.
        max_model_len: the maximum number of tokens of a prompt.
        is_cross_encoder: whether the model scores pairs of texts, and does not make embeddings.
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
        checkpoint, dtype = Checkpoint(model), check_dtype(dtype)
        self.tokenizer = tokenizer_of(checkpoint, self.config)
        self._pooling, sentences = Pooling.of(checkpoint), SentenceConfig.of(checkpoint)
        if sentences.lowercases:
            self.tokenizer.lowercase()
        self._config = checkpoint.config()
        self._processors = IOProcessors(checkpoint, self.config)
        platform.set_device(0)
        self._device = torch.device(platform.device_type)
        dtype = self.config.dtype if dtype == "auto" else dtype
        with compilation_config(self.config.compilation), self._device:
            loaded = load_encoder(checkpoint, self.config, dtype=dtype, progress=progress)
        platform.post_load_model(loaded.to(self._device))
        self._model, self._ids = loaded, count()
        self._scorer = loaded if isinstance(loaded, TransformersCrossEncoder) else None
        self.is_cross_encoder = self._scorer is not None
        self._is_sigmoid = self._scorer is not None and _is_sigmoid(self._config)
        self.selection_report = SelectionReport()
        longest = loaded.max_positions
        self.max_model_len = min(longest, sentences.max_seq_length or longest)
        self.vocab_size = loaded.vocab_size
        self._prompts = PromptReader(
            self.tokenizer, self.vocab_size, self.max_model_len, answers=False
        )

    def tokens(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[int]:
        """Return the tokens of one prompt; the arguments are those of :meth:`embed`.

        Raises:
            PromptError: the prompt is empty, too long, or has token ids outside the vocabulary.
            SamplingParamsError: *truncate_prompt_tokens* is out of range.
        """
        keep = self._limit(truncate_prompt_tokens)
        return self._prompts.tokens(prompt, add_special_tokens=add_special_tokens, keep=keep)

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
        keep = self._limit(truncate_prompt_tokens)
        self._check_task(scores=False)
        params = self.check_params(params)
        read = partial(self._prompts.tokens, add_special_tokens=add_special_tokens, keep=keep)
        tokens = [read(prompt) for prompt in as_list(prompts)]
        vectors = self.vectors(tokens, [params] * len(tokens))
        return [
            EmbeddingOutput(str(next(self._ids)), ids, vector)
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
        keep = self._limit(truncate_prompt_tokens)
        self._check_task(scores=True)
        pairs = [self.tokenizer.encode_pair(*pair, keep=keep) for pair in as_pairs(text_1, text_2)]
        tokens = [self.tokens(ids) for ids, _ in pairs]
        params = [
            self.check_params(PoolingParams(token_type_ids=types), len(ids)) for ids, types in pairs
        ]
        scores = self.vectors(tokens, params)
        return [
            ScoreOutput(str(next(self._ids)), ids, score)
            for ids, (score,) in zip(tokens, scores, strict=True)
        ]

    def _limit(self, truncate_prompt_tokens: int | None) -> int | None:
        """Return the number of tokens to truncate to; None: do not truncate."""
        check_truncation(truncate_prompt_tokens)
        return self.max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens

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
        size = self._model.hidden_size * len(self._pooling.modes)
        trained = self._config.get("matryoshka_dimensions")
        any_size = self._config.get("is_matryoshka") is True
        params.check_dimensions(1 if self._scorer else size, trained, any_size=any_size)
        return params

    def _check_task(self, *, scores: bool) -> None:
        """Raise InvalidArgumentError unless the model scores pairs, or makes embeddings."""
        if scores == self.is_cross_encoder:
            return
        name = ", ".join(Fields(self._config).texts("architectures"))
        if scores:
            raise InvalidArgumentError(
                f"The model is an encoder ({name}), which makes embeddings; it does not score "
                "pairs of texts. Use a cross-encoder, such as BertForSequenceClassification with "
                "one label."
            )
        raise InvalidArgumentError(
            f"The model is a cross-encoder ({name}), which scores pairs of texts; it does not "
            "make embeddings. Use Embedder.score, or /v1/score or /v1/rerank of a server."
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

    def vectors(self, texts: Sequence[Sequence[int]], params: Sequence[PoolingParams]) -> Vectors:
        """Return the embeddings of tokenized texts, several per forward pass."""
        vectors: Vectors = []
        limit = self.config.scheduler.max_num_batched_tokens
        with private_context(self._priorities) as context, cpu_threads(self.config.cpu_threads):
            start = 0
            while start < len(texts):
                end, size = start + 1, len(texts[start])
                while end < len(texts) and size + len(texts[end]) <= limit:
                    size += len(texts[end])
                    end += 1
                vectors += context.run(self._forward, texts[start:end], params[start:end])
                start = end
        return vectors

    def _forward(self, texts: Sequence[Sequence[int]], params: Sequence[PoolingParams]) -> Vectors:
        lengths = [len(text) for text in texts]
        ids = [token for text in texts for token in text]
        positions = [place for length in lengths for place in range(length)]
        starts = [0, *accumulate(lengths)]
        tensor = partial(torch.tensor, device=self._device)
        options = {"cu_seqlens": tensor(starts, dtype=torch.int32)}
        if self._scorer is not None and self._scorer.num_token_types:
            types = [kind for pair in params for kind in pair.token_type_ids or ()]
            options["token_type_ids"] = tensor(types)
        with platforms.current_platform.inference_mode(), self.selection_report.watch(len(ids)):
            hidden = self._model(tensor(ids), tensor(positions), **options)
            if self._scorer is not None:
                logits = hidden.float()[:, None]
                scores = logits.sigmoid() if self._is_sigmoid else logits
                return [list(row) for row in scores.tolist()]
            states = hidden.split_with_sizes(lengths)
            pooled = [self._pooling(*item) for item in zip(states, params, strict=True)]
            # One copy to the host for all, which may have several lengths.
            numbers: list[float] = torch.cat(pooled).tolist()
        ends = list(accumulate(len(vector) for vector in pooled))
        return [numbers[end - len(one) : end] for end, one in zip(ends, pooled, strict=True)]


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
