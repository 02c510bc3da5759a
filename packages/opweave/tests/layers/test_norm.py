"""The norms against transformers' and torch's; sharded norms against unsharded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from layers.switch import both_ways, built, ranks
from opweave import ir
from opweave.layers import (
    GemmaRMSNorm,
    LayerArgumentError,
    Mixer2RMSNormGated,
    RMSNorm,
    RMSNormGated,
)
from opweave.layers.registry import ShardingError, WeightLoadError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SIZES = (8, 769)


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def close(found: Tensor, expected: Tensor, op: ir.IrOp = ir.ops.rms_norm) -> None:
    assert found.dtype is expected.dtype
    atol, rtol = op.get_tolerance(found.dtype)
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


def randomized(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    for parameter in layer.parameters():
        parameter.copy_(torch.randn_like(parameter))
    return layer.to(dtype)


@both_ways
@each_dtype
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_is_llamas(size: int, dtype: torch.dtype, custom_ops: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = randomized(LlamaRMSNorm(size, eps=1e-5), dtype)
    ours = built(custom_ops, lambda: RMSNorm(size, 1e-5, dtype=dtype))
    ours.load_state_dict(theirs.state_dict())
    wide = torch.randn(2, 3, size + 9).to(dtype)
    for x in (wide[0, :, :size].contiguous(), wide[..., :size], wide[:0, 0, :size]):
        close(ours(x), theirs(x))
        residual = torch.randn_like(x)
        total = x + residual
        # Donated: the layer may overwrite both.
        normed, both = ours(x.clone(), residual.clone())
        close(both, total)
        close(normed, theirs(total))


@both_ways
def test_the_variance_of_the_first_elements_without_a_weight(custom_ops: str) -> None:
    layer = built(custom_ops, lambda: RMSNorm(48, var_hidden_size=16, has_weight=False))
    assert not [*layer.parameters()]
    assert torch.equal(layer.weight, torch.ones(48))
    x = torch.randn(5, 48)
    mean = x[:, :16].double().pow(2).mean(-1, keepdim=True)
    close(layer(x), (x.double() * (mean + 1e-6).rsqrt()).float())
    assert RMSNorm(48, var_hidden_size=48).variance_size is None


@both_ways
@each_dtype
@pytest.mark.parametrize("size", [8, 769])
def test_gemma(size: int, dtype: torch.dtype, custom_ops: str) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm as Theirs

    theirs = randomized(Theirs(size, eps=1e-6), dtype)
    ours = built(custom_ops, lambda: GemmaRMSNorm(size)).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    x, residual = torch.randn(2, 3, 5, size).to(dtype)
    close(ours(x), theirs(x))
    before = x.clone(), residual.clone()
    normed, total = ours(x, residual)
    close(total, x + residual)
    close(normed, theirs(x + residual))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    assert torch.equal(GemmaRMSNorm(size).weight, torch.zeros(size))


@both_ways
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_gated(norm_before_gate: bool, custom_ops: str) -> None:
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    theirs = (
        Qwen3NextRMSNormGated(64, eps=1e-5)
        if norm_before_gate
        else MambaRMSNormGated(64, group_size=64, eps=1e-5)  # type: ignore[no-untyped-call]
    )
    randomized(theirs, torch.float32)
    ours = built(custom_ops, lambda: RMSNormGated(64, norm_before_gate=norm_before_gate))
    ours.load_state_dict(theirs.state_dict())
    x, z = torch.randn(2, 3, 5, 64)
    close(ours(x, z), theirs(x, z), ir.ops.rms_norm_gated)
    assert ours(x[:0], z[:0]).shape == (0, 5, 64)
    atol, rtol = ir.ops.rms_norm_gated.get_tolerance(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16):  # theirs rounds twice; ours once
        found = ours(x.to(dtype), z.to(dtype))
        expected = theirs(x.to(dtype).float(), z.to(dtype).float())
        torch.testing.assert_close(found.float(), expected, atol=4 * atol, rtol=rtol)


@both_ways
def test_gated_by_groups_without_a_gate_or_by_sigmoid(custom_ops: str) -> None:
    layer = built(custom_ops, lambda: RMSNormGated(24, group_size=8, activation="sigmoid"))
    x, z = torch.randn(2, 5, 24).double()
    layer.double()
    for gate in (None, z):
        gated = x if gate is None else x * torch.sigmoid(gate)
        groups = gated.view(5, 3, 8)
        expected = groups * (groups.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        torch.testing.assert_close(layer(x, gate), expected.view(5, 24))


def hf_mixer_norm(groups: int, dtype: torch.dtype, size: int = 64) -> Any:
    from transformers.models.mamba2 import modeling_mamba2

    theirs: Any = modeling_mamba2.MambaRMSNormGated
    return randomized(theirs(size, group_size=size // groups, eps=1e-6), dtype)


@both_ways
@pytest.mark.parametrize(
    ("groups", "size", "dtype"),
    [
        (1, 1, torch.float32),
        (1, 4, torch.bfloat16),
        (2, 2, torch.float16),
        (2, 8, torch.float32),
        (4, 4, torch.float32),
        (4, 8, torch.bfloat16),
    ],
    ids=str,
)
def test_the_mixers_norm_on_any_number_of_ranks(
    groups: int, size: int, dtype: torch.dtype, custom_ops: str
) -> None:
    theirs = hf_mixer_norm(groups, dtype)
    x, gate = torch.randn(2, 3, 7, 64).to(dtype)
    expected, weight, width = theirs(x, gate), theirs.weight, 64 // size

    def run(rank: int, layer: Mixer2RMSNormGated) -> Tensor:
        mine = slice(rank * width, (rank + 1) * width)
        parameter: Any = layer.weight
        # From the whole weight, or from what another rank's loader has cut already.
        parameter.weight_loader(parameter, weight if rank % 2 else weight[mine])
        part: Tensor = layer.to(dtype)(x[..., mine], gate[..., mine])
        return part

    found = built(custom_ops, lambda: ranks(size, lambda: Mixer2RMSNormGated(64, groups), run))
    close(torch.cat(found, -1), expected)


@both_ways
@each_dtype
def test_the_mixers_gate_alone(dtype: torch.dtype, custom_ops: str) -> None:
    layer = built(custom_ops, lambda: Mixer2RMSNormGated(64, 2, use_rms_norm=False))
    assert layer.weight is None
    x, gate = torch.randn(2, 3, 64).to(dtype)
    expected = x.double() * functional.silu(gate.double())
    close(layer(x, gate), expected.to(dtype))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: RMSNorm(8, var_hidden_size=9), LayerArgumentError, "var_hidden_size=9"),
        (lambda: RMSNorm(8, var_hidden_size=0), LayerArgumentError, "var_hidden_size=0"),
        (lambda: RMSNormGated(8, group_size=3), LayerArgumentError, "group_size=3"),
        (lambda: RMSNormGated(8, activation="relu"), LayerArgumentError, "'relu'.*silu"),
        (lambda: Mixer2RMSNormGated(8, 3), LayerArgumentError, "full_n_groups=3"),
        (
            lambda: ranks(3, lambda: Mixer2RMSNormGated(8, 1), lambda rank, layer: torch.ones(1)),
            ShardingError,
            "full_hidden_size=8",
        ),
    ],
)
def test_mistakes(make: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_a_weight_of_another_shape() -> None:
    parameter: Any = Mixer2RMSNormGated(8, 1).weight
    with pytest.raises(WeightLoadError, match=r"\(9,\).*\(8,\)"):
        parameter.weight_loader(parameter, torch.ones(9))
