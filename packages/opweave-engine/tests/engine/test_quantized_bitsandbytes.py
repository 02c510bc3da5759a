"""Checkpoints of bitsandbytes give the logits of transformers' models with dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import quantized_checkpoints as q
from engine.compared_logits import close, logits, theirs
from opweave_engine import CheckpointError, load_model
from opweave_engine.load.quantized import BitsAndBytes
from opweave_engine.models import UnsupportedModelError

CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True,
          "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
          "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
          "llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0}  # fmt: skip
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
# Not those of nf4: the file says what the codes stand for.
VALUES = np.sort(np.random.default_rng(0).uniform(-1, 1, 16)).astype(np.float32)
NESTED = np.sort(np.random.default_rng(1).uniform(-1, 1, 256)).astype(np.float32)


def of_4_bits(kind: str, *, nested: bool, size: int = 64) -> q.Packer:
    """One number at a time, as the format is published."""

    def pack(weight: q.Array) -> tuple[dict[str, Tensor], q.Array]:
        blocks = weight.reshape(-1, size)
        factors = np.abs(blocks).max(1)
        state = {"quant_type": kind, "blocksize": size, "dtype": "float32",
                 "shape": [*weight.shape]}  # fmt: skip
        tensors: dict[str, Tensor] = {"weight.quant_map": torch.from_numpy(VALUES.copy())}
        if nested:
            offset = float(factors.mean())
            padded = np.zeros(-(-len(factors) // 256) * 256, np.float32)
            padded[: len(factors)] = factors - offset
            largest = np.abs(padded.reshape(-1, 256)).max(1)
            codes = np.abs(
                padded.reshape(-1, 256, 1) / largest[:, None, None] - NESTED[None, None]
            ).argmin(-1)
            factors = (NESTED[codes] * largest[:, None]).reshape(-1)[: len(factors)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            flat = codes.astype(np.uint8).reshape(-1)[: len(factors)]
            tensors |= {
                "weight.absmax": torch.from_numpy(flat.copy()),
                "weight.nested_absmax": torch.from_numpy(largest),
                "weight.nested_quant_map": torch.from_numpy(NESTED.copy()),
            }
        else:
            tensors["weight.absmax"] = torch.from_numpy(factors)
        found = np.abs(blocks[..., None] / factors[:, None, None] - VALUES).argmin(-1)
        flat = found.reshape(-1).astype(np.uint8)
        tensors["weight"] = torch.from_numpy(flat[::2] * 16 + flat[1::2])[:, None]
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.frombuffer(
            bytearray(json.dumps(state).encode()), dtype=torch.uint8
        )
        return tensors, (VALUES[found] * factors[:, None]).reshape(weight.shape)

    return pack


def llm_int8(weight: q.Array) -> tuple[dict[str, Tensor], q.Array]:
    largest = np.abs(weight).max(1)
    codes = np.round(weight / largest[:, None] * 127).astype(np.int8)
    tensors = {
        "weight": torch.from_numpy(codes),
        "SCB": torch.from_numpy(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes * (largest[:, None] / 127)


CASES: dict[str, tuple[dict[str, Any], q.Packer]] = {
    "nf4": (CONFIG, of_4_bits("nf4", nested=False)),
    "nf4_nested": (CONFIG, of_4_bits("nf4", nested=True)),
    "nf4_128": (CONFIG, of_4_bits("nf4", nested=True, size=128)),
    "fp4": ({**CONFIG, "bnb_4bit_quant_type": "fp4"}, of_4_bits("fp4", nested=True)),
    "int8": (INT8, llm_int8),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, packer = CASES[name]
    model = q.write(tmp_path, config, lambda m: None if "up_proj" in m else packer)
    assert close(logits(tmp_path), theirs(model))
    message = "LLM.int8() quantizes them" if name == "int8" else "12 weights are dequantized"
    assert message in caplog.text


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_values_of_the_library(kind: str, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(48, 128).bfloat16()
    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    tensors = {f"weight.{leaf}": part for leaf, part in state.as_dict(packed=True).items()}
    form = BitsAndBytes({**CONFIG, "bnb_4bit_quant_type": kind})
    found = form.matrix("layer", {"weight": packed, **tensors}).values()
    wanted = functional.dequantize_4bit(packed, state)
    torch.testing.assert_close(found.bfloat16(), wanted, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bnb_4bit_quant_type": "int4"}, r"\(bitsandbytes\) has bnb_4bit_quant_type='int4'"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, r"has bnb_4bit_quant_storage='bfloat16'"),
        ({"bnb_2bit": True}, r"has the key 'bnb_2bit'"),
    ],
)
def test_configurations_that_are_not_supported(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    q.write(tmp_path, {**CONFIG, **changes}, lambda _: CASES["nf4"][1])
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1, r"1 \(col32\)"), (2, r"2 \(col_turing\)"), (3, r"3 \(col_ampere\)"), (7, "7")],
)
def test_orders_of_int8_weights(value: int, shown: str, tmp_path: Path) -> None:
    def reordered(weight: q.Array) -> tuple[dict[str, Tensor], q.Array]:
        tensors, values = llm_int8(weight)
        return {**tensors, "weight_format": torch.tensor(value, dtype=torch.uint8)}, values

    q.write(tmp_path, INT8, lambda _: reordered)
    message = rf"_proj.weight_format is {shown}, an order .*Supported: 0 \(row\)"
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        load_model(tmp_path)
    assert "\n" not in str(raised.value)


STATE = "weight.quant_state.bitsandbytes__nf4"
DAMAGED: dict[str, tuple[str, Callable[[Tensor], Tensor | None], str]] = {
    "short": ("weight", lambda t: t[:-1], r"up_proj.weight is uint8 .* bytes for \(512, 256\)"),
    "no factors": ("weight.absmax", lambda t: None, "no weight.absmax for it"),
    "few factors": ("weight.absmax", lambda t: t[1:], "weight.absmax is uint8"),
    "few nested": ("weight.nested_absmax", lambda t: t[1:], "weight.nested_absmax is float32"),
    "few values": ("weight.quant_map", lambda t: t[:8], "weight.quant_map is float32"),
    "state": (STATE, lambda t: t[:-5], "quant_state is not a description of a 4-bit matrix"),
    "no offset": (
        STATE,
        lambda t: t.new_tensor([*bytes(t.tolist()).replace(b"nested_offset", b"other")]),
        "quant_state is not a description of a 4-bit matrix",
    ),
    "list": (STATE, lambda t: t.new_tensor([91, 93]), "quant_state is not a description"),
    "shape": (STATE, lambda t: t.new_tensor([*b'{"shape": "2x2", "blocksize": 64}']), "is not a d"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_checkpoints(name: str, tmp_path: Path) -> None:
    leaf, change, message = DAMAGED[name]
    q.write(tmp_path, CONFIG, lambda _: CASES["nf4_nested"][1])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors.pop(f"model.layers.0.mlp.up_proj.{leaf}"))
    if changed is not None:
        tensors[f"model.layers.0.mlp.up_proj.{leaf}"] = changed.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message) as raised:
        load_model(tmp_path)
    assert "\n" not in str(raised.value)
