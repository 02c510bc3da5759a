"""Runs a GGUF file with llama.cpp, in a Python that has llama-cpp-python but not opweave.

    python llama_cpp_worker.py MODEL --threads 1 --context 1024 --cache f16

The first line on stdout says what llama.cpp was built with. Then each line on stdin asks for a
greedy answer, ``{"prompt": [3, 1, 2], "count": 2}``, and each line on stdout is one:
``{"tokens": [7, 9], "seconds": [0.2, 0.1]}``, what each token took; the first, with the prompt.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

_CACHES = {"f16": llama_cpp.GGML_TYPE_F16, "f32": llama_cpp.GGML_TYPE_F32}


class Model:
    """A model with a context for one sequence, and llama.cpp's defaults in all that is not said."""

    def __init__(self, path: str, threads: int, context: int, cache: str) -> None:
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # of llama.cpp, too
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = _CACHES[cache]
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {context} tokens for {path}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def answer(self, prompt: list[int], count: int) -> dict[str, Any]:
        """Return *count* tokens that follow *prompt*, and the seconds that each took."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        tokens, seconds, given = [], [], prompt
        for _ in range(count):
            start = time.perf_counter()
            tokens.append(self._next(given))
            seconds.append(time.perf_counter() - start)
            given = tokens[-1:]
        return {"tokens": tokens, "seconds": seconds}

    def _next(self, given: list[int]) -> int:
        tokens = (llama_cpp.llama_token * len(given))(*given)  # the batch points to it
        batch = llama_cpp.llama_batch_get_one(tokens, len(given))
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode of {len(given)} tokens gave {status}")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._size,)).argmax())


def build() -> str:
    """Return what runs: versions, and the instructions that llama.cpp was compiled for."""
    system = llama_cpp.llama_print_system_info().decode()
    features = [part.split("=")[0].split(":")[-1] for part in system.split("|") if "= 1" in part]
    return f"llama-cpp-python {llama_cpp.__version__}: {' '.join(map(str.strip, features))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--cache", choices=list(_CACHES), required=True, help="its dtype")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp's own output is not an answer
    model = Model(options.model, options.threads, options.context, options.cache)
    print(json.dumps({"build": build()}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(model.answer(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
