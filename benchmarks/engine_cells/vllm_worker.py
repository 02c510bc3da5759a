"""A vLLM engine that generates on demand, for ``benchmarks/vllm_plugin.py``.

Reads the number of requests from standard input, a line each, and writes the seconds.
"""

import json
import os
import sys
import time
from typing import Any

import torch
from vllm import LLM, SamplingParams


def main(options: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")  # vLLM writes to standard output, too
    os.dup2(2, 1)
    most = options["requests"]
    length, new = options["prompt"], options["tokens"]
    llm = LLM(
        options["checkpoint"],
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=options["dtype"],
        enforce_eager=options["mode"] == "eager",
        enable_prefix_caching=False,
        max_model_len=length + new,
        max_num_seqs=most,
        max_num_batched_tokens=max(512, length),
        kv_cache_memory_bytes=1 << 30,
    )
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    torch.manual_seed(0)
    prompts = torch.randint(10, options["vocabulary"], (most, length)).tolist()
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        asked = [{"prompt_token_ids": ids} for ids in prompts[: int(line)]]
        start = time.perf_counter()
        done = llm.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(each.outputs[0].token_ids) == new for each in done)
        answers.write(f"{seconds}\n")
        answers.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
