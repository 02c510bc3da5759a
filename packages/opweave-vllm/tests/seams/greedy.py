"""Write the greedy tokens of checkpoints under vLLM, and the kernels that ran, as JSON.

python greedy.py OPTIONS CHECKPOINT..., where OPTIONS are arguments of vLLM's LLM as JSON, and
"prompts". With ``"max_logprobs": -1`` the logits of each token, or what ``"logprobs_mode"`` names,
are written too.
"""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.compilation.counter import compilation_counter
from vllm.distributed import cleanup_dist_env_and_memory

import opweave_vllm
from opweave import ir

PROMPTS = [[5, 9, 2, 33, 7], [11, 4, 8, 15, 16, 23, 42, 3, 6]]


def generate(checkpoint: str, options: dict[str, Any]) -> tuple[list[list[int]], list[Any]]:
    """Return the tokens of each prompt, and the logits of each of them if they are wanted."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 16 << 20,
    }
    options = {**defaults, **options}
    prompts = options.pop("prompts", PROMPTS)
    llm = LLM(checkpoint, skip_tokenizer_init=True, **options)
    sampling = SamplingParams(
        temperature=0,
        max_tokens=12,
        ignore_eos=True,
        detokenize=False,
        logprobs=options.get("max_logprobs"),
    )
    done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    del llm
    cleanup_dist_env_and_memory()
    outputs = [request.outputs[0] for request in done]
    logits = [
        [[step[token].logprob for token in sorted(step)] for step in output.logprobs or ()]
        for output in outputs
    ]
    return [list(output.token_ids) for output in outputs], logits


if __name__ == "__main__":
    opweave_vllm.register()  # as vLLM does, but before the first record begins
    tokens, logits, records = [], [], []
    for checkpoint in sys.argv[2:]:
        with ir.record() as record:
            found_tokens, found_logits = generate(checkpoint, json.loads(sys.argv[1]))
        tokens.append(found_tokens)
        logits.append(found_logits)
        records.append(str(record))
    found = {
        "tokens": tokens,
        "logits": logits,
        "records": records,
        "report": opweave_vllm.report(),
        "compiled": compilation_counter.num_aot_compiles,
        "loaded": compilation_counter.num_aot_artifacts_loaded,
    }
    print("\n" + json.dumps(found))
