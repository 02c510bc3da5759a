"""The cost of structured output: the mixed load with a JSON schema for every answer."""

from __future__ import annotations

import random
import statistics
import string
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine_cells.mixed import ANSWERS, BATCH, PROMPTS, Request, requests
from engine_cells.models import MIXED, write_checkpoint
from harness import interleaved, progress, significant
from opweave.config import EngineConfig, SchedulerConfig
from opweave_engine import LLM, SamplingParams, StructuredOutputsParams

# Longer than every answer, so that the schema never ends one.
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 100_000}},
    "required": ["text"],
}


def measure(size: str, count: int, rounds: int, *, quiet: bool) -> list[dict[str, Any]]:
    """Return a row that compares *count* requests with a schema to the same without."""
    config = MIXED[size]
    with tempfile.TemporaryDirectory() as folder, progress(quiet=quiet) as bar:
        path = write_checkpoint(Path(folder) / "model", config)
        _tokenizer(config["vocab_size"]).save(str(path / "tokenizer.json"))
        limits = SchedulerConfig(max_num_batched_tokens=BATCH, max_num_seqs=count)
        llm = LLM(path, config=EngineConfig(scheduler=limits))
        loads = [requests(count, config["vocab_size"], seed) for seed in range(2 * rounds + 2)]
        turns = {
            "schema": _contender(llm, loads[::2], StructuredOutputsParams(json=SCHEMA)),
            "free": _contender(llm, loads[1::2], None),
        }
        for warm_up in turns.values():
            warm_up()
        speeds = interleaved(turns, bar.track(range(rounds), description="structured output"))
    ratios = [one / other for one, other in zip(speeds["schema"], speeds["free"], strict=True)]
    return [
        {
            "name": "engine.structured_output",
            "case": f"{count} requests at once, {PROMPTS[0]} to {PROMPTS[1]} tokens + "
            f"{ANSWERS[0]} to {ANSWERS[1]}, a JSON schema, float32, "
            f"{config['vocab_size']} tokens in the vocabulary",
            "value": significant(statistics.median(speeds["schema"])),
            "unit": "tokens/s",
            "baseline": significant(statistics.median(speeds["free"])),
            "against": "the same without a schema",
            "ratio": significant(statistics.median(ratios), 3),
        }
    ]


def _contender(
    llm: LLM, loads: Sequence[Sequence[Request]], form: StructuredOutputsParams | None
) -> Callable[[], float]:
    rest = iter(loads)

    def speed() -> float:
        load = next(rest)
        params = [
            SamplingParams(
                temperature=0, max_tokens=each.max_tokens, ignore_eos=True, structured_outputs=form
            )
            for each in load
        ]
        start = time.perf_counter()
        outputs = llm.generate([each.prompt for each in load], params)
        seconds = time.perf_counter() - start
        return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds

    return speed


def _tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer of *size* tokens: every byte, and random words."""
    draw = random.Random(0)
    tokens = dict.fromkeys(sorted(ByteLevel.alphabet()))
    while len(tokens) < size:
        word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 8)))
        tokens["Ġ" * draw.randint(0, 1) + word] = None
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer
