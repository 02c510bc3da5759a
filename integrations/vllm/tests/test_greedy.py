"""Unpatched vLLM gives the same greedy tokens with and without opweave's kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SEAMS = {
    "norms": {"rms_norm", "fused_add_rms_norm"},
    "activations": {"silu_and_mul"},
    "rotary": {"rotary_embedding"},
    "linear": {"linear"},
    "attention": {"paged_attention", "reshape_and_cache"},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(checkpoint: Path, seams: str) -> tuple[list[list[int]], str]:
    env = {
        **os.environ,
        "OPWEAVE_VLLM_SEAMS": seams,
        "OPWEAVE_VLLM_REPORT": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the report is then of this process
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    script = Path(__file__).with_name("greedy.py")
    done = subprocess.run(
        [sys.executable, script, checkpoint],
        env=env,
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return result["tokens"], result["report"]


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    tokens, report = run(llama, "none")
    assert "recorded no calls" in report
    return tokens


@pytest.mark.parametrize("seams", ["linear,attention", ",".join(SEAMS)])
def test_tokens_are_equal_and_opweave_runs(
    llama: Path, expected: list[list[int]], seams: str
) -> None:
    tokens, report = run(llama, seams)
    assert tokens == expected
    ran = {tuple(line.split()[:2]) for line in report.splitlines()}
    for seam in seams.split(","):
        for op in SEAMS[seam]:
            assert (op, "opweave_c") in ran, report
