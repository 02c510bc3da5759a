"""OpenVINO GenAI as a worker: see serving.py.

The argument is a JSON object: ``model`` (a folder that openvino_export.py wrote), ``dtype``, the
number of ``threads``, the tokens of a ``batch`` and the size of the ``vocabulary``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from serving import Tokens, serve, take_stdout

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_CACHE_GB = 1


def main(options: dict[str, Any]) -> None:
    answers = take_stdout()
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = options["batch"]
    scheduler.cache_size = _CACHE_GB
    precision = _PRECISIONS[options["dtype"]]
    properties = {
        "INFERENCE_NUM_THREADS": options["threads"],
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,  # 8 bits by default; the other engines do not quantize
    }
    pipeline = genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", properties)

    def generate(prompts: Tokens, counts: list[int]) -> Tokens:
        inputs = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        done = pipeline.generate(inputs, [config(count) for count in counts])
        return [list(each.m_generation_ids[0]) for each in done]

    def config(count: int) -> genai.GenerationConfig:
        made = genai.GenerationConfig()
        made.max_new_tokens = count
        made.ignore_eos = True
        made.set_eos_token_id(options["vocabulary"])  # required, and never sampled
        return made

    serve(answers, f"OpenVINO GenAI {genai.__version__.partition('-')[0]}", generate)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
