"""One request alone: decoding against the memory's speed, and prefill."""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine_cells.llama_cpp_contender import LlamaCppProcess, running
from engine_cells.models import NAMES, SINGLE, their_model, write_config
from engine_cells.weight_only import quantize
from harness import interleaved, progress, significant
from kernel_cells.stream import Stream
from opweave.config import (
    CacheConfig,
    CompilationConfig,
    CompilationMode,
    EngineConfig,
    SchedulerConfig,
)
from opweave.config.engine import LoadFormat
from opweave_engine import EngineCore, SamplingParams

Row = dict[str, Any]
DTYPE = torch.bfloat16
PREFILL, PROMPT, CONTEXT = 512, 16, 1024  # tokens
_CACHE_BYTES = 256 << 20
_READ = 1 << 30  # bytes; a step reads for long, and a short read measures its own start
# Our configurations: the type of the weights (None: unchanged), and how the model is compiled.
VARIANTS = {
    "bfloat16": (None, CompilationMode.NONE),
    "compiled": (None, CompilationMode.OPWEAVE_COMPILE),
    "int8": (torch.int8, CompilationMode.NONE),
    "fp8": (torch.float8_e4m3fn, CompilationMode.NONE),
}


class Ours:
    """The engine, one request at a time.

    Args:
        path: of a checkpoint.
        steps: the number of tokens to decode.
        mode: how the model is compiled.
        load_format: ``"dummy"`` for random weights.
    """

    def __init__(
        self,
        path: Path,
        steps: int,
        mode: CompilationMode = CompilationMode.NONE,
        load_format: LoadFormat = "dummy",
    ) -> None:
        config = EngineConfig(
            dtype="bfloat16",
            compilation_config=CompilationConfig(mode=mode),
            load_format=load_format,
            cache=CacheConfig(memory_bytes=_CACHE_BYTES, enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_batched_tokens=PREFILL, max_model_len=CONTEXT),
        )
        self.core, self.steps, self._names = EngineCore(path, config), steps, itertools.count()
        self.model: nn.Module = self.core.executor.worker.runner.model

    def decode(self) -> float:
        """Return the median time of a step, in seconds."""
        return statistics.median(self._steps(PROMPT, self.steps + 1)[1:])

    def prefill(self) -> float:
        return self._steps(PREFILL, 1)[0]

    def _steps(self, prompt: int, answer: int) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        tokens = random_tokens(prompt, self.model.vocab_size)
        self.core.add_request(
            self.core.prepare(str(next(self._names)), tokens, params, streams=False)
        )
        times = []
        while self.core.has_unfinished:
            times.append(timed(self.core.step))
        return times


def with_weights(
    path: Path, steps: int, source: nn.Module, weights: torch.dtype | None, mode: CompilationMode
) -> Ours:
    """Return the engine with the weights of *source*, quantized to the dtype *weights* if given."""
    ours = Ours(path, steps, mode)
    ours.model.load_weights(source.state_dict().items())
    if weights is not None:
        quantize(ours.model, weights)
    return ours


class Theirs:
    """The model of transformers with random weights, called without ``generate`` around it."""

    def __init__(self, path: Path, steps: int) -> None:
        self.model, self.steps = their_model(path, DTYPE), steps

    @torch.inference_mode()
    def decode(self) -> float:
        ids = torch.tensor([random_tokens(PROMPT, self.model.config.vocab_size)])
        out = self.model(ids, use_cache=True)
        times = []
        for _ in range(self.steps):
            start = time.perf_counter()
            token = out.logits[:, -1:].argmax(-1)
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    @torch.inference_mode()
    def prefill(self) -> float:
        ids = torch.tensor([random_tokens(PREFILL, self.model.config.vocab_size)])
        return timed(lambda: self.model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1))


class LlamaCpp:
    """llama.cpp with the weights of a file, which its process has, one request at a time."""

    def __init__(self, process: LlamaCppProcess, steps: int, vocabulary: int) -> None:
        self._process, self._steps, self._vocabulary = process, steps, vocabulary

    def decode(self) -> float:
        return statistics.median(self._seconds(PROMPT, self._steps + 1)[1:])

    def prefill(self) -> float:
        return self._seconds(PREFILL, 1)[0]

    def _seconds(self, prompt: int, answer: int) -> list[float]:
        return self._process.answer(random_tokens(prompt, self._vocabulary), answer).seconds


def random_tokens(count: int, vocabulary: int) -> list[int]:
    return random.choices(range(vocabulary), k=count)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read_bytes(model: nn.Module) -> int:
    """Return how much of the weights one token reads: all but an embedding that is not the head."""
    unread = set() if model.is_tied else {model.model.embed_tokens.weight}
    scales = (b for name, b in model.named_buffers() if name.endswith("weight_scale"))
    weights = [p for p in model.parameters() if not any(p is each for each in unread)]
    return sum(each.nbytes for each in (*weights, *scales))


def measure(size: str, steps: int, rounds: int, *, llama_cpp: str | None, quiet: bool) -> list[Row]:
    """Return the rows of decoding and prefill, one request at a time.

    Args:
        llama_cpp: a Python that has it, if it is to be compared with.
    """
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bar = stack.enter_context(progress(quiet=quiet))
        path = write_config(folder / "model", SINGLE[size])
        theirs, stream = Theirs(path, steps), Stream(_READ, pieces=1, in_huge_pages=True)
        own = {
            name: with_weights(path, steps, theirs.model, *how) for name, how in VARIANTS.items()
        }
        measures: dict[str, Callable[[], float]] = {
            **{name: each.decode for name, each in own.items()},
            "transformers": theirs.decode,
            "read": stream.read,
            "prefill": own["bfloat16"].prefill,
            "transformers, prefill": theirs.prefill,
        }
        build = ""
        if llama_cpp is not None:
            from engine_cells.llama_cpp_file import write_gguf  # needs gguf

            file = write_gguf(folder / "model.gguf", theirs.model)
            process = stack.enter_context(
                running(llama_cpp, file, threads=threads, context=CONTEXT)
            )
            other = LlamaCpp(process, steps, theirs.model.config.vocab_size)
            measures |= {"llama.cpp": other.decode, "llama.cpp, prefill": other.prefill}
            build = process.build
        for warm_up in measures.values():
            warm_up()
        found = interleaved(measures, bar.track(range(rounds), description="one request"))
    speed = statistics.median(found["read"]) * 1e9
    least = {name: read_bytes(each.model) / speed for name, each in own.items()}
    return list(_rows(f"{NAMES[size]}, {threads} thread(s), batch 1", found, least, build))


def _rows(
    case: str, found: Mapping[str, list[float]], least: Mapping[str, float], build: str
) -> Iterator[Row]:
    """Yield the rows; *found* and *least* are seconds, *build* says which llama.cpp ran, if any."""
    prompt = f"{case}, {PREFILL} tokens, bfloat16"
    for name, limit in least.items():
        yield row(
            "engine.decode_bandwidth" + ("" if name == "bfloat16" else f".{name}"),
            f"{case}, {_weights(name)}",
            found[name],
            found["transformers"],
            "transformers, bfloat16",
            limit=limit,
        )
    yield row(
        "engine.prefill",
        prompt,
        found["prefill"],
        found["transformers, prefill"],
        "transformers, bfloat16",
        tokens=PREFILL,
    )
    if build:
        for name, suffix in (("bfloat16", ""), ("compiled", ".compiled")):
            yield row(
                f"engine.decode_bandwidth{suffix}.llama_cpp",
                f"{case}, {_weights(name)}, {build}",
                found[name],
                found["llama.cpp"],
                "llama.cpp, bfloat16",
                limit=least[name],
            )
        yield row(
            "engine.prefill.llama_cpp",
            f"{prompt}, {build}",
            found["prefill"],
            found["llama.cpp, prefill"],
            "llama.cpp, bfloat16",
            tokens=PREFILL,
        )


def _weights(variant: str) -> str:
    return "bfloat16 weights, compiled" if variant == "compiled" else f"{variant} weights"


def row(
    name: str,
    case: str,
    own: list[float],
    baseline: list[float],
    against: str,
    *,
    tokens: int = 1,
    limit: float | None = None,
) -> Row:
    """Return how fast *tokens* tokens were: *own*, *baseline* and *limit* are seconds for them."""
    seconds = statistics.median(own)
    found: Row = {
        "name": name,
        "case": case,
        "value": significant(tokens / seconds),
        "unit": "tokens/s",
        "baseline": significant(tokens / statistics.median(baseline)),
        "against": against,
        "ratio": significant(
            statistics.median(b / o for b, o in zip(baseline, own, strict=True)), 3
        ),
    }
    if limit is not None:
        found |= {
            "limit": significant(tokens / limit),
            "limit_share": significant(limit / seconds, 3),
        }
    return found
