"""Many requests of different lengths at once: throughput and latency."""

from __future__ import annotations

import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig

from engine_cells.models import MIXED, greedy, their_checkpoint, write_checkpoint
from harness import interleaved, progress, significant
from opweave.config import EngineConfig, SchedulerConfig
from opweave_engine import LLM, SamplingParams

Row = dict[str, Any]
BATCH = 512  # tokens of one forward, of both engines
PAGES = 256  # of the cache of transformers: room for all requests
PROMPTS, ANSWERS = (16, 160), (8, 64)  # tokens, from and to


class Request(NamedTuple):
    """A prompt, and how many tokens answer it."""

    prompt: list[int]
    max_tokens: int


class Reply(NamedTuple):
    """An answer, and the seconds until its first and its last token."""

    tokens: list[int]
    first: float
    last: float


@dataclass
class Contender:
    """Answers loads, each with prompts of its own, which no cache has seen."""

    answer: Callable[[Sequence[Request]], list[Reply]]
    loads: Sequence[Sequence[Request]]
    replies: list[list[Reply]] = field(default_factory=list)

    def measure(self) -> float:
        load = self.loads[len(self.replies)]
        start = time.perf_counter()
        replies = self.answer(load)
        seconds = time.perf_counter() - start
        self.replies.append(replies)
        return sum(len(reply.tokens) for reply in replies) / seconds


def requests(count: int, vocabulary: int, seed: int) -> list[Request]:
    """Return a load of requests, made up from *seed*."""
    draw = random.Random(seed)
    return [
        Request(
            [draw.randrange(vocabulary) for _ in range(draw.randint(*PROMPTS))],
            draw.randint(*ANSWERS),
        )
        for _ in range(count)
    ]


def ours(path: Path) -> Callable[[Sequence[Request]], list[Reply]]:
    limits = SchedulerConfig(max_num_batched_tokens=BATCH)
    llm = LLM(path, config=EngineConfig(scheduler=limits))

    def answer(load: Sequence[Request]) -> list[Reply]:
        params = [
            SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
            for request in load
        ]
        outputs = llm.generate([request.prompt for request in load], params)
        return [
            Reply(o.outputs[0].token_ids, o.timings.first_token, o.timings.finished)
            for o in outputs
        ]

    return answer


def continuous(path: Path) -> tuple[Callable[[Sequence[Request]], list[Reply]], Any]:
    """Return transformers' continuous batching, and what must be stopped at the end."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    manager = their_checkpoint(path).init_continuous_batching(
        greedy(ANSWERS[1]), ContinuousBatchingConfig(num_blocks=PAGES, max_batch_tokens=BATCH)
    )
    manager.start()

    def answer(load: Sequence[Request]) -> list[Reply]:
        names = [
            manager.add_request(
                request.prompt,
                max_new_tokens=request.max_tokens,
                record_timestamps=True,
                eos_token_id=-1,
            )
            for request in load
        ]
        found: dict[str, Any] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
            if result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching has stopped.")
            if result is not None and result.is_finished():
                found[result.request_id] = result
        return [
            Reply(
                done.generated_tokens,
                done.timestamps[0] - done.created_time,
                done.timestamps[-1] - done.created_time,
            )
            for done in map(found.__getitem__, names)
        ]

    return answer, manager


def padded(path: Path) -> Callable[[Sequence[Request]], list[Reply]]:
    """Return transformers' ``generate``: one batch, padded, until the longest answer ends."""
    model = their_checkpoint(path)

    def answer(load: Sequence[Request]) -> list[Reply]:
        width = max(len(request.prompt) for request in load)
        ids = torch.zeros(len(load), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(load):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        start = time.perf_counter()
        longest = greedy(max(request.max_tokens for request in load))
        with torch.inference_mode():
            tokens = model.generate(ids, attention_mask=mask, generation_config=longest)
        seconds = time.perf_counter() - start
        rows = tokens[:, width:].tolist()
        return [
            Reply(row[: request.max_tokens], seconds, seconds)
            for row, request in zip(rows, load, strict=True)
        ]

    return answer


def measure(size: str, count: int, rounds: int, *, quiet: bool) -> list[Row]:
    """Return the rows of a mixed load of *count* requests."""
    config = MIXED[size]
    loads = [requests(count, config["vocab_size"], seed) for seed in range(rounds + 1)]
    with tempfile.TemporaryDirectory() as folder, progress(quiet=quiet) as bar:
        path = write_checkpoint(Path(folder) / "model", config)
        theirs, manager = continuous(path)
        try:
            contenders = {
                "opweave": Contender(ours(path), loads),
                "continuous": Contender(theirs, loads),
                "generate": Contender(padded(path), loads),
            }
            measures = {name: each.measure for name, each in contenders.items()}
            for warm_up in measures.values():
                warm_up()
            speeds = interleaved(measures, bar.track(range(rounds), description="mixed load"))
        finally:
            manager.stop(block=True)
    case = (
        f"{count} requests at once, {PROMPTS[0]} to {PROMPTS[1]} tokens + {ANSWERS[0]} to "
        f"{ANSWERS[1]}, float32, {config['num_hidden_layers']} layers of {config['hidden_size']}"
    )
    return [
        *_throughput(case, speeds, contenders),
        *_latency(case, contenders["opweave"], contenders["continuous"]),
    ]


def _throughput(
    case: str, speeds: dict[str, list[float]], contenders: dict[str, Contender]
) -> list[Row]:
    found = []
    own = [reply.tokens for replies in contenders["opweave"].replies for reply in replies]
    for baseline in ("continuous", "generate"):
        others = [reply.tokens for replies in contenders[baseline].replies for reply in replies]
        equal = sum(a == b for a, b in zip(own, others, strict=True))
        ratios = [a / b for a, b in zip(speeds["opweave"], speeds[baseline], strict=True)]
        found.append(
            {
                "name": "engine.throughput" + ("" if baseline == "continuous" else ".generate"),
                "case": case,
                "value": significant(statistics.median(speeds["opweave"])),
                "unit": "tokens/s",
                "baseline": significant(statistics.median(speeds[baseline])),
                "against": f"transformers, {baseline}",
                "ratio": significant(statistics.median(ratios), 3),
                "equal_answers": equal,
                "answers": len(own),
            }
        )
    return found


def _latency(case: str, own: Contender, other: Contender) -> list[Row]:
    found = []
    for what in ("first", "last"):
        for percent in (50, 90, 99):
            value, baseline = (_percentile(each, what, percent) * 1e3 for each in (own, other))
            found.append(
                {
                    "name": f"engine.latency.{what}_token.p{percent}",
                    "case": case,
                    "value": significant(value),
                    "unit": "ms",
                    "baseline": significant(baseline),
                    "against": "transformers, continuous",
                    "ratio": significant(baseline / value, 3),
                }
            )
    return found


def _percentile(contender: Contender, what: str, percent: int) -> float:
    """Return a percentile over all requests but those of the warm-up."""
    times = [getattr(reply, what) for replies in contender.replies[1:] for reply in replies]
    return statistics.quantiles(times, n=100, method="inclusive")[percent - 1]
