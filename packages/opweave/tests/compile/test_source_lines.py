"""The source lines in reports are those of the user's program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import opweave.compile
import opweave_vllm.vllm_api.ir.ops as vllm_ops
from opweave import ir
from opweave.layers import RMSNorm

LAYER = RMSNorm(8)
STACK = nn.Sequential(LAYER, nn.Identity())


def plain(x: Tensor) -> Tensor:
    return ir.ops.rms_norm(x, None, 1e-5)  # here


def at_a_call_site(x: Tensor) -> Tensor:
    return ir.ops.rms_norm.using("native")(x, None, 1e-5)  # here


def through_the_vllm_adapter(x: Tensor) -> Tensor:
    found: Tensor = vllm_ops.rms_norm(x, None, 1e-5)  # here
    return found


def donating_through_the_vllm_adapter(x: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = vllm_ops.fused_add_rms_norm.maybe_inplace(  # here
        x * 2, x + 1, None, 1e-5
    )
    return found


def in_a_layer(x: Tensor) -> Tensor:
    found: Tensor = LAYER(x)  # here
    return found


def in_a_module_of_torch(x: Tensor) -> Tensor:
    found: Tensor = STACK(x)  # here
    return found


@pytest.mark.parametrize("mode", [nullcontext(), torch.device("cpu")], ids=["plain", "device"])
@pytest.mark.parametrize(
    "function",
    [
        plain,
        at_a_call_site,
        through_the_vllm_adapter,
        donating_through_the_vllm_adapter,
        in_a_layer,
        in_a_module_of_torch,
    ],
)
def test_a_source_line_is_the_users(
    function: Callable[[Tensor], object], mode: AbstractContextManager[object]
) -> None:
    with mode:
        compiled = torch.compile(function, backend="opweave", options={"codegen": False})
        compiled(torch.randn(4, 8))
    sources = {node.source for node in opweave.compile.report().nodes}
    assert len(sources) == 1
    source = sources.pop()
    assert source.startswith(f"{__file__}:")
    assert source.endswith("# here")


def test_set_default_device() -> None:
    torch.set_default_device("cpu")
    try:
        test_a_source_line_is_the_users(plain, nullcontext())
    finally:
        torch.set_default_device(None)
