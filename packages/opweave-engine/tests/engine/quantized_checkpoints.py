"""Quantized checkpoints, packed here number by number as the formats are published."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from models import tiny_checkpoints

Array = NDArray[Any]
# Quantizes a matrix (out, in): its tensors, by the last part of their names, and its values.
Packer = Callable[[Array], tuple[dict[str, Tensor], Array]]

WIDE = {"hidden_size": 256, "intermediate_size": 512}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write(
    path: Path,
    config: Mapping[str, Any],
    packer_of: Callable[[str], Packer | None],
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    model: Any = None,
    *,
    quantizes_head: bool = False,
) -> Any:
    """Write a checkpoint; return transformers' model with the values of the quantized weights.

    Args:
        path: the directory.
        config: ``quantization_config``.
        packer_of: how the linear layer of a name is quantized; None: not at all.
        kind: of ``tiny_checkpoints``.
        dtype: of weights that are not quantized.
        model: transformers', in place of one of that kind.
        quantizes_head: whether the output matrix is quantized like linear layers.
    """
    model = model or tiny_checkpoints.hf_model(kind, **WIDE)
    model.save_pretrained(path)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        is_linear = module.endswith("_proj") or (quantizes_head and module == "lm_head")
        packer = packer_of(module) if is_linear else None
        if packer is None:
            tensors[name] = parameter.data.to(dtype)
            parameter.data.copy_(tensors[name])
            continue
        packed, values = packer(parameter.data.numpy())
        parameter.data.copy_(torch.from_numpy(values.astype(np.float32)))
        tensors |= {f"{module}.{leaf}": tensor.contiguous() for leaf, tensor in packed.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    tiny_checkpoints.edit_config(path, quantization_config=dict(config))
    tiny_checkpoints.write_tokenizer(path)
    return model


def set_weight(model: Any, name: str, values: Tensor) -> None:
    """Set a weight by its name in a checkpoint, where each expert has its own matrices."""
    module, _, part = name.removesuffix(".weight").rpartition(".")
    parent, _, expert = module.rpartition(".")
    if not expert.isdecimal() or not parent.endswith("experts"):
        model.get_parameter(name).data.copy_(values)
        return
    experts = model.get_submodule(parent)
    if part == "down_proj":
        experts.down_proj.data[int(expert)] = values
    else:
        half = experts.gate_up_proj.shape[1] // 2
        start = half if part == "up_proj" else 0
        experts.gate_up_proj.data[int(expert), start : start + half] = values


def rounded(
    weight: Array, group: int, *, symmetric: bool, bits: int = 4
) -> tuple[Array, Array, Array]:
    """Return unsigned integers (out, in), float16 scales and zeros (out, groups)."""
    grouped = weight.reshape(weight.shape[0], -1, group)
    top = 2**bits - 1
    if symmetric:
        scale = np.abs(grouped).max(-1) / (top // 2)
        zero = np.full(scale.shape, (top + 1) // 2)
    else:
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scale = (high - low) / top
        zero = np.round(-low / scale).clip(1, top).astype(int)
    scale = scale.astype(np.float16)
    q = np.round(grouped / scale[..., None].astype(float)) + zero[..., None]
    return q.clip(0, top).astype(np.uint32).reshape(weight.shape), scale, zero


def dequantized(q: Array, scale: Array, zero: Array, index: Array | None = None) -> Array:
    if index is None:
        index = np.arange(q.shape[1]) // (q.shape[1] // scale.shape[1])
    return (q.astype(float) - zero[:, index]) * scale.astype(float)[:, index]


def pack_rows(values: Array, bits: int = 4) -> Tensor:
    """Pack ``(n, m)`` along the first dimension: ``(n * bits / 32, m)`` int32."""
    per_word = 32 // bits
    packed = np.zeros((values.shape[0] // per_word, values.shape[1]), np.uint32)
    for i in range(values.shape[0]):
        packed[i // per_word] |= values[i].astype(np.uint32) << (bits * (i % per_word))
    return torch.from_numpy(packed.view(np.int32).copy())


def gptq(
    group: int = 32,
    *,
    symmetric: bool = True,
    bits: int = 4,
    version: int = 1,
    act_order: bool = False,
    seed: int = 0,
) -> Packer:
    def pack(weight: Array) -> tuple[dict[str, Tensor], Array]:
        size = weight.shape[1] if group == -1 else group
        groups = weight.shape[1] // size
        index = np.arange(weight.shape[1]) // size
        if act_order:
            index = np.random.default_rng(seed).permutation(index)
        order = np.argsort(index, kind="stable")
        q, scale, zero = rounded(weight[:, order], size, symmetric=symmetric, bits=bits)
        q = q[:, np.argsort(order)]
        stored = zero - 1 if version == 1 else zero
        tensors = {
            "qweight": pack_rows(q.T, bits),
            "qzeros": pack_rows(stored, bits).T,
            "scales": torch.from_numpy(scale.T.copy()),
            "g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        assert tensors["qzeros"].shape == (groups, weight.shape[0] * bits // 32)
        return tensors, dequantized(q, scale, zero, index)

    return pack


def awq(group: int = 32) -> Packer:
    def words(values: Array) -> Tensor:
        packed = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
        for column in range(packed.shape[1]):
            for i, place in enumerate(AWQ_ORDER):
                packed[:, column] |= values[:, column * 8 + place].astype(np.uint32) << (4 * i)
        return torch.from_numpy(packed.view(np.int32).copy())

    def pack(weight: Array) -> tuple[dict[str, Tensor], Array]:
        q, scale, zero = rounded(weight, group, symmetric=False)
        tensors = {
            "qweight": words(q.T),
            "qzeros": words(zero.T),
            "scales": torch.from_numpy(scale.T.copy()),
        }
        return tensors, dequantized(q, scale, zero)

    return pack


def fp8(form: str) -> Packer:
    """Float8 weights with a scale for the matrix ("tensor"), each row, or each block."""

    def pack(weight: Array) -> tuple[dict[str, Tensor], Array]:
        matrix = torch.from_numpy(weight)
        if form == "tensor":
            scale = matrix.abs().max() / 448
            wide = scale
        elif form == "channel":
            scale = wide = matrix.abs().amax(1, keepdim=True) / 448
        else:
            rows, columns = ((n + 127) // 128 for n in matrix.shape)
            scale = torch.zeros(rows, columns)
            for i in range(rows):
                for j in range(columns):
                    block = matrix[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
                    scale[i, j] = block.abs().max() / 448
            wide = scale.repeat_interleave(128, 0)[: matrix.shape[0]]
            wide = wide.repeat_interleave(128, 1)[:, : matrix.shape[1]]
        q = (matrix / wide).to(torch.float8_e4m3fn)
        leaf = "weight_scale_inv" if form == "block" else "weight_scale"
        return {"weight": q, leaf: scale}, (q.float() * wide).numpy()

    return pack


def int4(group: int, *, symmetric: bool, act_order: bool = False) -> Packer:
    """compressed-tensors' pack-quantized int4."""

    def pack(weight: Array) -> tuple[dict[str, Tensor], Array]:
        size = weight.shape[1] if group == -1 else group
        index = np.arange(weight.shape[1]) // size
        if act_order:
            index = np.random.default_rng(1).permutation(index)
        order = np.argsort(index, kind="stable")
        q, scale, zero = rounded(weight[:, order], size, symmetric=symmetric)
        q = q[:, np.argsort(order)]
        tensors = {
            "weight_packed": pack_rows(q.T).T,
            "weight_scale": torch.from_numpy(scale).bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        scale = tensors["weight_scale"].float().numpy()
        if not symmetric:
            tensors["weight_zero_point"] = pack_rows(zero)
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        return tensors, dequantized(q, scale, zero, index)

    return pack


def int8(*, packed: bool = False) -> Packer:
    """compressed-tensors' int8, one scale for each row."""

    def pack(weight: Array) -> tuple[dict[str, Tensor], Array]:
        scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
        q = np.round(weight / scale).clip(-128, 127).astype(np.int8)
        if not packed:
            return {
                "weight": torch.from_numpy(q),
                "weight_scale": torch.from_numpy(scale),
            }, q * scale
        unsigned = (q.astype(np.int32) + 128).astype(np.uint32)
        tensors = {
            "weight_packed": pack_rows(unsigned.T, 8).T,
            "weight_scale": torch.from_numpy(scale),
            "weight_shape": torch.tensor(weight.shape),
        }
        return tensors, q * scale

    return pack


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Return the ``quantization_config`` of compressed-tensors."""
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
              "group_size": 32, "actorder": None, "dynamic": False, "observer": "minmax",
              "observer_kwargs": {}, "block_structure": None}  # fmt: skip
    group = {"targets": ["Linear"], "weights": {**scheme, **weights}, "input_activations": None,
             "output_activations": None, "format": form}  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


# Not those of nf4: the file says what the codes stand for.
VALUES = np.sort(np.random.default_rng(0).uniform(-1, 1, 16)).astype(np.float32)
NESTED = np.sort(np.random.default_rng(1).uniform(-1, 1, 256)).astype(np.float32)


def of_4_bits(kind: str, *, nested: bool, size: int = 64) -> Packer:
    """One number at a time, as the format is published."""

    def pack(weight: Array) -> tuple[dict[str, Tensor], Array]:
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


def llm_int8(weight: Array) -> tuple[dict[str, Tensor], Array]:
    largest = np.abs(weight).max(1)
    codes = np.round(weight / largest[:, None] * 127).astype(np.int8)
    tensors = {
        "weight": torch.from_numpy(codes),
        "SCB": torch.from_numpy(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes * (largest[:, None] / 127)
