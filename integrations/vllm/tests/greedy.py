"""Write the greedy tokens of a checkpoint under vLLM, and what opweave recorded, as JSON.

python greedy.py CHECKPOINT
"""

import json
import sys

import opweave_vllm
from vllm import LLM, SamplingParams

PROMPTS = [[5, 9, 2, 33, 7], [11, 4, 8, 15, 16, 23, 42, 3, 6]]

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=16 << 20,
    )
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    tokens = [list(request.outputs[0].token_ids) for request in done]
    print("\n" + json.dumps({"tokens": tokens, "report": opweave_vllm.report()}))
