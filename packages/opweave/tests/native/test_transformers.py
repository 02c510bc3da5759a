"""Activations and norms against the layers of transformers that use them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN, XIELUActivation
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from opweave import ir
from opweave.ir.registry import find_op
from opweave.kernels.opweave_c import activation, norm

from .oracle import DTYPES, random

# Importing them registers what is tested here.
MODULES = (activation, norm, norm, activation)
PROVIDERS = ("native", "opweave_c")
pytestmark = [
    pytest.mark.parametrize("provider", PROVIDERS),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.usefixtures("module"),
]


def run(provider: str, name: str, *arguments: object) -> Tensor:
    op = find_op(name)
    with ir.priority({name: [provider]}):
        assert op.dispatch(*arguments).provider == provider
        result: Tensor = op(*arguments)
    return result


def near(name: str, got: Tensor, wanted: Tensor) -> None:
    tolerance = find_op(name).get_tolerance(wanted.dtype)
    torch.testing.assert_close(got, wanted, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "quick_gelu", "relu2"])
def test_pointwise(name: str, dtype: torch.dtype, provider: str) -> None:
    x = 3 * random(37, 1001, dtype=dtype)
    got, wanted = run(provider, name, x), ACT2FN[name](x)
    near(name, got, wanted)
    # torch rounds x**3 once in float16, and twice, as x * x * x, in bfloat16.
    if dtype == torch.bfloat16:
        assert (got == wanted).float().mean() > 0.999


def test_xielu(dtype: torch.dtype, provider: str) -> None:
    layer = XIELUActivation(dtype=dtype)
    layer.alpha_p.fill_(0.4)
    x = 3 * random(37, 1001, dtype=dtype)
    got = run(provider, "xielu", x, layer.alpha_p, layer.alpha_n)
    wanted = layer(x)
    near("xielu", got, wanted)
    if dtype != torch.float32:
        assert (got == wanted).float().mean() > 0.999


@pytest.mark.parametrize("kind", ["gelu", "gelu_pytorch_tanh", "silu"])
def test_gated(kind: str, dtype: torch.dtype, provider: str) -> None:
    x = 3 * random(37, 2002, dtype=dtype)
    gate, up = x.chunk(2, -1)
    name = "silu_and_mul" if kind == "silu" else "gelu_and_mul"
    arguments = {"silu": (), "gelu": ("none",), "gelu_pytorch_tanh": ("tanh",)}[kind]
    near(name, run(provider, name, x, *arguments), ACT2FN[kind](gate) * up)
    if kind == "silu":
        near("mul_and_silu", run(provider, "mul_and_silu", x), gate * ACT2FN[kind](up))


def test_swigluoai_and_mul(dtype: torch.dtype, provider: str) -> None:
    experts = GptOssExperts.__new__(GptOssExperts)
    torch.nn.Module.__init__(experts)
    experts.limit, experts.alpha = 7.0, 1.702
    x = 5 * random(37, 2002, dtype=dtype)
    got = run(provider, "swigluoai_and_mul", x)
    near("swigluoai_and_mul", got, experts._apply_gate(x))


def test_gelu_and_mul_sparse(dtype: torch.dtype, provider: str) -> None:
    layer = Gemma3nTextMLP.__new__(Gemma3nTextMLP)
    torch.nn.Module.__init__(layer)
    layer.activation_sparsity = 0.95
    x = random(37, 2002, dtype=dtype)
    gate, up = x.chunk(2, -1)
    multiplier = math.sqrt(2) * torch.erfinv(torch.tensor(0.9, dtype=torch.float64))
    # The layer rounds the multiplier, too.
    rounded = multiplier.to(dtype).item()
    got = run(provider, "gelu_and_mul_sparse", x, rounded, "tanh")
    wanted = torch.nn.functional.gelu(layer._gaussian_topk(gate), approximate="tanh") * up
    near("gelu_and_mul_sparse", got, wanted)
    assert 0.94 < (got == 0).float().mean() < 0.96


def test_rms_norm_gated_of_qwen3_next(dtype: torch.dtype, provider: str) -> None:
    layer = Qwen3NextRMSNormGated(128).to(dtype)
    layer.weight.normal_(1, 0.1)
    x, z = random(2, 37, 128, dtype=dtype)
    got = run(provider, "rms_norm_gated", x, layer.weight, z, 1e-6, None, True)
    compare_norm(got, layer(x, z))


def test_rms_norm_gated_of_mamba2(dtype: torch.dtype, provider: str) -> None:
    layer = MambaRMSNormGated(256, group_size=64, eps=1e-5).to(dtype)
    layer.weight.normal_(1, 0.1)
    x, z = random(2, 37, 256, dtype=dtype)
    got = run(provider, "rms_norm_gated", x, layer.weight, z, 1e-5, 64)
    compare_norm(got, layer(x, z))


def compare_norm(got: Tensor, wanted: Tensor) -> None:
    """The layers round twice more in 16 bits: each half a unit, and one for the product."""
    assert got.dtype == wanted.dtype
    rtol = 2e-6 if got.dtype == torch.float32 else 2 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=rtol)


def test_layer_norm(dtype: torch.dtype, provider: str) -> None:
    layer = torch.nn.LayerNorm(1001, eps=1e-5).to(dtype)
    layer.weight.normal_(1, 0.1)
    layer.bias.normal_(0, 1)
    x = 2 + random(37, 1001, dtype=dtype)
    got = run(provider, "layer_norm", x, layer.weight, layer.bias, 1e-5)
    near("layer_norm", got, layer(x))
