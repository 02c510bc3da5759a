"""Models: a block over ops or over their native functions, and models that opweave ships."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from opweave import ir
from opweave.layers import QuantFP8, RMSNorm, SiluAndMul
from opweave.layers.quant_fp8 import PER_TENSOR, PER_TOKEN
from opweave_engine.models.llama import LlamaForCausalLM
from opweave_engine.models.mixture import MixtralForCausalLM

HIDDEN, HEADS, HEAD = 64, 4, 16
Functions = Mapping[str, Callable[..., Any]]


class OpCalls(dict[str, Callable[..., Any]]):
    """The ops themselves; those with ``maybe_inplace`` donate."""

    def __missing__(self, name: str) -> Callable[..., Any]:
        op = ir.current_registry().op(name)
        self[name] = op.maybe_inplace if op.allow_inplace else op
        return self[name]


class NativeCalls(dict[str, Callable[..., Any]]):
    """The same code without opweave: the native functions, inlined."""

    def __missing__(self, name: str) -> Callable[..., Any]:
        op = ir.current_registry().op(name)
        if name == "fused_add_rms_norm":
            self[name] = _add_norm
        else:
            self[name] = op.native
        return self[name]


def _add_norm(x: Tensor, r: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total = x + r
    return ir.ops.rms_norm.native(total, weight, epsilon), total


class LlamaBlock(nn.Module):
    def __init__(self, calls: Functions) -> None:
        super().__init__()
        self.calls = calls
        self.norms = nn.ParameterList(torch.randn(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, r: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x, r = self.calls["fused_add_rms_norm"](x, r, self.norms[0], 1e-5)
        q, k, v = (t.reshape(-1, HEADS, HEAD) for t in self.qkv(x).chunk(3, -1))
        q, k = (self.calls["apply_rotary_emb"](t, cos, sin) for t in (q, k))
        heads = (t.transpose(0, 1)[None] for t in (q, k, v))
        a = functional.scaled_dot_product_attention(*heads, is_causal=True)
        a = self.out(a[0].transpose(0, 1).reshape(x.shape))
        x, r = self.calls["fused_add_rms_norm"](a, r, self.norms[1], 1e-5)
        return self.down(self.calls["silu_and_mul"](self.gate_up(x))), r


class Model(nn.Module):
    def __init__(self, layers: int, calls: Functions) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.calls = calls
        self.embedding = nn.Embedding(99, HIDDEN)
        self.blocks = nn.ModuleList(LlamaBlock(calls) for _ in range(layers))
        self.norm = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(ids)
        r = torch.zeros_like(x)
        for block in self.blocks:
            x, r = block(x, r, cos, sin)
        x, _ = self.calls["fused_add_rms_norm"](x, r, self.norm, 1e-5)
        return x


class OneInput(nn.Module):
    """A language model that takes token ids and positions as the rows of one tensor.

    As two inputs, each has a size of its own until the model adds them. Dynamo keeps the size of
    the positions as an input where it sees them used before that, as in the native function of a
    rotation: then plain's graph has one input more than ours, and numbers its arguments otherwise.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, both: Tensor) -> Tensor:
        hidden: Tensor = self.model(both[0], both[1])
        return hidden


class QuantisedLayers(nn.Module):
    """The block of a quantized model, of the layers that opweave ships."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(99, HIDDEN)
        self.norm, self.activation = RMSNorm(HIDDEN), SiluAndMul()
        self.per_token = QuantFP8(static=False, group_shape=PER_TOKEN)
        self.per_tensor = QuantFP8(static=True, group_shape=PER_TENSOR)
        self.up = nn.Parameter(torch.randn(2 * HIDDEN, HIDDEN))
        self.down = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.scale = nn.Parameter(torch.tensor([0.05]))

    def forward(self, both: Tensor) -> Tensor:
        x, r = self.norm(self.embedding(both[0]), self.embedding(both[1]))
        q, scale = self.per_token(x)
        x = self.activation((q.to(torch.float32) * scale) @ self.up.t())
        q, scale = self.per_tensor(x, self.scale)
        out: Tensor = (q.to(torch.float32) * scale) @ self.down.t() + r
        return out


def _config(architecture: str, **more: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "num_hidden_layers": 2,
        "vocab_size": 99,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6,
        **more,
    }


def llama() -> nn.Module:
    config = _config("LlamaForCausalLM")
    return OneInput(LlamaForCausalLM.from_hf(config, dtype=torch.float32))


def mixtral() -> nn.Module:
    config = _config("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2)
    return OneInput(MixtralForCausalLM.from_hf(config, dtype=torch.float32))


SHIPPED: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "mixtral": mixtral,
    "quantized": QuantisedLayers,
}


def model_inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    angles = torch.rand(tokens, HEAD // 2) * 6
    return torch.randint(0, 99, (tokens,)), angles.cos(), angles.sin()
