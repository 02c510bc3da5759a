"""``opweave quantize`` writes int4 checkpoints that opweave and compressed-tensors read."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import quantized_checkpoints as q
from engine.compared_logits import close, theirs
from engine.test_quantized_formats import CASES, logits
from models import tiny_checkpoints
from opweave_engine import CheckpointError, InvalidArgumentError
from opweave_engine.load.writer import quantize_checkpoint, quantized_int4
from opweave_engine.models import ModelError, UnsupportedModelError
from opweave_engine.models.deepseek import DeepseekV3ForCausalLM
from opweave_engine.perplexity import perplexity
from support import ROOT

PYDOC = ROOT / "examples" / "models" / "tiny-pydoc"


def dense(tensors: dict[str, Tensor], module: str) -> Tensor:
    """Return the values of an int4 matrix, number by number."""
    words = tensors[f"{module}.weight_packed"].numpy().view(np.uint32)
    rows, columns = tensors[f"{module}.weight_shape"].tolist()
    numbers = np.zeros((rows, columns))
    for column in range(columns):
        numbers[:, column] = (words[:, column // 8] >> (4 * (column % 8))) & 15
    scale = tensors[f"{module}.weight_scale"].double()
    return (
        torch.from_numpy(numbers - 8).unflatten(1, (scale.shape[1], -1)) * scale[..., None]
    ).flatten(1)


def quantized(
    model: Any, path: Path, *, group: int = 32, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Path, list[str]]:
    for parameter in model.parameters():  # not the frequencies of the rope
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(path / "plain", **options)
    tiny_checkpoints.write_tokenizer(path / "plain")
    written = quantize_checkpoint(path / "plain", path / "int4", group=group)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    for module in written.quantized:
        weight = model.get_submodule(module).weight
        values = dense(tensors_of(path / "int4"), module)
        error = (weight.double() - values).square().mean()
        # Half a step of a uniform scale, squared, is 1/12: clipping must not lose to it.
        step = weight.view(weight.shape[0], -1, group).abs().amax(-1).double() / 7
        assert error <= 1.1 * step.square().mean() / 12
        weight.data.copy_(values)
    return path / "int4", written.quantized


def tensors_of(path: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen2", "qwen3"])
def test_the_model_that_is_written(kind: str, tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model(kind, **q.WIDE)
    plain = theirs(model)
    path, modules = quantized(model, tmp_path)
    assert len(modules) == 14
    assert close(logits(path), theirs(model))
    assert not close(plain, theirs(model))
    assert {file.name for file in path.iterdir()} >= {"tokenizer.json", "generation_config.json"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_groups_and_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("llama", **q.WIDE)
    path, _ = quantized(model, tmp_path, group=128, dtype=dtype)
    scale = tensors_of(path)["model.layers.0.mlp.down_proj.weight_scale"]
    assert scale.dtype is (torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)
    assert scale.shape == (256, 512 // 128)
    assert close(logits(path), theirs(model))


def test_several_files(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("llama", **q.WIDE)
    path, _ = quantized(model, tmp_path, max_shard_size="500KB")
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    assert index.keys() == tensors_of(path).keys()
    assert close(logits(path), theirs(model))


def test_matrices_that_are_left(tmp_path: Path) -> None:
    # 96 inputs of down_proj are three groups of 32, but not groups of 64.
    model = tiny_checkpoints.hf_model("llama")
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data.zero_()  # a scale is not zero
    path, modules = quantized(model, tmp_path, group=64)
    ignored = json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]
    assert sorted(ignored) == ["lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(2))]
    assert len(modules) == 12
    assert close(logits(path), theirs(model))


def test_experts_and_routers_are_left(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("qwen3_moe")
    path, modules = quantized(model, tmp_path)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert not any("mlp" in module for module in modules)
    assert "model.layers.0.mlp.gate" in config["ignore"]
    assert "model.layers.1.mlp.experts.5.up_proj" in config["ignore"]
    assert close(logits(path), theirs(model))


def test_latent_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies by ``kv_b_proj`` itself: the weight is not quantized, or dequantized."""
    for kind, count in (("left", 0), ("read", 2)):
        model = tiny_checkpoints.hf_model("deepseek", kv_lora_rank=32)
        with monkeypatch.context() as patch:
            if count:
                patch.setattr(DeepseekV3ForCausalLM, "dense", frozenset())
            path, modules = quantized(model, tmp_path / kind)
        assert sum(module.endswith("kv_b_proj") for module in modules) == count
        assert close(logits(path), theirs(model))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_the_library_reads_it(tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    path, modules = quantized(tiny_checkpoints.hf_model("llama", **q.WIDE), tmp_path, group=64)
    given = json.loads((path / "config.json").read_text())["quantization_config"]
    known = quantization.QuantizationConfig.model_fields
    config = quantization.QuantizationConfig(**{k: v for k, v in given.items() if k in known})
    scheme = config.config_groups["group_0"]
    tensors = tensors_of(path)
    for module in modules:
        own = {k.rpartition(".")[2]: t for k, t in tensors.items() if k.startswith(f"{module}.")}
        found = compressors.PackedQuantizationCompressor.decompress(own, scheme)["weight"]
        assert torch.equal(found, dense(tensors, module).to(found.dtype))


def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain"
    tiny_checkpoints.write_checkpoint(path, "llama")
    return path


def test_refusals(tmp_path: Path) -> None:
    path, into = plain(tmp_path), tmp_path / "int4"
    with pytest.raises(InvalidArgumentError, match=r"group=48 is not supported.*32, 64, 128"):
        quantize_checkpoint(path, into, group=48)
    with pytest.raises(InvalidArgumentError, match=r"plain' exists already"):
        quantize_checkpoint(path, path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        quantize_checkpoint(tmp_path / "none", into)
    tiny_checkpoints.write_checkpoint(tmp_path / "bert", "bert")
    with pytest.raises(ModelError, match="does not generate text"):
        quantize_checkpoint(tmp_path / "bert", into)
    config, packer = CASES["gptq"]
    q.write(tmp_path / "gptq", config, lambda _: packer)
    with pytest.raises(
        UnsupportedModelError, match=r"holds quantized weights.*cannot be quantized again"
    ):
        quantize_checkpoint(tmp_path / "gptq", into)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        quantize_checkpoint(path, into)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bert", "gptq", "plain"]


@pytest.mark.parametrize("name", ["new", "empty", "link", "link to an empty directory", "current"])
def test_where_it_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, into, target = plain(tmp_path), tmp_path / "int4", tmp_path / "target"
    if name in ("empty", "current"):
        into.mkdir()
    elif name != "new":
        into.symlink_to(target)
    if "to an empty" in name:
        target.mkdir()
    if name == "current":
        monkeypatch.chdir(into)
    quantize_checkpoint(path, Path() if name == "current" else into)
    names = {file.name for file in into.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not any(name.endswith(".partial") for name in names)
    assert into.is_symlink() == name.startswith("link")
    logits(into)


@pytest.mark.parametrize("into", ["plain/config.json/int4", "parents/of/int4", "existing"])
def test_a_directory_that_cannot_be_written(into: str, tmp_path: Path) -> None:
    path = plain(tmp_path)
    (tmp_path / "existing").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # as on a disk that is full
    try:
        with pytest.raises(InvalidArgumentError, match=r"int4' cannot|existing' cannot") as raised:
            quantize_checkpoint(path, tmp_path / into)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(raised.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["existing", "plain"]
    assert not [*(tmp_path / "existing").iterdir()]


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("name", ["nan", "infinite", "int32", "float8"])
def test_weights_that_cannot_be_quantized(name: str, tmp_path: Path) -> None:
    path = plain(tmp_path)
    tensors = tensors_of(path)
    weight = tensors[DOWN]
    changed = {
        "nan": weight.index_fill(1, torch.tensor(5), torch.nan),
        "infinite": weight.index_fill(0, torch.tensor(3), -torch.inf),
        "int32": weight.int(),
        "float8": weight.to(torch.float8_e4m3fn),
    }
    save_file({**tensors, DOWN: changed[name]}, path / "model.safetensors")
    message = "is int32|is float8_e4m3fn" if name in ("int32", "float8") else "infinite or not a nu"
    with pytest.raises(CheckpointError, match=rf"{DOWN}.*({message})"):
        quantize_checkpoint(path, tmp_path / "int4", group=32)
    assert not (tmp_path / "int4").exists()


def test_small_weights_in_float16() -> None:
    weight = (torch.randn(16, 64) * 1e-4).half()
    tensors = quantized_int4(weight, 32)
    values = dense({f"m.{leaf}": tensor for leaf, tensor in tensors.items()}, "m")
    step = weight.view(16, -1, 32).abs().amax(-1).double() / 7
    error = (weight.double() - values).square().mean()
    assert error <= 1.1 * step.square().mean() / 12


def test_perplexity() -> None:
    text = (PYDOC / "heldout.txt").read_text(encoding="utf-8")[:4000]
    model = AutoModelForCausalLM.from_pretrained(PYDOC, dtype=torch.float32)
    ids = Tokenizer.from_file(str(PYDOC / "tokenizer.json")).encode(text).ids
    losses = []
    for at in range(0, len(ids), min(512, model.config.max_position_embeddings)):
        window = torch.tensor(ids[at : at + min(512, model.config.max_position_embeddings)])
        with torch.inference_mode():
            scores = model(window[None]).logits[0, :-1].log_softmax(-1)
        losses += (-scores.gather(1, window[1:, None])).flatten().tolist()
    expected = math.exp(sum(losses) / len(losses))
    assert perplexity(PYDOC, text) == pytest.approx(expected, rel=0.01)
    with pytest.raises(InvalidArgumentError, match="fewer than two tokens"):
        perplexity(PYDOC, "")
