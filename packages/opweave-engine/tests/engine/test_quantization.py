"""Quantized checkpoints are recognized, and plain weights load regardless of other metadata."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.tiny_checkpoints import Checkpoints, random_ids
from opweave_engine import LLM, CheckpointError, SamplingParams, load_model
from opweave_engine.load.loader import check_ranks
from opweave_engine.load.writer import quantize_checkpoint
from opweave_engine.models import UnsupportedModelError

Tensors = dict[str, torch.Tensor]
FILE = "model.safetensors"
LAYER = "model.layers.0.self_attn.k_proj"


@pytest.fixture
def path(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(checkpoint("llama")[0], tmp_path / "model"))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(copy / FILE).items()}
    save_file(tensors, copy / FILE, metadata={"format": "pt"})
    return copy


def edit(path: Path, file: str = "config.json", **changes: Any) -> None:
    values = json.loads((path / file).read_text()) if (path / file).exists() else {}
    (path / file).write_text(json.dumps({**values, **changes}))


def edit_tensors(path: Path, new: Tensors, *removed: str) -> None:
    tensors = {n: t for n, t in load_file(path / FILE).items() if n not in removed}
    save_file({**tensors, **new}, path / FILE, metadata={"format": "pt"})


def tokens(path: Path) -> list[int]:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    return LLM(path, dtype="float32").generate(random_ids(3, 9), params)[0].outputs[0].token_ids


IGNORED = "is ignored: no weight is quantized"
ATTENTION = LAYER.rpartition(".")[0]
SCALES = {f"{name}_scale": torch.tensor(0.5) for name in (f"{ATTENTION}.k", f"{ATTENTION}.v",
                                                          f"{LAYER}.k")}  # fmt: skip
CACHE = {"num_bits": 8, "type": "float", "dynamic": False}
# A file, what it says, further tensors, and the warning.
PLAIN: list[tuple[str, dict[str, Any], Tensors, str]] = [
    *(
        ("config.json", config, {}, IGNORED)
        for config in (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}},
            {"compression_config": {"quant_method": "compressed-tensors"}},
            {"quantization_config": "awq"},
        )
    ),
    ("config.json", {"quantization_config": {}}, {}, ""),
    ("quantize_config.json", {"bits": 4}, {}, f"quantize_config.json {IGNORED}"),
    ("hf_quant_config.json", {"bits": 4}, {}, f"hf_quant_config.json {IGNORED}"),
    *(
        (
            "config.json",
            {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": CACHE}},
            tensors,
            message,
        )
        for tensors, message in (
            (SCALES, "3 scales of a quantized KV cache are ignored"),
            ({}, "kv_cache_scheme is ignored: the cache is not quantized"),
        )
    ),
]


@pytest.mark.parametrize(("file", "values", "tensors", "message"), PLAIN)
def test_plain_weights(
    file: str,
    values: dict[str, Any],
    tensors: Tensors,
    message: str,
    path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = tokens(path)
    edit_tensors(path, tensors)
    edit(path, file, **values)
    assert tokens(path) == plain
    assert message in caplog.text
    assert message or not caplog.text
    check_ranks(path, 2)


PACKED: dict[str, Tensors] = {
    "GPTQ": {f"{LAYER}.qweight": torch.zeros(8, 32, dtype=torch.int32)},
    "compressed-tensors": {f"{LAYER}.weight_packed": torch.zeros(32, 8, dtype=torch.int32)},
    "fp8": {f"{LAYER}.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn),
            f"{LAYER}.weight_scale_inv": torch.ones(1, 1)},
    "bitsandbytes": {f"{LAYER}.weight": torch.zeros(1024, 1, dtype=torch.uint8),
                     f"{LAYER}.weight.absmax": torch.ones(16)},
    "LLM.int8": {f"{LAYER}.weight": torch.zeros(32, 64, dtype=torch.int8),
                 f"{LAYER}.SCB": torch.ones(32)},
    "mxfp4": {"model.layers.0.mlp.experts.gate_up_proj_blocks": torch.zeros(2, dtype=torch.uint8)},
    "MLX": {f"{LAYER}.weight": torch.zeros(32, 8, dtype=torch.uint32),
            f"{LAYER}.scales": torch.ones(32, 1)},
}  # fmt: skip


# Where a configuration names a supported format, the tensors are loaded: test_quantized_formats.py.
SIGNS = [
    (form, sign)
    for form in PACKED
    for sign in ("tensors", "config", "file")
    if sign != "config" or form not in ("compressed-tensors", "fp8", "bitsandbytes")
]


@pytest.mark.parametrize(("form", "shown_by"), SIGNS)
def test_quantized_weights(form: str, shown_by: str, path: Path) -> None:
    edit_tensors(path, PACKED[form], f"{LAYER}.weight")
    sign = next(name for name in PACKED[form] if not name.endswith(".weight"))
    if shown_by == "config":
        edit(path, quantization_config={"quant_method": form})
        sign = f"quant_method '{form}'"
    elif shown_by == "file":
        edit(path, "quantize_config.json", bits=4)
        sign = "quantize_config.json"
    with pytest.raises(UnsupportedModelError, match="holds quantized weights") as raised:
        load_model(path)
    assert sign in str(raised.value)
    assert "quantized checkpoints are not supported" in str(raised.value)


# Tensors in place of a weight, of formats that opweave does not know.
UNKNOWN: dict[str, Tensors] = {
    "hqq": {"W_q": torch.zeros(16, 64, dtype=torch.uint8), "scale": torch.ones(32, 1),
            "zero": torch.ones(32, 1)},
    "quanto": {"weight._data": torch.zeros(32, 64, dtype=torch.int8),
               "weight._scale": torch.ones(32, 1)},
    "vptq": {"centroids.weight": torch.ones(1, 256), "indices": torch.zeros(1, 32, 8).int()},
    "spqr": {"dense_weights": torch.zeros(64, dtype=torch.int64),
             "row_offsets": torch.zeros(33).int()},
    "a new one": {"weight": torch.ones(16, 64)},
}  # fmt: skip


@pytest.mark.parametrize("method", UNKNOWN)
@pytest.mark.parametrize("model_impl", ["opweave", "transformers"])
def test_unknown_formats_are_named(
    method: str, model_impl: Any, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new = {f"{LAYER}.{leaf}": tensor for leaf, tensor in UNKNOWN[method].items()}
    edit_tensors(path, new, f"{LAYER}.weight")
    edit(path, quantization_config={"quant_method": method})
    message = rf"quantized weights \('quantization_config' .*quant_method '{method}'\): .*k_proj"
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        load_model(path, model_impl=model_impl)
    assert "Supported, by opweave's own models: quant_method compressed-ten" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "no weight is quantized" not in caplog.text
    with pytest.raises(UnsupportedModelError, match="cannot be quantized again"):
        quantize_checkpoint(path, path.parent / "new", group=64)


def test_weights_that_are_quantized_while_the_model_runs(path: Path) -> None:
    edit(path, quantization_config={"quant_method": "bitnet", "quantization_mode": "online"})
    with pytest.raises(UnsupportedModelError, match=r"quant_method 'bitnet'; .*Supported, by"):
        load_model(path)


def test_a_configuration_over_plain_weights_that_transformers_runs(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(path, quantization_config={"quant_method": "hqq", "quant_config": {}})
    assert load_model(path, model_impl="transformers")
    assert "is ignored: no weight is quantized" in caplog.text


def test_narrow_weights_with_a_configuration(path: Path) -> None:
    edit_tensors(path, {f"{LAYER}.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)})
    edit(path, "hf_quant_config.json", quantization={"quant_algo": "FP8"})
    with pytest.raises(UnsupportedModelError, match=r"hf_quant_config.json, the tensor .*k_proj"):
        load_model(path)


def test_a_directory_with_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"no config.json.*the GGUF file itself.*model.gguf"):
        load_model(tmp_path)
