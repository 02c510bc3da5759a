"""Compiles grammars, and caches them for all answers of an engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from opweave.engine.dependencies import require
from opweave.engine.errors import SamplingParamsError, TokenizerError
from opweave.engine.structured.grammar_text import grammar_text
from opweave.engine.structured.params import NAME, StructuredOutputsParams
from opweave.engine.structured.state import GrammarState, TokenMask
from opweave.engine.structured.vocabulary import vocabulary
from opweave.engine.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from opweave.engine.sampling.sampling_params import SamplingParams

_KEPT = 256  # compiled grammars


class _Compiled(NamedTuple):
    """A grammar in its initial state; each answer starts with a copy of *matcher*."""

    matcher: Any
    words: NDArray[np.uint8]


class GrammarCompiler:
    """Compiles constraints for one model, and advances the answers that follow them.

    :meth:`compile` and :meth:`start` may be called from several threads.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: the size of the vocabulary.
        eos_token_ids: the tokens that end a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._lock = Lock()

    def compile(self, params: SamplingParams) -> None:
        """Compile the constraint of a request in advance for :meth:`start`; may take seconds.

        Raises:
            SamplingParamsError: the constraint is not valid, or not supported.
            MissingDependencyError: llguidance is not installed.
        """
        if params.structured_outputs is not None:
            self._find(params.structured_outputs)

    def start(self, params: SamplingParams) -> GrammarState | None:
        """Return the initial state of an answer, or None if it is not constrained.

        Raises as :meth:`compile`.
        """
        if params.structured_outputs is None:
            return None
        found, ignore_eos = self._find(params.structured_outputs), params.ignore_eos
        mask = TokenMask.of(found.words, self._eos_bits, ignore_eos=ignore_eos)
        return GrammarState(found.matcher.deep_copy(), mask, ignore_eos=ignore_eos)

    def advance(self, taken: Iterable[tuple[GrammarState | None, int]]) -> None:
        """Advance each answer by its new token, and compute the masks of the allowed next tokens.

        All answers of a batch are advanced in one call, in parallel.
        """
        pairs = [(state, token) for state, token in taken if state is not None]
        if not pairs:
            return
        matchers = [state.matcher for state, _ in pairs]
        self._executor.consume_token_par([(state.matcher, token) for state, token in pairs])
        for (state, _), words in zip(pairs, self._masks(matchers), strict=True):
            if state.matcher.is_error():
                why = _one_line(state.matcher.get_error())
                state.error = SamplingParamsError(f"{NAME}: the answer cannot go on: {why}", NAME)
            else:
                state.mask = TokenMask.of(words, self._eos_bits, ignore_eos=state.ignore_eos)

    def _find(self, params: StructuredOutputsParams) -> _Compiled:
        try:
            text = grammar_text(params)
        except ValueError as error:
            raise _error(params, str(error)) from error
        with self._lock:
            if (known := self._compiled.get(text)) is not None:
                self._compiled.move_to_end(text)
                return known
        found = self._compile(params, text)
        with self._lock:
            self._compiled[text] = found
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, params: StructuredOutputsParams, text: str) -> _Compiled:
        matcher = require("llguidance").LLMatcher(self._vocabulary, text, log_level=0)
        words = self._masks([matcher])[0]  # the copies of the matcher share what this computes
        if matcher.is_error():
            raise _error(params, matcher.get_error())
        if not words.any() or not (self._eos_token_ids or (words & ~self._eos_bits).any()):
            raise _error(params, "no text satisfies it, or only the empty one")
        return _Compiled(matcher, words)

    def _masks(self, matchers: Sequence[Any]) -> NDArray[np.uint8]:
        """Return the bits of the tokens that may come next, ``(matchers, bytes)`` uint8."""
        masks = np.zeros((len(matchers), len(self._eos_bits)), np.uint8)
        rows = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(
            rows, masks.ctypes.data, masks.shape[1], masks.shape[0]
        )
        return masks

    @cached_property
    def _vocabulary(self) -> Any:
        try:
            return vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        except TokenizerError as error:
            raise SamplingParamsError(f"{NAME} needs a tokenizer: {error}", NAME) from error

    @cached_property
    def _executor(self) -> Any:
        return require("llguidance").LLExecutor()

    @cached_property
    def _eos_bits(self) -> NDArray[np.uint8]:
        bits = np.zeros(-(-self._vocabulary.vocab_size // 32) * 32, np.uint8)
        bits[self._vocabulary.eos_tokens] = 1
        return np.packbits(bits, bitorder="little")


def _error(params: StructuredOutputsParams, why: str) -> SamplingParamsError:
    kind = {"json": "JSON schema", "json_object": "JSON schema"}.get(params.kind, params.kind)
    return SamplingParamsError(f"{NAME}: cannot compile the {kind}: {_one_line(why)}", NAME)


def _one_line(text: str) -> str:
    """Return a message of llguidance in one line, without the dump of the parser's state."""
    return " ".join(text.partition("<state>")[0].split()).rstrip(".") + "."
