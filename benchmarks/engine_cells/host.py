"""The time of a decode step besides the model: scheduling, inputs, sampling, text and outputs."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import interleaved, progress, significant
from opweave.config import EngineConfig
from opweave_engine import EngineCore, SamplingParams

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-pydoc"
BATCHES = (1, 8, 64)
PROMPT, ANSWER = 16, 160  # tokens; the model's context is 256
_LOGIT_ROWS = 1024  # the answers begin at different rows, so they differ


def measure(rounds: int, *, quiet: bool) -> list[dict[str, Any]]:
    """Return the CPU time of a greedy decode step of each batch, with and without streaming."""
    core = EngineCore(MODEL, EngineConfig(dtype="float32"))
    _return_at_once(core)
    names = itertools.count()
    turns = {
        (batch, streams): _step(core, batch, names, streams=streams)
        for batch in BATCHES
        for streams in (False, True)
    }
    with progress(quiet=quiet) as bar:
        for warm_up in turns.values():
            warm_up()
        seconds = interleaved(turns, bar.track(range(rounds), description="host"))
    core.shutdown()
    return [
        {
            "name": f"engine.host.batch{batch}" + (".streaming" if streams else ""),
            "case": f"{MODEL.name}, float32, {torch.get_num_threads()} thread(s), a decode step "
            "without the model's forward and LM head",
            "value": significant(statistics.median(values) * 1e6),
            "unit": "us",
        }
        for (batch, streams), values in seconds.items()
    ]


def _return_at_once(core: EngineCore) -> None:
    """Replace the forward and the LM head of the model by tensors that exist already."""
    model = core.executor.worker.runner.model
    hidden = torch.zeros(4096, model.config.hidden_size)
    logits = torch.randn(_LOGIT_ROWS, model.vocab_size, generator=torch.Generator().manual_seed(0))
    starts = random.Random(0)

    def compute_logits(last: Tensor) -> Tensor:
        start = starts.randrange(_LOGIT_ROWS - len(last))
        return logits[start : start + len(last)]

    model.forward = lambda ids, positions: hidden[: len(ids)]
    model.compute_logits = compute_logits


def _step(
    core: EngineCore, batch: int, names: itertools.count[int], *, streams: bool
) -> Callable[[], float]:
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    draw = random.Random(batch)

    def median() -> float:
        for _ in range(batch):
            prompt = [draw.randrange(3, core.vocab_size) for _ in range(PROMPT)]
            core.add_request(
                core.prepare(str(next(names)), prompt, params, streams=streams, deltas=streams)
            )
        times = []
        while core.has_unfinished:
            start = time.process_time()  # other processes do not count
            core.step()
            times.append(time.process_time() - start)
        return statistics.median(times[1:-1])

    return median
