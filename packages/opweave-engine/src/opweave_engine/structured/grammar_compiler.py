"""Compiles grammars, first in a process of their own, and caches them."""

import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from opweave.config.child_process import ChildWorker, ending
from opweave_engine import errors
from opweave_engine.daemon_threads import DaemonThreads
from opweave_engine.sampling.params import SamplingParams
from opweave_engine.structured import grammar_worker
from opweave_engine.structured.grammar_worker import Vocabulary, native_matcher, native_vocabulary
from opweave_engine.structured.params import NAME, StructuredOutputsParams
from opweave_engine.structured.schema_grammar import grammar_text
from opweave_engine.tokenizer import AbsentTokenizer, Tokenizer

# A tokenizer's vocabulary for llguidance: the bytes of each token.


_END_TOKEN = "<end of a structured answer>"

# The arguments of grammar_worker.Vocabulary, which has their names.
VocabularyArguments = tuple[str, list[bytes], list[int], list[int], int | None]


def vocabulary_arguments(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]
) -> VocabularyArguments:
    """Return the arguments of :class:`~opweave_engine.structured.grammar_worker.Vocabulary`.

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
        raise errors.TokenizerError("the checkpoint has no tokenizer.json.")
    backend = errors.require("tokenizers").Tokenizer.from_str(tokenizer.to_json())
    eos = list(eos_token_ids)
    if not eos:
        backend.add_special_tokens([_END_TOKEN])
        eos = [backend.token_to_id(_END_TOKEN)]
    size = max(vocab_size, *(token + 1 for token in backend.get_vocab().values()))
    tokens = _bytes_of_all(tokenizer, backend, size)
    special = sorted({*tokenizer.special_ids, *eos})
    return backend.to_str(), tokens, special, eos, tokenizer.bos_token_id


def _bytes_of_all(tokenizer: Tokenizer, backend: Any, size: int) -> list[bytes]:
    """Return the bytes of each token; none where there is no such token."""
    try:
        native = errors.require("llguidance").LLTokenizer(backend.to_str(), slices=[])
    except ValueError:  # a decoder that llguidance does not know
        return [
            b"" if backend.id_to_token(token) is None else tokenizer.bytes_of(token) or b""
            for token in range(size)
        ]
    tokens = [native.decode_bytes([token]) for token in range(min(size, native.vocab_size))]
    return tokens + [b""] * (size - len(tokens))


# Compiles grammars in processes, which may crash, hang or run out of memory.


_CLOSE_SECONDS = 5.0  # for a grammar that the engine's own process is compiling


class GrammarProcess(ChildWorker):
    """A process that compiles grammars, and the queue and the thread that give it work.

    Both start with the first grammar. After a crash or a timeout, the next grammar gets a new
    process.

    Args:
        seconds: time limit of a grammar.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(Path(grammar_worker.__file__), None)
        self.seconds = seconds
        self._is_closed = False
        self._jobs = DaemonThreads(1, "opweave-grammars")
        self._busy = threading.Lock()

    def environment(self) -> Mapping[str, str]:
        # glibc reserves address space for each arena, and the process has a limit of that.
        return {"MALLOC_ARENA_MAX": "1"}

    def start_error(self, code: int) -> Exception:
        self.check_open()
        return errors.EngineError(f"the process that compiles grammars ended with {ending(code)}.")

    def submit(self, job: Callable[[], None]) -> None:
        """Run *job* in the thread, after those submitted before."""

        def run() -> None:
            with self._busy:
                job()

        self._jobs.submit(run)

    def check_open(self) -> None:
        """Raise EngineDeadError if :meth:`close` was called."""
        if self._is_closed:
            raise errors.EngineDeadError("The engine is shut down, and compiles no grammars.")

    def check(self, vocabulary: VocabularyArguments, grammar: str) -> int:
        """Compile *grammar* in the process, and compute its first mask; only a job may call this.

        Returns:
            The bytes that the compiled grammar takes.

        Raises:
            TimeoutError: the time limit has passed.
            ValueError: the grammar does not compile, or ended the process.
            EngineDeadError: :meth:`close` was called.
        """
        self.check_open()
        self._task = vocabulary, self.seconds
        process = self.running()
        try:
            process.connection.send(grammar)
            why, size = process.receive(self.seconds)
        except TimeoutError:
            self.end()
            raise
        except (EOFError, OSError):
            code = self.end()
            self.check_open()
            raise ValueError(
                f"it is too complex: compiling it ended a process with {ending(code)}"
            ) from None
        if why:
            raise ValueError(why)
        return int(size)

    def close(self) -> None:
        """Kill the process; jobs that have not finished fail."""
        self._is_closed = True
        self.kill()
        if self._busy.acquire(timeout=_CLOSE_SECONDS):
            self.end()
            self._busy.release()


# The tokens that the grammar of an answer allows next.


class TokenMask(NamedTuple):
    """The tokens that may come next, one bit per token, the lowest bit of a byte first.

    Attributes:
        allowed: the allowed tokens, without end-of-text tokens if the request ignores those.
        is_last: whether only an end-of-text token may follow, so that the answer is complete.
    """

    allowed: bytes
    is_last: bool

    @classmethod
    def of(cls, words: NDArray[np.uint8], eos: NDArray[np.uint8], *, ignore_eos: bool) -> Self:
        """Return the mask of a row that llguidance has filled.

        Args:
            words: the row, as bytes.
            eos: the bits of the end-of-text tokens.
            ignore_eos: whether the request continues after an end-of-text token.
        """
        text = words & ~eos
        is_last = not text.any()
        return cls((text if ignore_eos and not is_last else words).tobytes(), is_last)


@dataclass(frozen=True, eq=False)
class _Compiled:
    """A grammar in its initial state; each answer starts with a copy of *matcher*.

    Attributes:
        matcher: llguidance's matcher. Its copies share most of its memory.
        words: the first mask.
        size: the bytes that *matcher* and the text of the grammar take.
    """

    matcher: Any
    words: NDArray[np.uint8]
    size: int


class GrammarState:
    """The position of one answer in its grammar.

    It does not depend on KV blocks, so preemption does not change it.
    :meth:`GrammarCompiler.advance` updates it.

    Attributes:
        grammar: the compiled grammar, whose memory *matcher* shares.
        matcher: llguidance's matcher.
        ignore_eos: whether the request continues after an end-of-text token.
        mask: the tokens that may come next.
        error: why the answer cannot follow the grammar any further, or None.
    """

    def __init__(self, grammar: _Compiled, mask: TokenMask, *, ignore_eos: bool) -> None:
        self.grammar, self.matcher = grammar, grammar.matcher.deep_copy()
        self.mask, self.ignore_eos = mask, ignore_eos
        self.error: errors.SamplingParamsError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete and cannot continue."""
        return self.mask.is_last

    def leaves_any(self, forbidden: tuple[int, ...]) -> bool:
        """Whether the grammar allows a token that is not *forbidden*."""
        rest = np.frombuffer(self.mask.allowed, np.uint8).copy()
        for token in forbidden:
            rest[token // 8] &= ~np.uint8(1 << token % 8)
        return bool(rest.any())


# Compiles grammars, and caches them for all answers of an engine.


_MAX_CACHED_GRAMMARS = 256
_HELD_BYTES = 256 * 2**20  # limit for the grammars in the cache and of unfinished answers
_SMALL_BYTES = 2**20  # grammars up to this size are compiled even beyond that limit
# Grammars that are larger or take longer go to a second process, so that others need not wait.
_QUICK_CHARACTERS, _QUICK_SECONDS = 2**16, 0.25
_MAX_SECONDS = 10.0
_MAX_WAITING_SECONDS = 30.0


class GrammarCompiler:
    """Compiles constraints for one model, and advances the answers that follow them.

    :meth:`compile` and :meth:`start` may be called from several threads. Grammars come from
    clients, so a process with limits compiles each one first, and this one only if that succeeds.

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
        self._held: weakref.WeakSet[_Compiled] = weakref.WeakSet()
        self._lock = Lock()
        self._quick, self._slow = GrammarProcess(_QUICK_SECONDS), GrammarProcess(_MAX_SECONDS)
        self.close = weakref.finalize(self, _close, self._quick, self._slow)

    def compile(self, params: StructuredOutputsParams) -> Future[_Compiled]:
        """Compile a constraint in another thread, in advance for :meth:`start`.

        The future raises:
            SamplingParamsError: the constraint is not valid, or exceeds a limit.
            GrammarQueueFullError: it had to wait too long for others, or those of unfinished
                answers take too much memory.
            MissingDependencyError: llguidance is not installed.
            EngineDeadError: the engine was shut down.
        """
        result: Future[_Compiled] = Future()
        self._submit(self._quick, params, result)
        return result

    def start(self, params: SamplingParams) -> GrammarState | None:
        """Return the initial state of an answer, or None if it is not constrained.

        Raises as :meth:`compile`.
        """
        form, ignore_eos = params.structured_outputs, params.ignore_eos
        if form is None:
            return None
        compiled = self._cached(_text(form)) or self.compile(form).result()
        mask = TokenMask.of(compiled.words, self._eos_bits, ignore_eos=ignore_eos)
        return GrammarState(compiled, mask, ignore_eos=ignore_eos)

    def advance(self, taken: Iterable[tuple[GrammarState | None, int]]) -> None:
        """Advance each answer by its new token, and compute the masks of the allowed next tokens.

        All answers of a batch are advanced in one call, in parallel.
        """
        pairs = [(state, token) for state, token in taken if state is not None]
        if not pairs:
            return
        self._executor.consume_token_par([(state.matcher, token) for state, token in pairs])
        masks = np.zeros((len(pairs), len(self._eos_bits)), np.uint8)  # a bit per token
        rows = [(state.matcher, row) for row, (state, _) in enumerate(pairs)]
        self._executor.unsafe_compute_mask_ptr(
            rows, masks.ctypes.data, masks.shape[1], masks.shape[0]
        )
        for (state, _), words in zip(pairs, masks, strict=True):
            if state.matcher.is_error():
                why = _one_line(state.matcher.get_error())
                state.error = errors.SamplingParamsError(
                    f"{NAME}: the answer cannot go on: {why}", NAME
                )
            else:
                state.mask = TokenMask.of(words, self._eos_bits, ignore_eos=state.ignore_eos)

    def _submit(
        self, process: GrammarProcess, params: StructuredOutputsParams, result: Future[_Compiled]
    ) -> None:
        process.submit(partial(self._compile, process, params, result, time.monotonic()))

    def _compile(
        self,
        process: GrammarProcess,
        params: StructuredOutputsParams,
        result: Future[_Compiled],
        submitted: float,
    ) -> None:
        if result.cancelled():
            return
        with suppress(InvalidStateError):  # it was cancelled meanwhile
            try:
                compiled = self._compiled_by(process, params, submitted)
                if compiled is None:
                    self._submit(self._slow, params, result)
                else:
                    result.set_result(compiled)
            except BaseException as error:  # the future must get any error
                result.set_exception(error)

    def _compiled_by(
        self, process: GrammarProcess, params: StructuredOutputsParams, submitted: float
    ) -> _Compiled | None:
        """Return the compiled constraint; None if it takes the quick process too long."""
        text = _text(params)
        if (compiled := self._cached(text)) is not None:
            return compiled
        if time.monotonic() - submitted > _MAX_WAITING_SECONDS:
            raise errors.GrammarQueueFullError(
                f"The grammar waited for {_MAX_WAITING_SECONDS:g} s, because others take long to "
                "compile. Try again later."
            )
        is_quick = process is self._quick
        if is_quick and len(text) > _QUICK_CHARACTERS:
            return None
        try:
            size = process.check(self._vocabulary_arguments, text) + sys.getsizeof(text)
        except TimeoutError:
            if is_quick:
                return None
            raise _error(params, f"it takes longer than {process.seconds:g} s") from None
        except ValueError as error:
            raise _error(params, str(error)) from error
        process.check_open()
        self._make_room(size)
        matcher = native_matcher(self._vocabulary, text)
        # Not in the executor's threads, for which the engine's steps would wait. The copies of the
        # matcher share what this computes.
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: len(self._eos_bits)]
        if matcher.is_error():
            raise _error(params, matcher.get_error())
        if not words.any() or not (self._eos_token_ids or (words & ~self._eos_bits).any()):
            raise _error(params, "no text satisfies it, or only the empty one")
        compiled = _Compiled(matcher, words, size)
        with self._lock:
            self._held.add(compiled)
            self._compiled[text] = compiled
            if len(self._compiled) > _MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    def _cached(self, text: str) -> _Compiled | None:
        with self._lock:
            if (compiled := self._compiled.get(text)) is not None:
                self._compiled.move_to_end(text)
            return compiled

    def _make_room(self, size: int) -> None:
        """Remove grammars from the cache until another one of *size* bytes may be compiled.

        Raises:
            GrammarQueueFullError: the grammars of unfinished answers take too much memory.
        """
        with self._lock:
            while (held := sum(compiled.size for compiled in self._held)) + size > _HELD_BYTES:
                if not self._compiled and size <= _SMALL_BYTES:
                    return
                if not self._compiled:
                    raise errors.GrammarQueueFullError(
                        f"The grammars of unfinished answers take {held / 2**20:.0f} MiB, and this "
                        f"one {size / 2**20:.0f} MiB, of at most {_HELD_BYTES / 2**20:.0f} MiB. "
                        "Try again later."
                    )
                self._compiled.popitem(last=False)

    @cached_property
    def _vocabulary(self) -> Any:
        return native_vocabulary(Vocabulary(*self._vocabulary_arguments))

    @cached_property
    def _vocabulary_arguments(self) -> VocabularyArguments:
        try:
            return vocabulary_arguments(self._tokenizer, self._vocab_size, self._eos_token_ids)
        except errors.TokenizerError as error:
            raise errors.SamplingParamsError(f"{NAME} needs a tokenizer: {error}", NAME) from error

    @cached_property
    def _executor(self) -> Any:
        return errors.require("llguidance").LLExecutor()

    @cached_property
    def _eos_bits(self) -> NDArray[np.uint8]:
        bits = np.zeros(-(-self._vocabulary.vocab_size // 32) * 32, np.uint8)
        bits[self._vocabulary.eos_tokens] = 1
        return np.packbits(bits, bitorder="little")


def _close(*processes: GrammarProcess) -> None:
    for process in processes:
        process.close()


def _text(params: StructuredOutputsParams) -> str:
    try:
        return grammar_text(params)
    except ValueError as error:
        raise _error(params, str(error)) from error


def _error(params: StructuredOutputsParams, why: str) -> errors.SamplingParamsError:
    kind = {"json": "JSON schema", "json_object": "JSON schema"}.get(params.kind, params.kind)
    return errors.SamplingParamsError(f"{NAME}: cannot compile the {kind}: {_one_line(why)}", NAME)


def _one_line(text: str) -> str:
    """Return a message of llguidance in one line, without dumps of the parser's state."""
    text = text.partition("<state>")[0].partition("<backtrace>")[0]
    return " ".join(text.split()).rstrip(".") + "."
