"""The platforms' defaults select kernels for tensors on a GPU, of which none is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from opweave import ir
from opweave.ir.ops.low_bit import GGUF_BLOCKS
from opweave.kernels.triton.launch import INTERPRETED
from opweave.platforms.builtin import CudaPlatform, RocmPlatform

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1: kernels run on the CPU")


def calls() -> Iterator[tuple[ir.IrOp, tuple[Any, ...]]]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for tokens in (1, 300):
            options: dict[str, Any] = {"num_tokens": tokens, "dtype": dtype}
            yield ir.ops.linear_w4a16, ir.ops.linear_w4a16.generate_inputs(**options)
            yield ir.ops.linear_w8a8, ir.ops.linear_w8a8.generate_inputs(**options)
            for format in GGUF_BLOCKS:
                yield ir.ops.linear_q, ir.ops.linear_q.generate_inputs(format=format, **options)


@pytest.mark.parametrize("platform", [CudaPlatform, RocmPlatform])
def test_linear_layers_with_low_bit_weights(platform: type[CudaPlatform]) -> None:
    for op, values in calls():
        with FakeTensorMode(), ir.priority(platform().get_default_ir_op_priority()):
            moved = [
                torch.empty(v.shape, dtype=v.dtype, device="cuda") if isinstance(v, Tensor) else v
                for v in values
            ]
            assert op.dispatch(*moved).provider == "triton", (op.name, values[-1])
