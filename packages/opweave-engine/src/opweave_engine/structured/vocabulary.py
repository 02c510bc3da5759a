"""A tokenizer's vocabulary for llguidance: the bytes of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opweave_engine.dependencies import require
from opweave_engine.errors import TokenizerError
from opweave_engine.tokenization.tokenizer import AbsentTokenizer, Tokenizer

_END = "<end of a structured answer>"

# The arguments of grammar_program.native_vocabulary, which has their names.
VocabularyArguments = tuple[str, list[bytes], list[int], list[int], int | None]


def vocabulary_arguments(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]
) -> VocabularyArguments:
    """Return the arguments of :func:`~opweave_engine.structured.grammar_program.native_vocabulary`.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: the number of the model's logits, which may exceed the number of tokens.
        eos_token_ids: end-of-text tokens. If empty, a token beyond the vocabulary is added, which
            the model cannot sample.

    Raises:
        TokenizerError: there is no tokenizer.
        MissingDependencyError: llguidance is not installed.
    """
    if isinstance(tokenizer, AbsentTokenizer):
        raise TokenizerError("the checkpoint has no tokenizer.json.")
    backend = require("tokenizers").Tokenizer.from_str(tokenizer.to_json())
    eos = list(eos_token_ids)
    if not eos:
        backend.add_special_tokens([_END])
        eos = [backend.token_to_id(_END)]
    size = max(vocab_size, *(token + 1 for token in backend.get_vocab().values()))
    tokens = _bytes_of_all(tokenizer, backend, size)
    special = sorted({*tokenizer.special_ids, *eos})
    return backend.to_str(), tokens, special, eos, tokenizer.bos_token_id


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
