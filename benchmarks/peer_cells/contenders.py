"""The engines that are measured: a process each, with the same interface."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine_cells.llama_cpp_contender import LlamaCppProcess
from harness import Worker
from peer_cells.environments import FOLDER
from peer_cells.models import Models

OPWEAVE = "opweave"
BATCH, CONTEXT, REQUESTS = 512, 1024, 32  # tokens of a forward and of a sequence; sequences
_WORKERS = Path(__file__).with_name("workers")
_TIMEOUTS = {"start_timeout": 300.0, "timeout": 120.0}


class Answer(NamedTuple):
    """Tokens for each prompt, and the seconds until all of them were generated."""

    tokens: list[list[int]]
    seconds: float


class Engine(Protocol):
    """A process that has a model."""

    @property
    def build(self) -> str:
        """The name and the version. Waits until the model is loaded."""

    def generate(self, prompts: list[list[int]], counts: list[int]) -> Answer:
        """Return as many greedy tokens as *counts* says for each of the *prompts*."""

    def close(self) -> None:
        """End the process."""


class Serving(Worker):
    """A script of the folder ``workers``."""

    @property
    def build(self) -> str:
        return str(self.greeting["build"])

    def generate(self, prompts: list[list[int]], counts: list[int]) -> Answer:
        return Answer(**self.ask({"prompts": prompts, "counts": counts}))


class LlamaCpp(LlamaCppProcess):
    """llama.cpp, which answers one prompt after the other."""

    @property
    def build(self) -> str:
        return super().build.partition(":")[0]

    def generate(self, prompts: list[list[int]], counts: list[int]) -> Answer:
        answers = [self.answer(*each) for each in zip(prompts, counts, strict=True)]
        return Answer([each.tokens for each in answers], sum(sum(a.seconds) for a in answers))


def start(
    engine: str, python: Path, models: Models, model: str, weights: str, threads: int
) -> Engine:
    """Start an engine; its ``build`` waits until the model is loaded.

    Args:
        engine: opweave, or a key of ENVIRONMENTS.
        python: that has it.
        models: the files.
        model: which of them.
        weights: ``"float32"``, ``"bfloat16"``, ``"w4a16"``, ``"q4_0"`` or ``"q4_k"``.
        threads: that compute.

    Raises:
        WorkerError: the process cannot be started, or the model cannot be converted.
    """
    is_dense = weights in ("float32", "bfloat16")
    dtype = weights if is_dense else "bfloat16"
    if engine == "llama.cpp":
        file = models.gguf(model) if is_dense else models.blocks(model, weights)
        cache = "f32" if weights == "float32" else "f16"
        return LlamaCpp(
            str(python), file, threads=threads, context=CONTEXT, cache=cache, **_TIMEOUTS
        )
    if is_dense:
        path = models.checkpoint(model)
    elif weights == "w4a16":
        path = models.configuration(model)
    else:
        path = models.blocks(model, weights)
    options = {"model": str(path), "dtype": dtype, "batch": BATCH}
    env = {"OMP_NUM_THREADS": str(threads)}
    if engine == OPWEAVE:
        options |= {"int4": weights == "w4a16", "context": CONTEXT}
        return _serving(engine, sys.executable, "opweave_worker.py", options, env)
    if engine == "vLLM":
        options |= {"eager": False, "dummy": False, "context": CONTEXT, "requests": REQUESTS}
        return _serving(engine, python, "vllm_worker.py", options, env | _vllm_env(python, threads))
    if engine == "OpenVINO":
        options |= {
            "model": str(models.openvino(model, python)),
            "threads": threads,
            "vocabulary": models.vocabulary(model),
        }
        return _serving(engine, python, "openvino_worker.py", options, env)
    return _serving(engine, python, "transformers_worker.py", options, env)


def _serving(
    engine: str, python: Path | str, script: str, options: Any, env: Mapping[str, str]
) -> Serving:
    command = [str(python), str(_WORKERS / script), json.dumps(options)]
    return Serving(command, {**os.environ, "HF_HUB_OFFLINE": "1", **env}, engine, **_TIMEOUTS)


def _vllm_env(python: Path, threads: int) -> dict[str, str]:
    """Return the settings that vLLM recommends for CPUs, and a cache for what it compiles."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    env = {
        "VLLM_CACHE_ROOT": str(FOLDER / "vllm-cache"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    return env | ({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {})
