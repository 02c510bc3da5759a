"""Unpatched vLLM and opweave compute the same logits with weights and activations of int8.

The compressed-tensors library writes the checkpoints. Logits are compared at the tokens that vLLM
chooses. If a rounding error puts an activation on the other side of a boundary between two codes,
the logits of that token and of all later ones in the sequence differ visibly. The comparison
therefore allows for that, but not for activations that are not quantized.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from test_greedy import ALL, RUNS, SIZES, ran, run
from test_quantized import logits_of
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

# vLLM multiplies with oneDNN; on a CPU with AMX, layers whose inputs are a multiple of 32 and whose
# outputs are a multiple of 16 have another kernel, which refuses float32.
HIDDEN = {"amx": 128, "onednn": 136}
SEED = random.Random(0)
# Short ones, because a different code changes the rest of its sequence.
PROMPTS = [SEED.sample(range(SIZES["vocab_size"]), 4) for _ in range(8)]
OPTIONS = {
    "enforce_eager": True,
    "prompts": PROMPTS,
    "logprobs_mode": "raw_logits",
    "max_logprobs": -1,
}
SEAMS = pytest.mark.parametrize("seams", ["none", ALL])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("int8")
    for name, hidden in HIDDEN.items():
        write(found / name, LlamaConfig(**SIZES | {"hidden_size": hidden}, head_dim=32))
        shutil.copytree(found / name, weight_only(found / name))
        file = weight_only(found / name) / "config.json"
        config = json.loads(file.read_text())
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
        file.write_text(json.dumps(config))
    return found


def write(path: Path, config: LlamaConfig) -> None:
    """Write a checkpoint: int8 weights with a scale per row, activations with one per token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    scheme = preset_name_to_scheme("W8A8", ["Linear"])
    groups = {"group_0": scheme}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            least, largest = module.weight.data.aminmax(dim=1, keepdim=True)
            scale, _ = calculate_qparams(least, largest, scheme.weights)
            module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(str(path))


def weight_only(path: Path) -> Path:
    """Return the path of the same weights without quantized activations."""
    return path.with_name(f"{path.name}-weight-only")


class Logits:
    """Logits of vLLM, ``(tokens, vocabulary)``, and those of opweave for the same tokens."""

    def __init__(self, path: Path, tokens: list[list[int]], logits: list[Any]) -> None:
        self.path, self.by_prompt = path, tokens
        self.tokens = torch.tensor(tokens).flatten()
        self.vllm = torch.tensor(logits).flatten(0, 1)

    def opweave(self, dtype: str) -> Tensor:
        return torch.cat(logits_of(self.path, PROMPTS, self.by_prompt, dtype))

    def weight_only(self, dtype: str) -> Tensor:
        return torch.cat(logits_of(weight_only(self.path), PROMPTS, self.by_prompt, dtype))


def compare(folder: Path, seams: str, dtype: str, *names: str) -> list[Logits]:
    """Run vLLM; return the logits for each checkpoint of *names*."""
    found = run(folder, seams, {**OPTIONS, "dtype": dtype}, names)
    for record in found["records"]:
        assert_opweave_runs(record if seams == ALL else None, found["report"])
    outputs = zip(names, found["tokens"], found["logits"], strict=True)
    return [Logits(folder / name, tokens, logits) for name, tokens, logits in outputs]


def assert_opweave_runs(record: str | None, report: str) -> None:
    """Assert that only quantized layers keep vLLM's kernels; without a record, that all do."""
    if record is None:
        assert "recorded no calls" in report
        return
    assert ran(record) >= RUNS["llama"], record
    calls = {op: int(count) for op, _, count, *_ in map(str.split, record.splitlines()[1:])
             if count.isdecimal()}  # fmt: skip
    assert "linear_w8a8" not in calls
    # The LM head is the only linear layer that is not quantized.
    assert calls["linear"] * SIZES["num_hidden_layers"] == calls["silu_and_mul"]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@SEAMS
def test_float32(seams: str, folder: Path) -> None:
    (logits,) = compare(folder, seams, "float32", "onednn")
    ours, other = logits.opweave("float32"), logits.weight_only("float32")

    def equal(wanted: Tensor) -> Tensor:
        """Return the tokens whose logits differ by rounding alone."""
        return (logits.vllm - wanted).norm(dim=1) < 1e-5 * wanted.norm(dim=1)

    same = equal(ours)
    assert same.float().mean() > 0.5
    assert torch.equal(ours.argmax(1)[same], logits.tokens[same])
    assert error(logits.vllm, ours) < 0.5 * error(logits.vllm, other)
    assert not equal(other).any()


@SEAMS
def test_bfloat16(seams: str, folder: Path) -> None:
    for logits in compare(folder, seams, "bfloat16", *HIDDEN):
        exact, ours = logits.opweave("float32"), logits.opweave("bfloat16")
        # vLLM rounds no worse than opweave, and its values are near the same codes.
        assert error(logits.vllm, exact) < 1.5 * error(ours, exact)
        other = logits.weight_only("bfloat16")
        assert error(logits.vllm, ours) < 0.8 * error(logits.vllm, other)
