"""A language model of the 1B shape with random weights, run by opweave or by transformers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import DynamicCache, StaticCache

from engine_cells.models import SINGLE, their_model
from engine_cells.single import random_tokens, read_bytes
from opweave.config import (
    CacheConfig,
    CompilationConfig,
    CompilationMode,
    EngineConfig,
    SchedulerConfig,
)
from opweave_engine import EngineCore, RequestOutput, SamplingParams

DTYPE = torch.bfloat16
_BLOCK = 64  # tokens
_POSITIONS = 8192


class Contender(Protocol):
    """Decodes a batch of random prompts, and takes the time of each step.

    Attributes:
        read_bytes: of the weights that a decode step reads.
        answers: the tokens of the last batch.
    """

    read_bytes: int
    answers: list[list[int]]

    def steps(self) -> list[float]:
        """Return the seconds of each step; the first one computes the prompts."""


class Opweave:
    """opweave's engine, which decodes *batch* prompts together."""

    def __init__(
        self, path: Path, batch: int, prompt: int, tokens: int, *, device: str, compiled: bool
    ) -> None:
        mode = CompilationMode.OPWEAVE_COMPILE if compiled else CompilationMode.NONE
        length = prompt + tokens + 1
        config = EngineConfig(
            dtype=str(DTYPE).removeprefix("torch."),
            load_format="dummy",
            compilation_config=CompilationConfig(mode=mode),
            cache=CacheConfig(
                block_size=_BLOCK,
                num_blocks=batch * -(-length // _BLOCK) + 1,
                enable_prefix_caching=False,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=batch, max_num_batched_tokens=batch * prompt, max_model_len=length
            ),
        )
        self._core, self._names = EngineCore(path, config), itertools.count()
        self._batch, self._prompt, self._tokens = batch, prompt, tokens
        model = self._core.executor.worker.runner.model
        self.read_bytes, self._vocab_size = read_bytes(model), model.vocab_size

    def steps(self) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=self._tokens, ignore_eos=True)
        for _ in range(self._batch):
            tokens = random_tokens(self._prompt, self._vocab_size)
            request = self._core.prepare(str(next(self._names)), tokens, params, streams=False)
            self._core.add_request(request)
        times = []
        outputs: list[RequestOutput] = []
        while self._core.has_unfinished:
            times.append(_timed(lambda: outputs.extend(self._core.step())))
        outputs.sort(key=lambda output: int(output.request_id))
        self.answers = [output.outputs[0].token_ids for output in outputs]
        return times


class Transformers:
    """transformers' model, which reads each token back as its ``generate`` does.

    Compiled, it decodes with a static cache and CUDA graphs; prompts run op by op, as in
    ``generate``.
    """

    def __init__(
        self,
        path: Path,
        batch: int,
        prompt: int,
        tokens: int,
        *,
        device: str,
        compiled: bool,
        backend: str = "inductor",
    ) -> None:
        with torch.device(device):
            self._model = their_model(path, DTYPE)
        self._batch, self._prompt, self._tokens, self._device = batch, prompt, tokens, device
        self.read_bytes = sum(p.nbytes for p in self._model.parameters())
        self._cache: Any = None
        self._decode: Callable[..., Any] = self._model
        if compiled:
            self._cache = StaticCache(self._model.config, max_cache_len=prompt + tokens + 1)
            # CUDA graphs: only Inductor knows this mode.
            mode = "reduce-overhead" if device == "cuda" and backend == "inductor" else None
            self._decode = torch.compile(
                self._model.forward, backend=backend, mode=mode, fullgraph=True, dynamic=False
            )

    @torch.inference_mode()
    def steps(self) -> list[float]:
        vocab_size = self._model.config.vocab_size
        prompts = [random_tokens(self._prompt, vocab_size) for _ in range(self._batch)]
        self._next = torch.tensor(prompts, device=self._device)
        self._past = self._cache or DynamicCache(config=self._model.config)
        if self._cache is not None:
            self._cache.reset()
        self._position = 0
        self.answers = [[] for _ in prompts]
        times = [_timed(lambda: self._step(self._model))]
        for _ in range(self._tokens - 1):
            torch.compiler.cudagraph_mark_step_begin()
            times.append(_timed(lambda: self._step(self._decode)))
        return times

    def _step(self, model: Callable[..., Any]) -> None:
        count = self._next.shape[1]
        positions = torch.arange(self._position, self._position + count, device=self._device)
        logits = model(
            input_ids=self._next,
            position_ids=positions[None],
            past_key_values=self._past,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        self._next = logits[:, -1:].argmax(-1).clone()
        for answer, tokens in zip(self.answers, self._next.tolist(), strict=True):
            answer.extend(tokens)
        self._position += count


CONTENDERS: dict[str, Callable[..., Contender]] = {
    "opweave": lambda *sizes, **how: Opweave(*sizes, **how, compiled=False),
    "opweave-compiled": lambda *sizes, **how: Opweave(*sizes, **how, compiled=True),
    "transformers": lambda *sizes, **how: Transformers(*sizes, **how, compiled=False),
    "transformers-compiled": lambda *sizes, **how: Transformers(*sizes, **how, compiled=True),
}


def config_of(size: str) -> dict[str, Any]:
    """Return the configuration of the model: ``"full"`` has the shape of Llama-3.2-1B."""
    return {**SINGLE[size], "max_position_embeddings": _POSITIONS}


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
