"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

Source of the method: arXiv:2210.17323. The layout is that of ``QuantLinear`` in both libraries:
``qweight`` ``(in * bits / 32, out)`` packs inputs, ``qzeros`` ``(groups, out * bits / 32)`` packs
outputs, lowest bits first; version 1 stores zeros minus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opweave_engine.loading.quantized.matrix import (
    FLOATS,
    QuantizedMatrix,
    Tensors,
    dense_matrix,
    grouped_int4,
    misfit,
    require_shape,
    sorted_columns,
    unpacked,
)
from opweave_engine.loading.quantized.strict import StrictConfig

_BITS = (4, 8)
_FORMS = ("gptq", "gptq_v2", None)
# Keys of how the weights were found, and of kernels; and those that the tensors tell.
_HARMLESS = (
    *("quant_method", "method", "group_size", "sym", "desc_act", "static_groups", "lm_head"),
    *("dynamic", "modules_in_block_to_quantize", "block_name_to_quantize", "damp_percent"),
    *("damp_auto_increment", "true_sequential", "dataset", "tokenizer", "batch_size", "mse"),
    *("module_name_preceding_first_block", "pad_token_id", "max_input_length", "model_seqlen"),
    *("model_name_or_path", "model_file_base_name", "meta", "quantizer", "hyb_act", "pack_impl"),
    *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "backend"),
    *("cache_block_outputs", "act_group_aware", "offload_to_disk", "offload_to_disk_path"),
    *("modules_to_not_convert", "gptaq", "v2", "v2_alpha", "failsafe", "mock_quantization"),
)


class Gptq:
    """The format of the checkpoints.

    Args:
        config: ``quantization_config``.

    Raises:
        UnsupportedModelError: it asks for something that is not supported.
    """

    main = ("qweight",)
    leaves = ("qweight", "qzeros", "scales", "g_idx")
    values_needed = ("g_idx", "qzeros")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.notes: list[str] = []
        read = StrictConfig(config, "gptq")
        read.one_of("bits", *_BITS)
        forms = [read.one_of(key, *_FORMS) for key in ("checkpoint_format", "format")]
        self._zero_shift = 0 if "gptq_v2" in forms else 1
        read.one_of("pack_dtype", "int32", None)
        for key in ("is_marlin_format", "adapter", "rotation"):
            read.refuse_set(key)
        read.allow(*_HARMLESS)
        read.finish()
        self._is_reordered = bool(config.get("desc_act")) and not config.get("static_groups")

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        """Return the matrix of *module* from its tensors."""
        packed = require_shape(module, tensors, "qweight", (torch.int32,), None, None)
        outputs = packed.shape[1]
        scales = require_shape(module, tensors, "scales", FLOATS, None, outputs)
        groups = scales.shape[0]
        zeros = require_shape(module, tensors, "qzeros", (torch.int32,), groups, None)
        # Layers may have their own number of bits ("dynamic" in the configuration).
        bits = zeros.shape[1] * 32 // outputs
        if bits not in _BITS or outputs * bits != zeros.shape[1] * 32:
            raise misfit(module, "qzeros", zeros, f"4 or 8 bits for each of {outputs} outputs")
        inputs = packed.shape[0] * 32 // bits
        zero = (unpacked(zeros, bits).to(torch.int32) + self._zero_shift).T
        order = None
        if "g_idx" in tensors or (self._is_reordered and groups > 1):
            index = require_shape(module, tensors, "g_idx", (torch.int32, torch.int64), inputs)
            order = sorted_columns(module, index, groups)
        q = unpacked(packed.T, bits)
        if order is not None:
            q = q[:, order.to(q.device)]
        if bits == 4:
            return grouped_int4(module, q, scales.T.contiguous(), zero.contiguous(), order)
        return dense_matrix(q, scales.T, zero).reordered(order)
