"""Quantized checkpoints give the logits of transformers' models with the dequantized weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import compared_logits
from engine import quantized_checkpoints as q
from engine.compared_logits import close, compiled_logits, theirs
from models.tiny_checkpoints import Checkpoints, edit_config, random_ids
from opweave import ir
from opweave_engine import LLM, CheckpointError, SamplingParams, load_model
from opweave_engine.load.loader import check_ranks
from opweave_engine.load.quantized import BitsAndBytes
from opweave_engine.load.writer import quantize_checkpoint
from opweave_engine.models import UnsupportedModelError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INT8 = {"num_bits": 8, "strategy": "channel", "group_size": None}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "group_size": None}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True,
       "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
       "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
       "llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0}  # fmt: skip
LLM_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
Case = tuple[dict[str, Any], q.Packer]

CASES: dict[str, Case] = {
    "gptq": (GPTQ, q.gptq()),
    "gptq_128": ({**GPTQ, "group_size": 128}, q.gptq(128)),
    "gptq_whole_rows": ({**GPTQ, "group_size": -1}, q.gptq(-1)),
    "gptq_asymmetric": ({**GPTQ, "sym": False}, q.gptq(64, symmetric=False)),
    "gptq_v2": (
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        q.gptq(symmetric=False, version=2),
    ),
    "gptq_act_order": ({**GPTQ, "desc_act": True}, q.gptq(act_order=True)),
    "gptq_act_order_asymmetric": (
        {**GPTQ, "desc_act": True, "sym": False},
        q.gptq(act_order=True, symmetric=False),
    ),
    "gptq_8_bits": ({**GPTQ, "bits": 8}, q.gptq(bits=8, symmetric=False)),
    "gptq_8_bits_act_order": ({**GPTQ, "bits": 8}, q.gptq(bits=8, act_order=True)),
    "awq": (AWQ, q.awq()),
    "awq_128": ({**AWQ, "group_size": 128}, q.awq(128)),
    "int4": (q.compressed("pack-quantized"), q.int4(32, symmetric=True)),
    "int4_128": (q.compressed("pack-quantized", group_size=128), q.int4(128, symmetric=True)),
    "int4_channel": (
        q.compressed("pack-quantized", strategy="channel"),
        q.int4(-1, symmetric=True),
    ),
    "int4_zeros": (
        q.compressed("pack-quantized", symmetric=False, group_size=64),
        q.int4(64, symmetric=False),
    ),
    "int4_act_order": (
        q.compressed("pack-quantized", actorder="group"),
        q.int4(32, symmetric=True, act_order=True),
    ),
    "int8": (q.compressed("int-quantized", **INT8), q.int8()),
    "int8_packed": (q.compressed("pack-quantized", **INT8), q.int8(packed=True)),
    "float8": (q.compressed("float-quantized", **INT8, type="float"), q.fp8("channel")),
    "float8_tensor": (q.compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
                      q.fp8("tensor")),
}  # fmt: skip
CASES |= {
    "nf4": (BNB, q.of_4_bits("nf4", nested=False)),
    "nf4_nested": (BNB, q.of_4_bits("nf4", nested=True)),
    "nf4_128": (BNB, q.of_4_bits("nf4", nested=True, size=128)),
    "fp4": ({**BNB, "bnb_4bit_quant_type": "fp4"}, q.of_4_bits("fp4", nested=True)),
    "llm_int8": (LLM_INT8, q.llm_int8),
}
# With quantized activations: their values are tested in test_quantized_activations.py.
FP8_CASES: dict[str, Case] = {
    "fp8_tensor": (FP8, q.fp8("tensor")),
    "fp8_block": ({**FP8, "weight_block_size": [128, 128]}, q.fp8("block")),
}
# Kept as 4 or 8 bits for each weight; others have no kernel.
DENSE = {"gptq_8_bits", "gptq_8_bits_act_order", "nf4", "nf4_nested", "nf4_128", "fp4"}


def logits(path: Path) -> torch.Tensor:
    """Return the logits by the definitions, which round like transformers."""
    with ir.priority(linear_w4a16=["native"], linear_w8a16=["native"]):
        return compared_logits.logits(path)


@pytest.mark.parametrize("name", CASES)
def test_formats(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, packer = CASES[name]
    model = q.write(tmp_path, config, lambda _: packer)
    assert close(logits(tmp_path), theirs(model))
    layers = load_model(tmp_path).model.layers
    weights = {p.dtype for n, p in layers.named_parameters() if n.endswith("proj.weight")}
    narrow = {torch.uint8, torch.int8, torch.float8_e4m3fn}
    assert weights <= ({torch.float32} if name in DENSE else narrow)
    assert ("14 weights are dequantized while they are loaded" in caplog.text) == (name in DENSE)
    assert ("LLM.int8() quantizes them" in caplog.text) == (name == "llm_int8")


@pytest.mark.parametrize("kind", ["biases", "tied", "qwen2", "qwen3"])
def test_models(kind: str, tmp_path: Path) -> None:
    config, packer = CASES["gptq_asymmetric"]
    model = q.write(tmp_path, config, lambda _: packer, kind)
    assert close(logits(tmp_path), theirs(model))


@pytest.mark.parametrize("name", ["int4", "gptq_act_order"])
def test_layers_that_are_not_quantized(name: str, tmp_path: Path) -> None:
    config, packer = CASES[name]

    def chosen(module: str) -> q.Packer | None:
        skipped = ("k_proj", "up_proj", "layers.1.mlp.down_proj", "layers.1.self_attn.o_proj")
        return None if module.endswith(skipped) else packer

    model = q.write(tmp_path, config, chosen)
    assert close(logits(tmp_path), theirs(model))


def test_different_formats_in_one_layer(tmp_path: Path) -> None:
    config = q.compressed("mixed-precision")

    def chosen(module: str) -> q.Packer:
        if module.endswith("q_proj"):
            return q.int4(64, symmetric=False)
        if module.endswith(("k_proj", "up_proj")):
            return q.int8()
        return q.fp8("channel") if "down" in module else q.int4(32, symmetric=True)

    model = q.write(tmp_path, config, chosen)
    assert close(logits(tmp_path), theirs(model))


def test_orders_that_differ_in_one_layer(tmp_path: Path) -> None:
    packers = {part: q.gptq(act_order=True, seed=i) for i, part in enumerate("qkv")}
    model = q.write(
        tmp_path, {**GPTQ, "desc_act": True}, lambda m: packers.get(m[-6], packers["q"])
    )
    assert close(logits(tmp_path), theirs(model))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bits": ({**GPTQ, "bits": 3}, r"\(gptq\) has bits=3, .*Supported: 4, 8"),
    "form": ({**GPTQ, "checkpoint_format": "marlin"}, r"checkpoint_format='marlin'"),
    "key": ({**GPTQ, "lora": True}, r"\(gptq\) has the key 'lora'"),
    "awq": ({**AWQ, "version": "gemv"}, r"\(awq\) has version='gemv'"),
    "awq_bits": ({**AWQ, "bits": 8}, r"\(awq\) has bits=8"),
    "awq_zero": ({**AWQ, "zero_point": False}, r"\(awq\) has zero_point=False"),
    "e5m2": ({**FP8, "fmt": "e5m2"}, r"\(fp8\) has fmt='e5m2'"),
    "blocks": ({**FP8, "weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
    "ct_format": (q.compressed("nvfp4-pack-quantized"), r"format='nvfp4-pack-quantized'"),
    "ct_bits": (q.compressed("pack-quantized", num_bits=3), r"weights\) has num_bits=3"),
    "ct_strategy": (q.compressed("pack-quantized", strategy="tensor_group"), r"strategy='tensor_g"),
    "ct_blocks": (
        q.compressed("float-quantized", **BLOCK, block_structure=[64, 64]),
        r"weights\) has block_structure=\[64, 64\], .*Supported: \[128, 128\], '128x128'",
    ),
    "ct_symmetric": (q.compressed("pack-quantized", symmetric="no"), "has symmetric='no'"),
    "ct_activations": (
        {
            **q.compressed("int-quantized"),
            "config_groups": {
                "g": {"weights": INT8, "input_activations": {"num_bits": 8, "rotation": "hadamard"}}
            },
        },
        r"input_activations\) has the key 'rotation'",
    ),
    "transforms": ({**q.compressed("pack-quantized"),
                    "transform_config": {"config_groups": {"u": {}}}}, r"transform_config="),
    "sparse": ({**q.compressed("pack-quantized"),
                "sparsity_config": {"format": "sparse-24-bitmask"}},
               r"sparsity_config\) has format='sparse-24-bitmask'"),
    "bnb_type": ({**BNB, "bnb_4bit_quant_type": "int4"}, r"has bnb_4bit_quant_type='int4'"),
    "bnb_storage": ({**BNB, "bnb_4bit_quant_storage": "bfloat16"}, r"quant_storage='bfloat16'"),
    "bnb_key": ({**BNB, "bnb_2bit": True}, r"\(bitsandbytes\) has the key 'bnb_2bit'"),
    "method": ({"quant_method": "hqq"}, r"quant_method 'hqq'.*Supported, by"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_are_not_supported(name: str, tmp_path: Path) -> None:
    config, message = REFUSED[name]
    q.write(tmp_path, config, lambda _: CASES["nf4"][1] if name.startswith("bnb") else q.gptq())
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        load_model(tmp_path)
    assert "\n" not in str(raised.value)


GPTQ8_ACT_ORDER: Case = ({**GPTQ, "bits": 8, "desc_act": True}, q.gptq(bits=8, act_order=True))
O_PROJ = "model.layers.1.self_attn.o_proj"


def changed(leaf: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
    """Return a function that changes or removes one tensor of a checkpoint."""

    def edit(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        tensor = tensors.pop(f"{O_PROJ}.{leaf}")
        if change is not None:
            tensors[f"{O_PROJ}.{leaf}"] = change(tensor).contiguous()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return edit


STATE = "weight.quant_state.bitsandbytes__nf4"
STATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "short state": lambda t: t[:-5],
    "no offset": lambda t: t.new_tensor([*bytes(t.tolist()).replace(b"nested_offset", b"other")]),
    "list": lambda t: t.new_tensor([*b"[]"]),
    "shape as text": lambda t: t.new_tensor([*b'{"shape": "2x2", "blocksize": 64}']),
}
DAMAGED: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = {
    "no scales": ("gptq", "scales", None, r"o_proj is quantized, but the checkpoint has no scal"),
    "no zeros": ("gptq", "qzeros", None, r"no qzeros"),
    "short": ("gptq", "qweight", lambda t: t[:-4], r"o_proj.*(g_idx|qweight)"),
    "few outputs": ("awq", "scales", lambda t: t[:, :-8], r"o_proj.scales is float16 \(8, 248\)"),
    "float": ("awq", "qweight", lambda t: t.float(), r"o_proj.qweight is float32"),
    "no shape": ("int4", "weight_shape", None, r"no weight_shape"),
    "wrong shape": ("int4", "weight_shape", lambda t: t * 3, r"weight_packed is int32"),
    "no scale": ("int4", "weight_scale", None, r"no weight_scale"),
    "no scale of int8": ("int8", "weight_scale", None, r"no weight_scale"),
    "no scale of fp8": ("fp8_tensor", "weight_scale", None, r"no weight_scale"),
    "blocks": ("fp8_block", "weight_scale_inv", lambda t: t[:1], r"one for each 128x128 block"),
    "no zero points": (
        "int4_zeros",
        "weight_zero_point",
        lambda t: t[:-1],
        r"weight_zero_point is",
    ),
    "groups": ("gptq_act_order", "g_idx", lambda t: t * 0, r"g_idx does not name 8 groups of 32"),
    "rows": ("int4", "weight_packed", lambda t: t[:-1], r"o_proj.weight_packed is int32 \(255"),
    # Without the configuration, these are valid checkpoints with other values.
    "no zero points at all": ("int4_zeros", "weight_zero_point", None, "weight_zero_point is miss"),
    "no order": ("int4_act_order", "weight_g_idx", None, "weight_g_idx is missing"),
    "no order of gptq": ("gptq_act_order", "g_idx", None, "no g_idx"),
    "no order of 8 bits": ("gptq_8_bits_act_order", "g_idx", None, "no g_idx"),
    "half the scales": ("int4", "weight_scale", lambda t: t[:, ::2], "1024 values instead of 2048"),
    "twice the scales": ("int4_128", "weight_scale", lambda t: t.repeat(1, 2), "instead of 512"),
    "one scale": ("int8", "weight_scale", lambda t: t[0, 0], "weight_scale has 1 values instead"),
    "8 bits": ("int4", "weight_packed", lambda t: t.repeat(1, 2), "8 bits for each weight inst"),
    "4 bits": ("int8_packed", "weight_packed", lambda t: t[:, ::2], "4 bits for each weight inst"),
    "int8": ("float8", "weight", lambda t: t.to(torch.int8), "not of the type 'float'"),
    "float8": ("int8", "weight", lambda t: t.to(torch.float8_e4m3fn), "not of the type 'int'"),
    "short of nf4": ("nf4_nested", "weight", lambda t: t[:-1], r"uint8 .* bytes for \(256, 256\)"),
    "no factors": ("nf4_nested", "weight.absmax", None, "no weight.absmax for it"),
    "few factors": ("nf4_nested", "weight.absmax", lambda t: t[1:], "absmax is uint8"),
    "few nested": ("nf4_nested", "weight.nested_absmax", lambda t: t[1:], "absmax is float32"),
    "few values": ("nf4_nested", "weight.quant_map", lambda t: t[:8], "quant_map is float32"),
    **{
        name: ("nf4_nested", STATE, change, "quant_state is not a description of a 4-bit matrix")
        for name, change in STATES.items()
    },
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_checkpoints(name: str, tmp_path: Path) -> None:
    case, leaf, change, message = DAMAGED[name]
    config, packer = ({**CASES, "gptq_8_bits_act_order": GPTQ8_ACT_ORDER} | FP8_CASES)[case]
    q.write(tmp_path, config, lambda _: packer)
    changed(leaf, change)(tmp_path)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_model(tmp_path)
    assert "\n" not in str(raised.value)


def test_groups_in_order_need_no_index(tmp_path: Path) -> None:
    config = {**GPTQ, "desc_act": True, "static_groups": True}
    model = q.write(tmp_path, config, lambda _: q.gptq())
    changed("g_idx", None)(tmp_path)
    assert close(logits(tmp_path), theirs(model))


@pytest.mark.parametrize(
    "name", [pytest.param("gptq_act_order_asymmetric", marks=pytest.mark.slow), "mixed"]
)
def test_compiled_models(name: str, tmp_path: Path) -> None:
    config, packer = CASES["gptq"] if name == "mixed" else CASES[name]
    mixed = {"k_proj": q.gptq(64, symmetric=False), "up_proj": None}

    def chosen(module: str) -> q.Packer | None:
        return mixed.get(module.rpartition(".")[2], packer) if name == "mixed" else packer

    reference = q.write(tmp_path, config, chosen)
    with ir.priority(linear_w4a16=["native"], linear_w8a16=["native"]):
        assert close(compiled_logits(tmp_path), theirs(reference))


def test_an_output_matrix(tmp_path: Path) -> None:
    config, packer = CASES["int4"]
    model = q.write(tmp_path, config, lambda _: packer, quantizes_head=True)
    assert close(logits(tmp_path), theirs(model))
    assert load_model(tmp_path).lm_head.weight.dtype is torch.uint8


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_values_of_bitsandbytes(kind: str, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(48, 128).bfloat16()
    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    tensors = {f"weight.{leaf}": part for leaf, part in state.as_dict(packed=True).items()}
    form = BitsAndBytes({**BNB, "bnb_4bit_quant_type": kind})
    values = form.matrix("layer", {"weight": packed, **tensors}).values()
    theirs = functional.dequantize_4bit(packed, state)
    torch.testing.assert_close(values.bfloat16(), theirs, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1, r"1 \(col32\)"), (2, r"2 \(col_turing\)"), (3, r"3 \(col_ampere\)"), (7, "7")],
)
def test_orders_of_int8_weights(value: int, shown: str, tmp_path: Path) -> None:
    def reordered(weight: q.Array) -> tuple[dict[str, torch.Tensor], q.Array]:
        tensors, values = q.llm_int8(weight)
        return {**tensors, "weight_format": torch.tensor(value, dtype=torch.uint8)}, values

    q.write(tmp_path, LLM_INT8, lambda _: reordered)
    message = rf"_proj.weight_format is {shown}, an order .*Supported: 0 \(row\)"
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        load_model(tmp_path)
    assert "\n" not in str(raised.value)


# Quantized checkpoints are recognized, and plain weights load regardless of other metadata


Tensors = dict[str, torch.Tensor]
FILE = "model.safetensors"
LAYER = "model.layers.0.self_attn.k_proj"


@pytest.fixture
def path(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(checkpoint("llama")[0], tmp_path / "model"))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(copy / FILE).items()}
    save_file(tensors, copy / FILE, metadata={"format": "pt"})
    return copy


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
    edit_config(path, file, **values)
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
        edit_config(path, quantization_config={"quant_method": form})
        sign = f"quant_method '{form}'"
    elif shown_by == "file":
        edit_config(path, "quantize_config.json", bits=4)
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
    edit_config(path, quantization_config={"quant_method": method})
    message = rf"quantized weights \('quantization_config' .*quant_method '{method}'\): .*k_proj"
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        load_model(path, model_impl=model_impl)
    assert "Supported, by opweave's own models: quant_method compressed-ten" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "no weight is quantized" not in caplog.text
    with pytest.raises(UnsupportedModelError, match="cannot be quantized again"):
        quantize_checkpoint(path, path.parent / "new", group=64)


def test_weights_that_are_quantized_while_the_model_runs(path: Path) -> None:
    edit_config(path, quantization_config={"quant_method": "bitnet", "quantization_mode": "online"})
    with pytest.raises(UnsupportedModelError, match=r"quant_method 'bitnet'; .*Supported, by"):
        load_model(path)


def test_a_configuration_over_plain_weights_that_transformers_runs(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(path, quantization_config={"quant_method": "hqq", "quant_config": {}})
    assert load_model(path, model_impl="transformers")
    assert "is ignored: no weight is quantized" in caplog.text


def test_narrow_weights_with_a_configuration(path: Path) -> None:
    edit_tensors(path, {f"{LAYER}.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)})
    edit_config(path, "hf_quant_config.json", quantization={"quant_algo": "FP8"})
    with pytest.raises(UnsupportedModelError, match=r"hf_quant_config.json, the tensor .*k_proj"):
        load_model(path)


def test_a_directory_with_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"no config.json.*the GGUF file itself.*model.gguf"):
        load_model(tmp_path)
