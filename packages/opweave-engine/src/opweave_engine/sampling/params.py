"""Sampling parameters of one request."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch

from opweave.errors import shown
from opweave_engine.errors import SamplingParamsError
from opweave_engine.structured.params import StructuredOutputsParams

# Checks of single sampling parameters.


def check_int(
    name: str, value: object, least: int, note: str, *, most: int = 2**63 - 1, subject: str = ""
) -> None:
    """Raise SamplingParamsError unless *value* is an integer from *least* to *most*."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        limit = f"an integer of at least {least}, {note}"
    elif value > most:
        limit = "below 2**63" if most == 2**63 - 1 else f"at most {most}"
    else:
        return
    raise SamplingParamsError(f"{subject}{name}={shown(value)} must be {limit}.", name)


def check_number(
    name: str, value: object, low: float, high: float, *, is_open: bool = False, place: str = ""
) -> None:
    """Raise SamplingParamsError unless *value* is a finite number from *low* to *high*.

    With *is_open*, *low* itself is an error, too.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    most = min(high, sys.float_info.max)  # larger integers cannot be converted to a float
    if not is_number or not low <= value <= most or (is_open and value == low):  # type: ignore[operator]
        bounds = f"{'above' if is_open else 'of at least'} {low:g}, "
        bounds += "finite" if high == math.inf else f"at most {high:g}"
        raise SamplingParamsError(f"{name}{place}={shown(value)} must be a number {bounds}.", name)


def check_flag(name: str, value: object) -> None:
    """Raise SamplingParamsError unless *value* is True or False."""
    if not isinstance(value, bool):
        raise SamplingParamsError(f"{name}={value!r} is neither True nor False.", name)


def check_truncation(count: object) -> None:
    """Raise SamplingParamsError unless *count* is a number of prompt tokens to keep, -1 or None."""
    if count not in (None, -1):
        check_int("truncate_prompt_tokens", count, 1, "or -1 for as many as there is room for")


def texts(name: str, value: object) -> tuple[str, ...]:
    """Return one text or several as a tuple.

    Raises:
        SamplingParamsError: *value* is something else, or a text is empty.
    """
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise SamplingParamsError(f"{name}={value!r} must be a string or a list of strings.", name)
    if "" in strings:
        raise SamplingParamsError(f"{name} holds an empty string, which every text contains.", name)
    return tuple(strings)


def token_ids(name: str, ids: object) -> tuple[int, ...]:
    """Return a list of token ids as a tuple.

    Raises:
        SamplingParamsError: *ids* is something else.
    """
    if not isinstance(ids, list | tuple):
        raise SamplingParamsError(f"{name}={ids!r} must be a list of token ids.", name)
    for token in ids:
        check_int(name, token, 0, "an id of the vocabulary", subject="a token of ")
    return tuple(ids)


# All parameters of a request.


MAX_LOGPROBS = 20  # as many as OpenAI's API gives
MAX_N = 128  # answers to one prompt
_FLAGS = (
    "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output",
)  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stop conditions of one request.

    Attributes:
        max_tokens: the maximum number of tokens; None: the rest of the context.
        temperature: divides the logits; 0 is greedy.
        top_p: sample from the most likely tokens that together reach this probability.
        top_k: sample from this many most likely tokens; 0 or -1: all.
        min_p: sample from tokens with at least this probability, relative to the most likely one.
        seed: a 64-bit integer that makes sampling reproducible; None or -1: the engine draws one.
            Logits, and thus tokens, may still depend on the other requests in the batch, unless
            OPWEAVE_BATCH_INVARIANT is set: see ``how-to/batch-invariance.md``.
        stop: one or more texts that end the request; they are not part of its text, unless
            *include_stop_str_in_output*.
        ignore_eos: continue after an end-of-text token.
        stop_token_ids: tokens that end the request, besides the end-of-text token; they are not
            part of its text, unless *include_stop_str_in_output*.
        min_tokens: the minimum number of tokens; until then, tokens that would end the answer are
            not sampled. *max_tokens* and the context length still apply.
        n: the number of answers, at most 128.
        presence_penalty: subtracted from the logit of every token in the answer, -2 to 2.
        frequency_penalty: subtracted once per occurrence of the token in the answer, -2 to 2.
        repetition_penalty: divides positive logits of tokens in the prompt or answer, and
            multiplies negative ones; 1 has no effect.
        logit_bias: added to the logits of these tokens, -100 to 100.
        logprobs: return the log-probability of each token, and of this many most likely ones, at
            most 20. They come from the model's logits, before penalties, biases and temperature.
        prompt_logprobs: the same for the tokens of the prompt.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: if special tokens are shown, keep the space that some
            tokenizers write between two of them.
        include_stop_str_in_output: the text ends with the stop string, or with the text of the
            token that ended it.
        allowed_token_ids: sample only these tokens; None: all. End-of-text tokens must be listed,
            too, to be sampled.
        bad_words: texts that are not generated. As in vLLM, token sequences are forbidden: the text
            is tokenized alone, after a space and at the start of a line, and the last token of each
            sequence is not sampled after the others. Other tokens can still spell the text.
        truncate_prompt_tokens: truncate the prompt to its last tokens, this many, including special
            tokens that the tokenizer adds; -1: leave room for *max_tokens*; None: a prompt that is
            too long is an error.
        kept_special_tokens: special tokens that are never skipped, such as those that mark tool
            calls.
        structured_outputs: a constraint on the answer: a JSON schema, a regular expression, a
            choice or a grammar. End-of-text tokens are sampled only where it allows the end; a
            complete answer that cannot continue ends, even before *min_tokens*.

    Raises:
        SamplingParamsError: a value is out of range or of the wrong type.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] = ()
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = field(default=None, hash=False)
    kept_special_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, texts(name, getattr(self, name)))
        for name in ("stop_token_ids", "allowed_token_ids", "kept_special_tokens"):
            if name != "allowed_token_ids" or self.allowed_token_ids is not None:
                object.__setattr__(self, name, token_ids(name, getattr(self, name)))
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, "or None for no limit")
        check_number("temperature", self.temperature, 0.0, math.inf)
        check_number("top_p", self.top_p, 0.0, 1.0, is_open=True)
        check_int("top_k", self.top_k, -1, "where 0 and -1 mean all tokens")
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), "or None")
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_int("n", self.n, 1, f"and at most {MAX_N}", most=MAX_N)
        self._check_limits()
        self._check_penalties()
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams):
            message = f"structured_outputs={form!r} must be StructuredOutputsParams, or None."
            raise SamplingParamsError(message, "structured_outputs")

    def _check_limits(self) -> None:
        check_int("min_tokens", self.min_tokens, 0, "and at most max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}.",
                "min_tokens",
            )
        if self.allowed_token_ids == ():
            message = "allowed_token_ids is empty, which leaves no token; None allows all."
            raise SamplingParamsError(message, "allowed_token_ids")
        check_truncation(self.truncate_prompt_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, 0, f"at most {MAX_LOGPROBS}, or None", most=MAX_LOGPROBS)

    def _check_penalties(self) -> None:
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, is_open=True)
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise SamplingParamsError(
                f"logit_bias={self.logit_bias!r} must map token ids to numbers, or be None.",
                "logit_bias",
            )
        for token, bias in self.logit_bias.items():
            check_int("logit_bias", token, 0, "an id of the vocabulary", subject="a token of ")
            check_number("logit_bias", bias, -100.0, 100.0, place=f"[{token}]")

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy."""
        return self.temperature == 0

    @property
    def cuts(self) -> bool:
        """Whether the distribution is truncated."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalizes(self) -> bool:
        """Whether a penalty is set."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def prompt_limit(self, context: int) -> int | None:
        """Return the maximum number of prompt tokens for this *context*; None: no truncation."""
        if self.truncate_prompt_tokens == -1:
            return max(1, context - (self.max_tokens or 1))
        return self.truncate_prompt_tokens

    def check_vocabulary(
        self, size: int, eos_token_ids: Collection[int] = (), barred: Collection[int] = ()
    ) -> None:
        """Check that all token ids are below *size*, and that some token may be sampled.

        Args:
            size: the size of the vocabulary.
            eos_token_ids: tokens that end the answer.
            barred: tokens that are never sampled, because each is a bad word.

        Raises:
            SamplingParamsError: an id is out of range, or no token may be sampled.
        """
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            if (token := max(getattr(self, name) or (), default=0)) >= size:
                raise SamplingParamsError(
                    f"{name} holds the token id {token}, but ids are from 0 to {size - 1}.", name
                )
        if not (self.min_tokens or barred):
            return
        allowed = set(range(size) if self.allowed_token_ids is None else self.allowed_token_ids)
        if not allowed.difference(barred):
            raise SamplingParamsError("bad_words must leave some tokens to choose.", "bad_words")
        if self.min_tokens and not allowed.difference(barred, self.stop_token_ids, eos_token_ids):
            raise SamplingParamsError(
                f"min_tokens={self.min_tokens}, but every token ends the answer: stop_token_ids "
                "must leave some.",
                "min_tokens",
            )


def check_params(params: object) -> None:
    """Raise SamplingParamsError unless *params* are SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise SamplingParamsError(f"The sampling parameters are {params!r}, not SamplingParams.")


# Seeds for requests without one.


class RequestSeeds:
    """Draws a reproducible sequence of seeds for requests without one.

    Args:
        seed: the engine's seed.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randint, 2**63 - 1, (64,), generator=generator)
        # Each draw releases the GIL. Iterators of itertools may be shared between threads.
        self._seeds = chain.from_iterable(iter(lambda: draw().tolist(), None))

    def of(self, params: SamplingParams) -> int:
        """Return the seed of a request: its own, or the next one."""
        if params.seed is not None:
            return params.seed % 2**64
        return int(next(self._seeds))
