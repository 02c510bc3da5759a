"""Write the greedy tokens of checkpoints under vLLM, and the kernels that ran, as JSON.

python greedy.py OPTIONS CHECKPOINT..., where OPTIONS are arguments of vLLM's LLM as JSON.
"""

import json
import sys
from typing import Any

import opweave_vllm
from vllm import LLM, SamplingParams
from vllm.compilation.counter import compilation_counter
from vllm.distributed import cleanup_dist_env_and_memory

from opweave import ir

PROMPTS = [[5, 9, 2, 33, 7], [11, 4, 8, 15, 16, 23, 42, 3, 6]]


def generate(checkpoint: str, options: dict[str, object]) -> list[list[int]]:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 16 << 20,
    }
    llm = LLM(checkpoint, skip_tokenizer_init=True, **{**defaults, **options})
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    del llm
    cleanup_dist_env_and_memory()
    return [list(request.outputs[0].token_ids) for request in done]


if __name__ == "__main__":
    opweave_vllm.register()  # as vLLM does, but before the first record begins
    tokens, records = [], []
    for checkpoint in sys.argv[2:]:
        with ir.record() as record:
            tokens.append(generate(checkpoint, json.loads(sys.argv[1])))
        records.append(str(record))
    found = {
        "tokens": tokens,
        "records": records,
        "report": opweave_vllm.report(),
        "compiled": compilation_counter.num_aot_compiles,
        "loaded": compilation_counter.num_aot_artifacts_loaded,
    }
    print("\n" + json.dumps(found))
