"""opweave as a worker: see serving.py.

The argument is a JSON object: ``model``, ``dtype``, ``int4`` (a configuration that gets random
weights of four bits), and the largest ``context`` and tokens of a ``batch``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from serving import Tokens, serve, take_stdout

from opweave import __version__
from opweave.config import CacheConfig, EngineConfig, SchedulerConfig
from opweave_engine import LLM, SamplingParams

_CACHE_BYTES = 512 << 20


def main(options: dict[str, Any]) -> None:
    answers = take_stdout()
    config = EngineConfig(
        dtype=options["dtype"],
        load_format="dummy" if options["int4"] else "auto",
        cache=CacheConfig(memory_bytes=_CACHE_BYTES, enable_prefix_caching=False),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=options["batch"], max_model_len=options["context"]
        ),
    )
    llm = LLM(options["model"], config=config, progress=False)
    if options["int4"]:
        sys.path.append(str(Path(__file__).parents[2]))
        from engine_cells.low_bit import make_int4

        make_int4(llm._core.executor.worker.runner.model)

    def generate(prompts: Tokens, counts: list[int]) -> Tokens:
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts
        ]
        done = llm.generate(prompts, params)
        return [list(each.outputs[0].token_ids) for each in done]

    serve(answers, f"opweave {__version__}", generate)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
