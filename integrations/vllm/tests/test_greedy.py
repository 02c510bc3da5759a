"""Unpatched vLLM gives the same greedy tokens with and without opweave's kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

SEAMS = {
    "norms": {"rms_norm", "fused_add_rms_norm"},
    "activations": {"silu_and_mul"},
    "rotary": {"rotary_embedding"},
    "linear": {"linear"},
    "attention": {"paged_attention", "reshape_and_cache"},
}


SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
# The configuration, and the ops that the model does not call.
MODELS: dict[str, tuple[Any, set[str]]] = {
    "llama": (LlamaConfig(**SIZES), set()),
    "qwen3": (Qwen3Config(**SIZES, head_dim=32), set()),
    "gemma3": (
        Gemma3TextConfig(**SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=8),
        {"rms_norm", "fused_add_rms_norm", "silu_and_mul"},  # it has norms and GELU of its own
    ),
    "mixtral": (
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
        {"silu_and_mul"},  # part of vLLM's fused experts
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, (config, _) in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
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


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_equal_and_opweave_runs(checkpoints: Path, name: str) -> None:
    expected, report = run(checkpoints / name, "none")
    assert "recorded no calls" in report
    _, absent = MODELS[name]
    for seams in ("linear,attention", ",".join(SEAMS)):
        tokens, report = run(checkpoints / name, seams)
        assert tokens == expected
        ran = {tuple(line.split()[:2]) for line in report.splitlines()}
        for seam in seams.split(","):
            for op in SEAMS[seam] - absent:
                assert (op, "opweave_c") in ran, report
