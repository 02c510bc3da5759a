"""One request alone: decoding against the memory's speed, and prefill."""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine_cells.models import NAMES, SINGLE, their_model, write_config
from engine_cells.weight_only import quantise
from harness import interleaved, progress, significant
from kernel_cells.stream import Stream
from opweave import ir
from opweave.config import CacheConfig, EngineConfig, SchedulerConfig
from opweave.engine import EngineCore, SamplingParams

Row = dict[str, Any]
DTYPE = torch.bfloat16
PREFILL, PROMPT = 512, 16  # tokens
_CACHE_BYTES = 256 << 20
_READ = 1 << 30  # bytes; a step reads for long, and a short read measures its own start
EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Ours:
    """The engine with dummy weights, one request at a time."""

    def __init__(self, path: Path, steps: int, weights: torch.dtype | None = None) -> None:
        config = EngineConfig(
            dtype="bfloat16",
            load_format="dummy",
            cache=CacheConfig(memory_bytes=_CACHE_BYTES, enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_batched_tokens=PREFILL, max_model_len=2 * PREFILL),
        )
        self.core, self.steps, self._names = EngineCore(path, config), steps, itertools.count()
        self.model: nn.Module = self.core.executor.worker.runner.model
        if weights is not None:
            quantise(self.model, weights)

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
        with ir.priority(linear_w8a16=["opweave_c"]):
            while self.core.has_unfinished:
                times.append(timed(self.core.step))
        return times


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


def measure(size: str, steps: int, rounds: int, *, quiet: bool) -> list[Row]:
    """Return the rows of decoding and prefill, one request at a time."""
    with tempfile.TemporaryDirectory() as folder, progress(quiet=quiet) as bar:
        path = write_config(Path(folder) / "model", SINGLE[size])
        own, theirs, stream = Ours(path, steps), Theirs(path, steps), Stream(_READ, pieces=1)
        narrow = {name: Ours(path, steps, dtype) for name, dtype in EIGHT_BITS.items()}
        measures: dict[str, Callable[[], float]] = {
            "opweave": own.decode,
            "transformers": theirs.decode,
            "read": stream.read,
            "prefill": own.prefill,
            "their prefill": theirs.prefill,
            **{name: each.decode for name, each in narrow.items()},
        }
        for warm_up in measures.values():
            warm_up()
        found = interleaved(measures, bar.track(range(rounds), description="one request"))
    speed = statistics.median(found["read"]) * 1e9
    case = f"{NAMES[size]}, {torch.get_num_threads()} thread(s), batch 1"
    models = {"": own.model, **{f".{name}": each.model for name, each in narrow.items()}}
    return [
        *(
            _decode(
                f"engine.decode_bandwidth{suffix}",
                f"{case}, {suffix.removeprefix('.') or 'bfloat16'} weights",
                found[suffix.removeprefix(".") or "opweave"],
                found["transformers"],
                read_bytes(model) / speed,
            )
            for suffix, model in models.items()
        ),
        _prefill(f"{case}, {PREFILL} tokens, bfloat16", found["prefill"], found["their prefill"]),
    ]


def _decode(name: str, case: str, own: list[float], theirs: list[float], least: float) -> Row:
    return {
        "name": name,
        "case": case,
        "value": significant(1 / statistics.median(own)),
        "unit": "tokens/s",
        "baseline": significant(1 / statistics.median(theirs)),
        "against": "transformers, bfloat16",
        "ratio": significant(_ratio(theirs, own), 3),
        "limit": significant(1 / least),
        "limit_share": significant(least / statistics.median(own), 3),
    }


def _prefill(case: str, own: list[float], theirs: list[float]) -> Row:
    return {
        "name": "engine.prefill",
        "case": case,
        "value": significant(PREFILL / statistics.median(own)),
        "unit": "tokens/s",
        "baseline": significant(PREFILL / statistics.median(theirs)),
        "against": "transformers, bfloat16",
        "ratio": significant(_ratio(theirs, own), 3),
    }


def _ratio(baseline: list[float], own: list[float]) -> float:
    return statistics.median(b / o for b, o in zip(baseline, own, strict=True))
