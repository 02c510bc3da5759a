"""llama.cpp as a contender: a process of its own, which waits while others are measured.

It runs in another Python, because its wheel is compiled where it is installed and brings an OpenMP
of its own; neither belongs into the environment that opweave is developed in.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from harness import Worker, WorkerError, last_error

_WORKER = Path(__file__).with_name("llama_cpp_worker.py")
HOW_TO_GET = (
    "llama.cpp is left out. To compare with it: python -m venv build/llama-cpp && "
    'CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" build/llama-cpp/bin/pip install '
    "llama-cpp-python, then --llama-cpp build/llama-cpp/bin/python"
)


class Answer(NamedTuple):
    """The tokens, and the seconds that each took; the first, with the prompt."""

    tokens: list[int]
    seconds: list[float]


def check_python(python: str) -> None:
    """Raise WorkerError unless *python* is a Python that can import ``llama_cpp``."""
    command = [python, "-P", "-c", "import llama_cpp"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        raise WorkerError(f"{python} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise WorkerError(f"{python} has no llama.cpp: {last_error(done.stderr)}")


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
        WorkerError: the model cannot be loaded.
    """
    process = LlamaCppProcess(python, model, threads=threads, context=context, cache=cache)
    try:
        _ = process.build
        yield process
    finally:
        process.close()


class LlamaCppProcess(Worker):
    """A process that answers prompts; the arguments are those of :func:`running`."""

    def __init__(
        self,
        python: str,
        model: Path,
        *,
        threads: int,
        context: int,
        cache: str = "f16",
        start_timeout: float | None = None,
        timeout: float | None = None,
    ) -> None:
        # -P: modules of this folder are not to be found by the names of installed ones.
        sizes = (f"--threads={threads}", f"--context={context}", f"--cache={cache}")
        super().__init__(
            [python, "-P", str(_WORKER), str(model), *sizes],
            os.environ | {"GGML_NO_BACKTRACE": "1"},  # its own message, not that of a debugger
            "llama.cpp",
            start_timeout=start_timeout,
            timeout=timeout,
        )

    @property
    def build(self) -> str:
        """The version, and the instructions that llama.cpp was compiled for."""
        return str(self.greeting["build"])

    def answer(self, prompt: list[int], count: int) -> Answer:
        """Return *count* tokens that follow *prompt*, each the most probable one.

        Raises:
            WorkerError: the process has stopped; the message has its last error.
        """
        return Answer(**self.ask({"prompt": prompt, "count": count}))
