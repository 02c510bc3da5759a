"""AWQ checkpoints, as AutoAWQ's version "gemm" writes them.

Source of the method: arXiv:2306.00978. The layout is that of ``WQLinear_GEMM``: ``qweight``
``(in, out / 8)`` and ``qzeros`` ``(groups, out / 8)`` pack eight outputs, in the order 0, 2, 4, 6,
1, 3, 5, 7 from the lowest bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opweave_engine.loading.quantized.matrix import (
    FLOATS,
    QuantizedMatrix,
    Tensors,
    grouped_int4,
    require_shape,
    unpacked,
)
from opweave_engine.loading.quantized.strict import StrictConfig

_PER_WORD = 8
# Where in a word each output is.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq:
    """The format of the checkpoints.

    Args:
        config: ``quantization_config``.

    Raises:
        UnsupportedModelError: it asks for something that is not supported.
    """

    main = ("qweight",)
    leaves = ("qweight", "qzeros", "scales")
    values_needed = ("qzeros",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        read = StrictConfig(config, "awq")
        self.notes: list[str] = []
        read.one_of("bits", 4, default=read.config.get("w_bit"))
        read.one_of("version", "gemm", "GEMM", default="gemm")
        read.one_of("zero_point", True, default=True)
        read.allow(
            *("quant_method", "group_size", "q_group_size", "modules_to_not_convert", "backend"),
            *("do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config", "w_bit"),
        )
        read.finish()

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        """Return the matrix of *module* from its tensors."""
        packed = require_shape(module, tensors, "qweight", (torch.int32,), None, None)
        words = packed.shape[1]
        scales = require_shape(module, tensors, "scales", FLOATS, None, words * _PER_WORD)
        groups = scales.shape[0]
        zeros = require_shape(module, tensors, "qzeros", (torch.int32,), groups, words)
        q, zero = _outputs(packed).T.contiguous(), _outputs(zeros).T.to(torch.int32)
        return grouped_int4(module, q, scales.T.contiguous(), zero.contiguous(), None)


def _outputs(packed: Tensor) -> Tensor:
    """Return ``(n, out)`` of ``(n, out / 8)``."""
    words = torch.unflatten(unpacked(packed, 4), 1, (-1, _PER_WORD))
    return words[..., list(_PLACES)].flatten(1)
