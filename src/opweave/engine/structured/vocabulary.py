"""A tokenizer's vocabulary for llguidance: the bytes of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opweave.engine.dependencies import require
from opweave.engine.errors import TokenizerError
from opweave.engine.tokenization.tokenizer import AbsentTokenizer, Tokenizer

_END = "<end of a structured answer>"


def vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> Any:
    """Return llguidance's tokenizer.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: the number of the model's logits, which may exceed the number of tokens.
        eos_token_ids: end-of-text tokens. If empty, a token beyond the vocabulary is added, which
            the model cannot sample.

    Raises:
        TokenizerError: there is no tokenizer.
        MissingDependencyError: llguidance is not installed.
    """
    llguidance, tokenizers = require("llguidance"), require("tokenizers")
    if isinstance(tokenizer, AbsentTokenizer):
        raise TokenizerError("the checkpoint has no tokenizer.json.")
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    eos = list(eos_token_ids)
    if not eos:
        backend.add_special_tokens([_END])
        eos = [backend.token_to_id(_END)]
    size = max(vocab_size, *(token + 1 for token in backend.get_vocab().values()))
    words = _Words(tokenizer, backend, size, eos)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), n_vocab=size, eos_token=eos)


class _Words:
    """The tokens and the encoder that llguidance reads of a tokenizer.

    llguidance can read ``tokenizer.json`` itself, but treats every added token that looks like
    ``<tool_call>`` as special, and text with the name of a special token as that token. No answer
    could satisfy a grammar with such text.
    """

    def __init__(
        self, tokenizer: Tokenizer, backend: Any, size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._backend = backend
        backend.encode_special_tokens = True  # their names in a text are text
        self.eos_token_id, self.bos_token_id = eos_token_ids[0], tokenizer.bos_token_id
        self._special = special = {*tokenizer.special_ids, *eos_token_ids}
        self.special_token_ids = sorted(special)
        self.tokens = _bytes_of_all(tokenizer, backend, size)
        self._ids = {text: i for i, text in enumerate(self.tokens) if text and i not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """Return the tokens that a grammar forces where it allows nothing but *text*."""
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not a string")  # which is how llguidance finds out
        wanted, ids = text.encode(), list(self._backend.encode(text, add_special_tokens=False).ids)
        found = b"".join(self.tokens[token] for token in ids)
        if found == b" " + wanted:  # many tokenizers begin a text with a space
            first = self.tokens[ids[0]][1:]
            if not first or first in self._ids:
                ids, found = [*([self._ids[first]] if first else []), *ids[1:]], wanted
        is_text = found == wanted and self._special.isdisjoint(ids)
        return ids if is_text else self._greedy(wanted)

    def _greedy(self, text: bytes) -> list[int]:
        ids, start = list[int](), 0
        while start < len(text):
            lengths = range(min(self._longest, len(text) - start), 0, -1)
            pieces = (text[start : start + length] for length in lengths)
            piece = next((each for each in pieces if each in self._ids), None)
            if piece is None:  # the vocabulary cannot write it
                return ids
            ids.append(self._ids[piece])
            start += len(piece)
        return ids


def _bytes_of_all(tokenizer: Tokenizer, backend: Any, size: int) -> list[bytes]:
    """Return the bytes of each token; none where there is no such token."""
    try:
        native = require("llguidance").LLTokenizer(backend.to_str(), slices=[])
    except ValueError:  # a decoder that llguidance does not know
        return [
            b"" if backend.id_to_token(token) is None else tokenizer.bytes_of(token) or b""
            for token in range(size)
        ]
    found = [native.decode_bytes([token]) for token in range(min(size, native.vocab_size))]
    return found + [b""] * (size - len(found))
