"""Every activation against transformers' or torch's, enabled and disabled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from layers.switch import both_ways, built
from opweave import ir, layers
from opweave.layers import LayerArgumentError, get_act_and_mul_fn, get_act_fn
from opweave.layers.activation import _ACTIVATIONS, _GATED

DTYPES = (torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def halves(x: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(2, dim=-1)


def hugging_face(name: str) -> Callable[[Tensor], Tensor]:
    from transformers.activations import ACT2FN

    found: Callable[[Tensor], Tensor] = ACT2FN[name]
    return found


def sparse(x: Tensor) -> Tensor:
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

    mlp = Gemma3nTextMLP.__new__(Gemma3nTextMLP)
    nn.Module.__init__(mlp)
    mlp.activation_sparsity = 0.95
    gate, up = halves(x)
    return functional.gelu(mlp._gaussian_topk(gate), approximate="tanh") * up


def gpt_oss(x: Tensor) -> Tensor:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts = GptOssExperts.__new__(GptOssExperts)
    nn.Module.__init__(experts)
    experts.limit, experts.alpha = 7.0, 1.702
    gated: Tensor = experts._apply_gate(x)
    return gated


GATED: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "silu_and_mul": (
        layers.SiluAndMul,
        lambda x: hugging_face("silu")(halves(x)[0]) * halves(x)[1],
    ),
    "mul_and_silu": (
        layers.MulAndSilu,
        lambda x: halves(x)[0] * hugging_face("silu")(halves(x)[1]),
    ),
    "gelu_and_mul": (
        layers.GeluAndMul,
        lambda x: hugging_face("gelu")(halves(x)[0]) * halves(x)[1],
    ),
    "gelu_and_mul-tanh": (
        lambda: layers.GeluAndMul("tanh"),
        lambda x: hugging_face("gelu_pytorch_tanh")(halves(x)[0]) * halves(x)[1],
    ),
    "gelu_and_mul_sparse": (lambda: layers.GeluAndMulSparse(0.95, "tanh"), sparse),
    "swigluoai_and_mul": (layers.SwigluOAIAndMul, gpt_oss),
    "fatrelu_and_mul": (
        lambda: layers.FatreluAndMul(0.3),
        lambda x: functional.threshold(halves(x)[0], 0.3, 0.0) * halves(x)[1],
    ),
}
POINTWISE: dict[str, type[nn.Module]] = {
    "gelu_new": layers.NewGELU,
    "gelu_fast": layers.FastGELU,
    "quick_gelu": layers.QuickGELU,
    "relu2": layers.ReLUSquaredActivation,
}


def compare(op: ir.IrOp, found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype is dtype
    atol, rtol = op.get_tolerance(dtype)
    if op.name == "gelu_and_mul_sparse" and dtype is not torch.float32:
        # Theirs rounds the multiplier to the dtype too: a bound of about 5 moves by its last place.
        atol, rtol = 12 * atol, 2 * rtol
    torch.testing.assert_close(found, expected.to(dtype), atol=atol, rtol=rtol)


@both_ways
@each_dtype
@pytest.mark.parametrize("name", GATED)
def test_gated(name: str, dtype: torch.dtype, custom_ops: str) -> None:
    make, oracle = GATED[name]
    layer = built(custom_ops, make)
    for shape in ((7, 1024), (2, 3, 26), (0, 8)):
        x = (3 * torch.randn(shape)).to(dtype)  # clamps take part
        expected = oracle(x) if x.numel() else x[..., : shape[-1] // 2]
        compare(getattr(ir.ops, name.partition("-")[0]), layer(x), expected, dtype)


@both_ways
@each_dtype
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str, dtype: torch.dtype, custom_ops: str) -> None:
    layer = built(custom_ops, POINTWISE[name])
    for shape in [(7, 512), (2, 3, 13), (0, 4), ()]:
        x = (2 * torch.randn(shape)).to(dtype)
        compare(getattr(ir.ops, name), layer(x), hugging_face(name)(x), dtype)


@both_ways
@each_dtype
def test_xielu(dtype: torch.dtype, custom_ops: str) -> None:
    from transformers import activations

    hf: Any = activations.XIELUActivation
    theirs = hf(0.7, 1.1, 0.4, -1e-6, dtype=dtype)
    layer = built(custom_ops, lambda: layers.XIELU(dtype=dtype))
    layer.load_state_dict(theirs.state_dict())
    x = (3 * torch.randn(5, 33)).to(dtype)
    with torch.no_grad():
        compare(ir.ops.xielu, layer(x), theirs._xielu_python(x), dtype)
        fresh = hf(dtype=torch.float32)
        ours = layers.XIELU(dtype=torch.float32)
        torch.testing.assert_close(ours(x.float()), fresh._xielu_python(x.float()))


def test_a_weight_loader_of_xielu_sets_its_numbers() -> None:
    layer = layers.XIELU(dtype=torch.float32)
    beta: Any = layer.beta
    beta.weight_loader(beta, torch.tensor([0.25]))
    x = torch.randn(9)
    expected = ir.ops.xielu.native(x, layer.alpha_p, layer.alpha_n, 0.25, -1e-6)
    torch.testing.assert_close(layer(x), expected)


def test_nan_stays() -> None:
    x = torch.tensor([float("nan"), 1.0, 2.0, 3.0])
    for layer in (layers.FatreluAndMul(), layers.SiluAndMul(), layers.ReLUSquaredActivation()):
        assert layer(x)[0].isnan()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: layers.GeluAndMul("exact"), "'exact' is neither 'none' nor 'tanh'"),
        (lambda: layers.GeluAndMulSparse(0.0), "use GeluAndMul"),
        (lambda: layers.GeluAndMulSparse(1.0), "between 0 and 1"),
        (lambda: layers.GeluAndMulSparse(0.5, "fast"), "'fast' is neither"),
        (lambda: get_act_fn("sillu"), "'sillu'.*'silu'"),
        (lambda: get_act_and_mul_fn("relu2"), "gated activation 'relu2'"),
    ],
)
def test_mistakes(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(LayerArgumentError, match=match):
        make()


@pytest.mark.parametrize("name", _ACTIVATIONS)
def test_by_name(name: str) -> None:
    x = torch.randn(4, 8)
    layer = get_act_fn(name.upper())
    if name == "xielu":
        assert isinstance(layer, layers.XIELU)
        return
    torch.testing.assert_close(layer(x), hugging_face(name)(x))


def test_by_the_name_of_a_class_of_torch() -> None:
    assert isinstance(get_act_fn("torch.nn.modules.activation.Tanh"), nn.Tanh)


@pytest.mark.parametrize("name", _GATED)
def test_gated_by_name(name: str) -> None:
    layer = get_act_and_mul_fn(name)
    assert layer(torch.randn(4, 8)).shape == (4, 4)
