"""Validate and tokenize prompts, also by plugins' I/O processors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict, cast

from opweave.config import EngineConfig
from opweave.plugins import IO_PROCESSOR_PLUGINS, resolve_obj_by_qualname
from opweave.plugins.entry import PluginTypeError
from opweave.plugins.loader import loader
from opweave_engine.errors import CheckpointError, InvalidArgumentError, PromptError
from opweave_engine.load.checkpoint import Checkpoint
from opweave_engine.outputs import EmbeddingOutput, RequestOutput
from opweave_engine.sampling.params import SamplingParams
from opweave_engine.tokenizer import Side, Tokenizer

# Validate and tokenize prompts.


class DictPrompt(TypedDict, total=False):
    """A prompt with options; it has either *prompt* or *prompt_token_ids*.

    Attributes:
        prompt: a text, or token ids.
        prompt_token_ids: token ids.
        cache_salt: a non-empty string; the prefix cache is shared only with prompts of the same
            salt. None: with prompts without a salt.
    """

    prompt: str | Sequence[int]
    prompt_token_ids: Sequence[int]
    cache_salt: str | None


Prompt = str | Sequence[int] | DictPrompt
_KINDS = (
    "a string, a list of strings, a list of token ids, a list of such lists, or dicts with prompt "
    "or prompt_token_ids"
)
_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True)
class PromptReader:
    """Tokenizes prompts, and checks the length.

    Attributes:
        tokenizer: the model's tokenizer.
        vocab_size: the size of the vocabulary.
        max_positions: the context length, for prompt and answer together.
        answers: whether the context must have room for an answer.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_positions: int
    answers: bool = True

    def tokens(
        self, prompt: Prompt, *, add_special_tokens: bool = True, keep: int | None = None
    ) -> list[int]:
        """Return the tokens of one prompt.

        Args:
            prompt: a text, token ids, or a dict with one of them.
            add_special_tokens: add the tokenizer's special tokens to a text.
            keep: truncate the prompt to this many tokens: the last ones, or the first ones if no
                answer follows; None: no truncation.

        Raises:
            PromptError: the prompt is neither text nor token ids, is empty, has ids outside the
                vocabulary, or leaves no room for an answer.
        """
        content, _ = split_prompt(prompt)
        text = content if isinstance(content, str) else as_ids(content)
        side: Side = "left" if self.answers else "right"
        ids = truncated(
            text, self.tokenizer, keep, side=side, add_special_tokens=add_special_tokens
        )
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        if not ids:
            raise PromptError(
                f"The prompt {prompt!r} has no tokens, and the tokenizer has no BOS token to add."
            )
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise PromptError(
                    f"The prompt holds the token id {token}, but ids are from 0 to "
                    f"{self.vocab_size - 1}."
                )
        too_many = len(ids) + self.answers - self.max_positions
        if too_many > 0:
            answer = ", at least one of them for the answer" if self.answers else ""
            raise PromptError(
                f"The prompt has {len(ids)} tokens, but the context is "
                f"{self.max_positions} tokens{answer}. Shorten it by {too_many}."
            )
        return ids


def truncated(
    prompt: str | list[int],
    tokenizer: Tokenizer,
    keep: int | None,
    *,
    side: Side,
    add_special_tokens: bool,
) -> list[int]:
    """Return the tokens of a prompt, truncated to *keep*, including added special tokens.

    Args:
        prompt: a text, or token ids.
        tokenizer: tokenizes a text.
        keep: the maximum number of tokens; None: no truncation.
        side: the side that is truncated: ``left`` keeps the last tokens.
        add_special_tokens: add the tokenizer's special tokens to a text.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(
            prompt, add_special_tokens=add_special_tokens, keep=keep, truncation_side=side
        )
    if keep is None or len(prompt) <= keep:
        return prompt
    return prompt[-keep:] if side == "left" else prompt[:keep]


def split_prompt(prompt: Prompt) -> tuple[str | Sequence[int], str | None]:
    """Return the text or the token ids of a prompt, and its cache salt.

    Raises:
        PromptError: a dict has other fields, or values of other types.
    """
    if not isinstance(prompt, dict):
        return prompt, None
    if unknown := sorted(map(repr, prompt.keys() - set(_FIELDS))):
        raise PromptError(
            f"A prompt has the fields {', '.join(unknown)}; its fields may be {', '.join(_FIELDS)}."
        )
    content, ids, salt = (cast(Any, prompt).get(name) for name in _FIELDS)
    if (content is None) == (ids is None):
        raise PromptError(f"The prompt is {prompt!r}; it must have prompt or prompt_token_ids.")
    if ids is not None and not _are_ids(ids):
        raise PromptError(f"prompt_token_ids={ids!r} must be a list of token ids.")
    if content is not None and not isinstance(content, str) and not _are_ids(content):
        raise PromptError(f"prompt={content!r} must be a string or a list of token ids.")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise PromptError(f"cache_salt={salt!r} must be a non-empty string.")
    return content if ids is None else ids, salt


def as_ids(prompt: object) -> list[int]:
    """Return *prompt* as a list of token ids.

    Raises:
        PromptError: it is not a sequence of token ids.
    """
    if not isinstance(prompt, Iterable) or not _are_ids(ids := list(prompt)):
        raise PromptError(f"The prompt is {prompt!r}; it must be a string or a list of token ids.")
    return ids


def as_list(prompts: object) -> list[Prompt]:
    """Return one or several prompts as a list of prompts.

    Raises:
        PromptError: an item is not a prompt.
    """
    if isinstance(prompts, str | dict):
        prompts = [prompts]
    if not isinstance(prompts, list | tuple):
        raise PromptError(f"Prompts must be {_KINDS}, not {type(prompts).__name__}.")
    if prompts and _are_ids(prompts):
        prompts = [prompts]
    for prompt in prompts:
        if isinstance(prompt, dict):
            split_prompt(cast(DictPrompt, prompt))
        elif not isinstance(prompt, str) and not _are_ids(prompt):
            raise PromptError(f"A prompt is {prompt!r}; prompts must be {_KINDS}.")
    return list(prompts)


def as_pairs(first: object, second: object) -> list[tuple[str, str]]:
    """Return pairs of texts: the first text with each second one, or one from each list.

    Args:
        first, second: a string or a list of strings.

    Raises:
        PromptError: an argument is of another type, or the lengths do not fit.
    """
    sides: list[list[str]] = []
    for texts in (first, second):
        side = [texts] if isinstance(texts, str) else texts
        if not isinstance(side, list | tuple) or not all(isinstance(text, str) for text in side):
            raise PromptError(f"A side of the pairs is {texts!r:.200}; it must be text or texts.")
        sides.append(list(side))
    if len(sides[0]) == 1:
        sides[0] *= len(sides[1])
    if not sides[1] or len(sides[0]) != len(sides[1]):
        raise PromptError(
            f"There are {len(sides[0])} first and {len(sides[1])} second texts. Give one first "
            "text, or as many as there are second ones."
        )
    return list(zip(*sides, strict=True))


def params_for(count: int, params: object, default: SamplingParams) -> list[SamplingParams]:
    """Return the sampling parameters of each of *count* prompts; None is *default*.

    Raises:
        PromptError: a list has another length, or an item is not sampling parameters.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    items = params if isinstance(params, list | tuple) else [params]
    if not all(isinstance(item, SamplingParams) for item in items):
        raise PromptError(
            f"sampling_params must be SamplingParams or a list of them, not {params!r}."
        )
    if len(items) != count:
        raise PromptError(
            f"There are {count} prompts but {len(items)} sampling_params. Give one for all, or "
            "one for each."
        )
    return list(items)


def _are_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    )


# I/O processors: plugins that turn custom requests into prompts, and outputs into results.


_FIELD = "io_processor_plugin"  # of config.json


class IOProcessor(ABC):
    """Turns a request into prompts, and their outputs into a result.

    The function of a plugin returns the qualified name of a class derived from this one.
    :meth:`opweave_engine.LLM.process`, :meth:`opweave_engine.Embedder.process` and the server's
    ``/v1/process`` call it. The server does so in several threads.

    Args:
        config: the engine's configuration.

    Attributes:
        embeds: whether the prompts are for an encoder, so that outputs are vectors.
    """

    embeds: ClassVar[bool] = False

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def prompts(self, request: Any) -> Sequence[Prompt]:
        """Return the prompts of a request.

        Raises:
            OpweaveError, ValueError: the request is malformed; the message is for the client.
        """

    def sampling_params(self, request: Any) -> SamplingParams | None:
        """Return the sampling parameters; None: the defaults. Raises like :meth:`prompts`."""
        return None

    @abstractmethod
    def result(
        self, request: Any, outputs: Sequence[RequestOutput] | Sequence[EmbeddingOutput]
    ) -> Any:
        """Return the answer to a request; *outputs* are in the order of its prompts.

        The server sends it as JSON.
        """


class IOProcessors:
    """The I/O processors of one engine, each created on first use.

    Args:
        checkpoint: may name a plugin, as ``io_processor_plugin`` in its ``config.json``.
        config: of the engine.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        self._checkpoint, self._config = checkpoint, config
        self._processors: dict[str, IOProcessor] = {}

    def find(self, name: str | None = None) -> IOProcessor | None:
        """Return the processor of plugin *name*; None: the checkpoint's, if it names one.

        Raises:
            UnknownPluginError, PluginTypeError, PluginError: as :func:`io_processor` raises them.
            CheckpointError: the checkpoint's value is not a string.
        """
        name = self._checkpoint.config().get(_FIELD) if name is None else name
        if name is None:
            return None
        if not isinstance(name, str):
            raise CheckpointError(
                f"config.json says {_FIELD}={name!r}; it must be the name of a plugin."
            )
        if name not in self._processors:
            self._processors[name] = io_processor(name, self._config)
        return self._processors[name]

    def get(self, name: str | None, *, embeds: bool) -> IOProcessor:
        """Return the result of :meth:`find`, checked for an encoder or a text model.

        Raises:
            InvalidArgumentError: no processor is named, or it is for the other kind of model.
        """
        if (processor := self.find(name)) is None:
            raise InvalidArgumentError(
                f"No I/O processor is named: {self._checkpoint.path / 'config.json'} has no "
                f"{_FIELD}. Name a plugin: process(request, io_processor=NAME), or "
                "opweave serve --io-processor NAME."
            )
        if processor.embeds != embeds:
            kinds = ("models that generate text", "encoders")
            raise InvalidArgumentError(
                f"I/O processor {type(processor).__name__} is for {kinds[processor.embeds]}, but "
                f"the model is one of the {kinds[embeds]}."
            )
        return processor


def io_processor(name: str, config: EngineConfig) -> IOProcessor:
    """Return an instance of the I/O processor of plugin *name*.

    Raises:
        UnknownPluginError: (a LookupError) there is no such plugin; the message lists all.
        PluginTypeError: (a TypeError) the plugin does not name an :class:`IOProcessor`.
        PluginError: the plugin failed.
    """
    plugin = loader().find(IO_PROCESSOR_PLUGINS, name)
    qualname = plugin.returned if plugin.returned is not None else plugin.call()
    kind = resolve_obj_by_qualname(qualname) if isinstance(qualname, str) else qualname
    if not (isinstance(kind, type) and issubclass(kind, IOProcessor)):
        raise PluginTypeError(
            f"{plugin.entry} returned {qualname!r}; it should be the qualified name of a class "
            f"derived from {IOProcessor.__module__}.IOProcessor."
        )
    return kind(config)
