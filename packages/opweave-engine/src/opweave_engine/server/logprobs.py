"""Log-probabilities in the formats of OpenAI's APIs."""

from collections.abc import Iterable, Mapping, Sequence

from opweave_engine import CompletionOutput, Logprob
from opweave_engine.detokenizer import IncrementalDecoder
from opweave_engine.server.protocol.base import PromptLogprob, PromptLogprobs
from opweave_engine.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, TopLogprob
from opweave_engine.server.protocol.completions import CompletionLogprobs
from opweave_engine.tokenizer import Tokenizer

# Positions of tokens in the detokenized text.


class Offsets:
    """Computes the positions of an answer's tokens incrementally.

    A token without text (the first bytes of a character, or a skipped special token) has the
    position of the next token.

    Args:
        decoder: decodes the answer.
        start: the length of the text before the answer.
    """

    def __init__(self, decoder: IncrementalDecoder, start: int = 0) -> None:
        self._decoder, self._position = decoder, start

    def add(self, token_ids: Iterable[int]) -> list[int]:
        """Return the positions of the next tokens."""
        positions = []
        for token in token_ids:
            positions.append(self._position)
            self._position += len(self._decoder.push(token))
        return positions


def prompt_offsets(tokenizer: Tokenizer, token_ids: Iterable[int], text: str) -> list[int]:
    """Return the positions of the tokens of a prompt in its text.

    A special token in the text has its position there, even if the tokenizer added it.
    """
    decoder, positions, position = IncrementalDecoder(tokenizer), [], 0
    for token in token_ids:
        positions.append(min(position, len(text)))
        if token not in tokenizer.special_ids:
            position += len(decoder.push(token))
        elif text.startswith(special := tokenizer.piece(token), position):
            position += len(special)
    return positions


# Log-probabilities in the formats of OpenAI's chat and completion APIs.


_REPLACEMENT = "\ufffd"
_MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI and vLLM write this number


def chat_logprobs(
    output: CompletionOutput, count: int, tokenizer: Tokenizer, *, as_ids: bool
) -> ChatLogprobs | None:
    """Return the logprobs of a chat, with the *count* most likely tokens at each position.

    With *as_ids*, tokens are written as ``token_id:17``.
    """
    if output.logprobs is None:
        return None

    def entry(token: int, at: Mapping[int, Logprob]) -> TopLogprob:
        logprob, token_bytes = at[token], tokenizer.bytes_of(token)
        return TopLogprob(
            token=_by_id(token) if as_ids else logprob.decoded_token,
            logprob=_number(logprob),
            bytes=None if token_bytes is None else list(token_bytes),
        )

    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                **entry(token, at).model_dump(),
                top_logprobs=[entry(likely, at) for likely in _most_likely(at, count)],
            )
            for token, at in zip(output.token_ids, output.logprobs, strict=True)
        ]
    )


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob] | None] | None,
    count: int,
    offsets: list[int],
    tokenizer: Tokenizer,
    *,
    first: str = "",
    as_ids: bool = False,
) -> CompletionLogprobs | None:
    """Return the logprobs of a completion.

    Args:
        token_ids: the tokens.
        logprobs: the logprobs of the tokens; None for the first token of a prompt.
        count: the number of most likely tokens to list.
        offsets: the position of each token in the text.
        tokenizer: gives the bytes of a token that is part of a character.
        first: the text of a token without logprobs.
        as_ids: write tokens as ``token_id:17``.
    """
    if logprobs is None:
        return None

    def name(token: int, at: Mapping[int, Logprob] | None) -> str:
        if as_ids:
            return _by_id(token)
        return first if at is None else _unique(at[token].decoded_token, tokenizer, token)

    def top(at: Mapping[int, Logprob], token: int) -> dict[str, float]:
        """Return the most likely tokens by name, and *token*, which is always there."""
        values: dict[str, float] = {}
        for likely in _most_likely(at, count):
            values.setdefault(name(likely, at), _number(at[likely]))
        values[name(token, at)] = _number(at[token])
        return values

    pairs = list(zip(token_ids, logprobs, strict=True))
    return CompletionLogprobs(
        tokens=[name(token, at) for token, at in pairs],
        token_logprobs=[None if at is None else _number(at[token]) for token, at in pairs],
        top_logprobs=[None if at is None else top(at, token) for token, at in pairs]
        if count
        else None,
        text_offset=offsets,
    )


def prompt_logprobs(
    logprobs: Sequence[Mapping[int, Logprob] | None] | None, token_ids: Sequence[int], count: int
) -> PromptLogprobs | None:
    """Return the logprobs of a prompt in vLLM's format: the *count* best, and the token itself."""
    if logprobs is None:
        return None
    return [
        None
        if at is None
        else {
            candidate: PromptLogprob(
                logprob=_number(value), rank=value.rank, decoded_token=value.decoded_token
            )
            for candidate, value in at.items()
            if candidate == token or value.rank <= count
        }
        for token, at in zip(token_ids, logprobs, strict=True)
    ]


def joined(*logprobs: CompletionLogprobs | None) -> CompletionLogprobs:
    """Concatenate lists of logprobs, which may be None."""
    parts = [part for part in logprobs if part is not None]
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[value for part in parts for value in part.token_logprobs],
        top_logprobs=[top for part in tops for top in part] if tops else None,
        text_offset=[offset for part in parts for offset in part.text_offset],
    )


def _number(value: Logprob) -> float:
    return max(value.logprob, _MIN_LOGPROB)


def _by_id(token: int) -> str:
    return f"token_id:{token}"


def _unique(text: str, tokenizer: Tokenizer, token: int) -> str:
    """Return the text of *token*, or its bytes, as OpenAI writes them, if they are incomplete.

    All parts of characters have the same text, U+FFFD.
    """
    if _REPLACEMENT not in text or (encoded := tokenizer.bytes_of(token)) is None:
        return text
    is_whole = encoded == text.encode()
    return text if is_whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded)


def _most_likely(at: Mapping[int, Logprob], count: int) -> list[int]:
    return sorted((t for t in at if at[t].rank <= count), key=lambda token: at[token].rank)
