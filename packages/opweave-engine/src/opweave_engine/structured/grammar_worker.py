"""The program of the processes that compile grammars before the engine does.

A native parser can overflow its stack or run out of memory, which ends the process. This file is
run without its package, and imports neither opweave nor torch, so that a process starts fast.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# Stack size of the engine's threads (llguidance's, and Python's if the system has no limit). The
# threads here have half of it, so that a grammar that compiles here has a margin in the engine.
_THREAD_STACK_BYTES = 2 * 2**20
# Rows of ambiguous grammars grow with each token. The mask of a row of this size takes 0.1 s.
_MAX_ITEMS_IN_ROW = 1000
_NICENESS = 5  # if all cores are busy, the engine's steps run first
_MEMORY_BYTES = 256 * 2**20  # for compiling a grammar, in addition to the vocabulary
_MAX_COMPILED_BYTES = 64 * 2**20  # the longest list of choices takes 25 MiB
_BYTES_PER_CHARACTER = 32  # estimate for C libraries that do not count allocated memory


class Vocabulary:
    """The tokens and the encoder that llguidance reads of a tokenizer.

    llguidance can read ``tokenizer.json`` itself, but treats every added token that looks like
    ``<tool_call>`` as special, and text with the name of a special token as that token. No answer
    could satisfy a grammar with such text.

    Args:
        tokenizer: the text of ``tokenizer.json``.
        tokens: the bytes of each token; none where there is no such token.
        special_ids: the special tokens.
        eos_token_ids: the end-of-text tokens, at least one.
        bos_token_id: the token that begins a text, or None.
    """

    def __init__(
        self,
        tokenizer: str,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        bos_token_id: int | None,
    ) -> None:
        from tokenizers import Tokenizer

        self._backend = Tokenizer.from_str(tokenizer)
        self._backend.encode_special_tokens = True  # treat their names in a text as text
        self.eos_token_ids = list(eos_token_ids)
        self.eos_token_id, self.bos_token_id = self.eos_token_ids[0], bos_token_id
        self.special_token_ids, self.tokens = sorted(special_ids), tokens
        self._special = special = set(special_ids)
        self._ids = {text: i for i, text in enumerate(self.tokens) if text and i not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """Return the tokens that a grammar forces where it allows nothing but *text*."""
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not a string")  # llguidance tests the type this way
        data, ids = text.encode(), list(self._backend.encode(text, add_special_tokens=False).ids)
        written = b"".join(self.tokens[token] for token in ids)
        if written == b" " + data:  # many tokenizers begin a text with a space
            first = self.tokens[ids[0]][1:]
            if not first or first in self._ids:
                ids, written = [*([self._ids[first]] if first else []), *ids[1:]], data
        is_text = written == data and self._special.isdisjoint(ids)
        return ids if is_text else self._greedy(data)

    def _greedy(self, text: bytes) -> list[int]:
        ids, start = list[int](), 0
        while start < len(text):
            lengths = range(min(self._longest, len(text) - start), 0, -1)
            pieces = (text[start : start + length] for length in lengths)
            piece = next((piece for piece in pieces if piece in self._ids), None)
            if piece is None:  # the vocabulary cannot write it
                return ids
            ids.append(self._ids[piece])
            start += len(piece)
        return ids


def native_vocabulary(vocabulary: Vocabulary) -> Any:
    """Return llguidance's tokenizer."""
    import llguidance

    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(vocabulary),
        n_vocab=len(vocabulary.tokens),
        eos_token=vocabulary.eos_token_ids,
    )


def native_matcher(vocabulary: Any, grammar: str) -> Any:
    """Return llguidance's matcher, whose error says if the grammar does not compile."""
    import llguidance

    limits = llguidance.LLParserLimits(max_items_in_row=_MAX_ITEMS_IN_ROW)
    return llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


def main() -> None:
    """Answer each grammar with what :func:`_compile` returns."""
    os.nice(_NICENESS)
    connection = Connection(int(sys.argv[1]))
    vocabulary, seconds = connection.recv()
    native = native_vocabulary(Vocabulary(*vocabulary))
    _compile(native, 'start: "a"')  # allocates what all grammars share
    _limit_memory()
    connection.send(None)
    while True:
        try:
            text = connection.recv()
        except EOFError:
            return
        # The default action ends the process, even if its parent has ended and nobody else does.
        signal.setitimer(signal.ITIMER_REAL, seconds + 1.0)
        answer = _compile(native, text)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        connection.send(answer)


def _compile(vocabulary: Any, text: str) -> tuple[str, int]:
    """Compile a grammar, and compute its first mask.

    Returns:
        The reason why it does not compile, or an empty text, and the bytes that it takes.
    """
    before = allocated_bytes()
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack_bytes = _THREAD_STACK_BYTES if limit == resource.RLIM_INFINITY else limit
    matcher = _in_thread(stack_bytes // 2, lambda: native_matcher(vocabulary, text))
    _in_thread(_THREAD_STACK_BYTES // 2, matcher.compute_bitmask)
    if why := str(matcher.get_error()):
        return why, 0
    size = max(allocated_bytes() - before, 0) or _BYTES_PER_CHARACTER * len(text)
    if size > _MAX_COMPILED_BYTES:
        return (
            f"it takes {size / 2**20:.0f} MiB of memory when it is compiled, but at most "
            f"{_MAX_COMPILED_BYTES / 2**20:.0f} MiB are allowed; simplify it, such as with smaller "
            "repetition counts"
        ), 0
    return "", size


class _MallocInfo(ctypes.Structure):
    """The result of glibc's ``mallinfo``."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_uint32) for name in _names.split()]


def allocated_bytes() -> int:
    """Return the bytes that this process has allocated, or 0 if the C library has no count."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return int(info.uordblks) + int(info.hblkhd)


def _in_thread(stack_bytes: int, work: Callable[[], T]) -> T:
    results: list[T] = []
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # clients could fill the disk with dumps
    sizes = Path("/proc/self/statm")  # only Linux enforces the limit
    if sizes.exists():
        limit = int(sizes.read_text().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
