"""Unpatched vLLM gives the same greedy tokens with and without opweave's kernels."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
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

PRODUCTS = "linear,attention"
ALL = "norms,activations,rotary,linear,attention,experts"
# In eager mode vLLM calls its own kernels, compiled it mostly runs Inductor's code.
MODES: dict[str, dict[str, Any]] = {"eager": {"enforce_eager": True}, "compiled": {}}
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
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    # Small embeddings: they are tied, and large ones would repeat the last token.
    "gemma3": Gemma3TextConfig(**SIZES | {"initializer_range": 0.02}, head_dim=32,
                               query_pre_attn_scalar=32, sliding_window=8),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip
LINEAR = {("linear", "opweave_c")}
ATTENTION = {("paged_attention", "opweave_c"), ("reshape_and_cache", "opweave_c")}
DECODER = {
    *LINEAR,
    *ATTENTION,
    ("rms_norm", "opweave_c"),
    ("fused_add_rms_norm", "opweave_c"),
    ("rotary_embedding", "opweave_c"),
}
# The ops that run in every layer of a model, with their providers.
RUNS = {
    "llama": DECODER | {("silu_and_mul", "opweave_c")},
    "qwen3": DECODER | {("silu_and_mul", "opweave_c")},
    "gemma3": DECODER | {("gelu_and_mul", "opweave_c")},
    "mixtral": DECODER | {("fused_experts", "aten")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("greedy")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(found / name)
    return found


def environment(folder: Path, seams: str) -> dict[str, str]:
    """Return the variables of a vLLM with *seams* and a report, which compiles into *folder*."""
    return {
        **os.environ,
        "OPWEAVE_VLLM_SEAMS": seams,
        "OPWEAVE_VLLM_REPORT": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }


def run(
    folder: Path,
    seams: str,
    options: dict[str, Any],
    names: Iterable[str] = CONFIGS,
    **variables: str,
) -> dict[str, Any]:
    env = {
        **environment(folder, seams),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the report is then of this process
        **variables,
    }
    script = Path(__file__).with_name("greedy.py")
    done = subprocess.run(
        [sys.executable, script, json.dumps(options), *(folder / name for name in names)],
        env=env,
        check=False,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def ran(record: str) -> set[tuple[str, ...]]:
    """Return the ops of a record with the providers that ran."""
    return {tuple(line.split()[:2]) for line in record.splitlines()}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_equal_and_opweave_runs(folder: Path, mode: str) -> None:
    # One compile cache for all: a graph compiled with other seams must not be loaded.
    options = MODES[mode]
    alone = run(folder, "none", options)
    assert "recorded no calls" in alone["report"]
    for seams in (PRODUCTS, ALL):
        found = run(folder, seams, options)
        assert found["tokens"] == alone["tokens"]
        for name, record in zip(CONFIGS, found["records"], strict=True):
            wanted = RUNS[name] if seams == ALL else LINEAR | ATTENTION
            assert ran(record) >= wanted, (name, record)
        assert ran(found["report"]) >= set().union(*map(ran, found["records"])) - {()}


def test_compiled_model_is_reused_after_a_restart(folder: Path) -> None:
    options = {"compilation_config": {"mode": 2, "backend": "opweave"}}
    first = run(folder, "all", options, ["llama"])
    assert (first["compiled"], first["loaded"]) == (1, 0)
    again = run(folder, "all", options, ["llama"], VLLM_FORCE_AOT_LOAD="1")
    assert (again["compiled"], again["loaded"]) == (0, 1)
    assert again["tokens"] == first["tokens"]
    # Other priorities need other code.
    changed = run(folder, "all", options, ["llama"], OPWEAVE_IR_OP_PRIORITY__SILU_AND_MUL="native")
    assert (changed["compiled"], changed["loaded"]) == (1, 0)
    assert changed["tokens"] == first["tokens"]
