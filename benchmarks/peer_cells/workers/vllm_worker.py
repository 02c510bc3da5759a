"""vLLM as a worker: see serving.py. For benchmarks/peers.py and benchmarks/vllm_plugin.py.

The argument is a JSON object: ``model``, ``dtype``, ``eager`` (not compiled), ``dummy`` (random
weights), and the largest ``context``, number of ``requests`` and tokens of a ``batch``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import vllm
from serving import Tokens, serve, take_stdout
from vllm import LLM, SamplingParams

_CACHE_BYTES = 512 << 20


def main(options: dict[str, Any]) -> None:
    answers = take_stdout()
    llm = LLM(
        options["model"],
        skip_tokenizer_init=True,
        load_format="dummy" if options["dummy"] else "auto",
        dtype=options["dtype"],
        enforce_eager=options["eager"],
        enable_prefix_caching=False,
        max_model_len=options["context"],
        max_num_seqs=options["requests"],
        max_num_batched_tokens=options["batch"],
        kv_cache_memory_bytes=_CACHE_BYTES,
    )

    def generate(prompts: Tokens, counts: list[int]) -> Tokens:
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in counts
        ]
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]

    serve(answers, f"vLLM {vllm.__version__}", generate)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
