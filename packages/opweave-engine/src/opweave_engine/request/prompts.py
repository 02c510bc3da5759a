"""Validate and tokenize prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from opweave_engine.errors import PromptError
from opweave_engine.sampling.sampling_params import SamplingParams
from opweave_engine.tokenization.tokenizer import Side, Tokenizer


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
        ids = truncated(
            content if isinstance(content, str) else as_ids(content),
            self.tokenizer,
            keep,
            side="left" if self.answers else "right",
            add_special_tokens=add_special_tokens,
        )
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        if not ids:
            raise PromptError(
                f"The prompt {prompt!r} has no tokens, and the tokenizer has none to begin with."
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
    """Return pairs of texts: of one with one or several, or of as many as there are in both.

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
    if not isinstance(params, list | tuple) or not all(
        isinstance(item, SamplingParams) for item in params
    ):
        raise PromptError(
            f"sampling_params must be SamplingParams or a list of them, not {params!r}."
        )
    if len(params) != count:
        raise PromptError(
            f"There are {count} prompts but {len(params)} sampling_params. Give one for all, or "
            "one for each."
        )
    return list(params)


def _are_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    )
