"""llama.cpp as a contender: a process of its own, which waits while others are measured.

It runs in another Python, because its wheel is compiled where it is installed and brings an OpenMP
of its own; neither belongs into the environment that opweave is developed in.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

_WORKER = Path(__file__).with_name("llama_cpp_worker.py")
HOW_TO_GET = (
    "llama.cpp is left out. To compare with it: python -m venv build/llama-cpp && "
    'CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" build/llama-cpp/bin/pip install '
    "llama-cpp-python, then --llama-cpp build/llama-cpp/bin/python"
)


class LlamaCppError(RuntimeError):
    """llama.cpp cannot be run, or has stopped."""


class Answer(NamedTuple):
    """The tokens, and the seconds that each took; the first, with the prompt."""

    tokens: list[int]
    seconds: list[float]


def check_python(python: str) -> None:
    """Raise LlamaCppError unless *python* is a Python that can import ``llama_cpp``."""
    command = [python, "-P", "-c", "import llama_cpp"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        raise LlamaCppError(f"{python} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise LlamaCppError(f"{python} has no llama.cpp: {_last_line(done.stderr)}")


@contextmanager
def running(
    python: str, model: Path, *, threads: int, context: int, cache: str = "f16"
) -> Iterator[LlamaCppProcess]:
    """Start a process that has loaded a model, and end it with the block.

    Args:
        python: a Python that has ``llama_cpp``.
        model: a GGUF file.
        threads: that compute.
        context: the most tokens of a prompt and its answer.
        cache: the dtype of keys and values, ``"f16"`` (llama.cpp's default) or ``"f32"``.

    Raises:
        LlamaCppError: the model cannot be loaded.
    """
    # -P: modules of this folder are not to be found by the names of installed ones.
    sizes = (f"--threads={threads}", f"--context={context}", f"--cache={cache}")
    command = [python, "-P", str(_WORKER), str(model), *sizes]
    last_words = os.environ | {"GGML_NO_BACKTRACE": "1"}  # its own, not those of a debugger
    # Errors go to a file, because a pipe that nobody reads fills up.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=last_words,
        )
        try:
            yield LlamaCppProcess(process, errors)
        finally:
            process.communicate()  # closes its stdin, which ends it


class LlamaCppProcess:
    """A process that answers prompts.

    Attributes:
        build: the version, and the instructions that llama.cpp was compiled for.
    """

    def __init__(self, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._process, self._errors = process, errors
        self.build: str = self._receive()["build"]

    def answer(self, prompt: list[int], count: int) -> Answer:
        """Return *count* tokens that follow *prompt*, each the most probable one.

        Raises:
            LlamaCppError: the process has stopped; the message has its last words.
        """
        request = json.dumps({"prompt": prompt, "count": count})
        with suppress(BrokenPipeError):  # nothing comes back, either, and that says why
            print(request, file=self._process.stdin, flush=True)
        return Answer(**self._receive())

    def _receive(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            why = _last_line(self._errors.read())
            raise LlamaCppError(f"llama.cpp has stopped with status {status}: {why}")
        found: dict[str, Any] = json.loads(line)
        return found


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1]
