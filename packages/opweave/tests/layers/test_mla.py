"""The latent attention layer is DeepSeek's, whole or with its heads on several ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from opweave import ir
from opweave.layers import InvalidLayerError
from opweave.layers.attention import MLAModules, MultiHeadLatentAttentionWrapper

HIDDEN, HEADS, NOPE, ROPE, VALUE, LATENT, TOKENS = 32, 4, 8, 6, 10, 12, 9
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-6}


class Rotary(nn.Module):
    """Interleaved rotation, as DeepSeek's."""

    def __init__(self, angles: Tensor) -> None:
        super().__init__()
        self.cache = torch.cat((angles.cos(), angles.sin()), -1)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        query, key = ir.ops.rotary_embedding(query, key, positions, self.cache, ROPE, False)
        return query, key


def reference(q_lora_rank: int | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return transformers' attention with random weights, and its rotation."""
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
    )
    config._attn_implementation = "eager"
    attention = deepseek.DeepseekV3Attention(config, 0).eval()
    for parameter in attention.parameters():
        mean, spread = (0.0, 0.3) if parameter.ndim > 1 else (1.0, 0.1)
        parameter.data.normal_(mean, spread)
    return attention.to(dtype), deepseek.DeepseekV3RotaryEmbedding(config)


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight)
    return layer


def modules(theirs: Any, rotary: Any, rank: int = 0, ranks: int = 1) -> MLAModules:
    """Return the modules of one rank: its share of the heads, and all that is shared by heads."""

    def of_heads(module: nn.Linear) -> nn.Linear:
        return linear(module.weight.chunk(ranks)[rank])

    inverse = rotary.inv_freq
    a_weights = [theirs.kv_a_proj_with_mqa.weight]
    if theirs.q_a_proj is not None:
        a_weights = [theirs.q_a_proj.weight, *a_weights]
    fused = linear(torch.cat(a_weights))
    parts: dict[str, Any] = (
        {"kv_a_proj_with_mqa": fused, "q_proj": of_heads(theirs.q_proj)}
        if theirs.q_a_proj is None
        else {
            "fused_qkv_a_proj": fused,
            "q_a_layernorm": theirs.q_a_layernorm,
            "q_b_proj": of_heads(theirs.q_b_proj),
        }
    )
    return MLAModules(
        kv_a_layernorm=theirs.kv_a_layernorm,
        kv_b_proj=of_heads(theirs.kv_b_proj),
        rotary_emb=Rotary(torch.outer(torch.arange(64.0), inverse)),
        o_proj=linear(theirs.o_proj.weight.chunk(ranks, 1)[rank].contiguous()),
        **parts,
    )


def layer(parts: MLAModules, q_lora_rank: int | None, heads: int = HEADS, **options: Any) -> Any:
    scale = (NOPE + ROPE) ** -0.5
    return MultiHeadLatentAttentionWrapper(
        HIDDEN, heads, scale, NOPE, ROPE, VALUE, q_lora_rank, LATENT, parts, **options
    )


def expected(theirs: Any, rotary: Any, hidden: Tensor, positions: Tensor) -> Tensor:
    tokens = len(positions)
    mask = torch.full((1, 1, tokens, tokens), -math.inf, dtype=hidden.dtype).triu(1)
    angles = rotary(hidden[None], positions[None])
    out: Tensor = theirs(hidden[None], position_embeddings=angles, attention_mask=mask)[0][0]
    return out


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("q_lora_rank", [None, 20])
def test_it_is_that_of_deepseek(q_lora_rank: int | None, dtype: torch.dtype) -> None:
    theirs, rotary = reference(q_lora_rank, dtype)
    ours = layer(modules(theirs, rotary), q_lora_rank)
    hidden = torch.randn(TOKENS, HIDDEN).to(dtype)
    positions = torch.arange(TOKENS) + 3
    found, wanted = ours(positions, hidden), expected(theirs, rotary, hidden, positions)
    assert (found.shape, found.dtype) == (wanted.shape, dtype)
    atol = TOLERANCE[dtype] * wanted.abs().max().item()
    torch.testing.assert_close(found, wanted, atol=atol, rtol=0)
    assert ours(positions[:0], hidden[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("q_lora_rank", [None, 20])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_sum_is_the_whole(q_lora_rank: int | None, ranks: int) -> None:
    theirs, rotary = reference(q_lora_rank, torch.float32)
    hidden, positions = torch.randn(TOKENS, HIDDEN), torch.arange(TOKENS)
    parts = [
        layer(modules(theirs, rotary, rank, ranks), q_lora_rank, HEADS // ranks)(positions, hidden)
        for rank in range(ranks)
    ]
    wanted = expected(theirs, rotary, hidden, positions)
    torch.testing.assert_close(torch.stack(parts).sum(0), wanted, atol=1e-4, rtol=1e-4)


def test_the_factor_of_llama_4_scales_the_queries() -> None:
    theirs, rotary = reference(20, torch.float32)
    ours = layer(modules(theirs, rotary), 20)
    hidden, positions = torch.randn(TOKENS, HIDDEN), torch.arange(TOKENS)
    factor = 0.5 + torch.rand(TOKENS, 1, 1)
    found = ours(positions, hidden, factor)
    # Causal: with one token's factor on all queries, that token's result is the same.
    for i in range(TOKENS):
        ours.scale = (NOPE + ROPE) ** -0.5 * factor[i].item()
        torch.testing.assert_close(found[i], ours(positions, hidden)[i], atol=1e-4, rtol=1e-4)


def test_a_gate_multiplies_what_is_attended() -> None:
    theirs, rotary = reference(None, torch.float32)
    parts = modules(theirs, rotary)
    gate = linear(torch.randn(HEADS * VALUE, HIDDEN) * 0.3)
    gated = MLAModules(**{**parts.__dict__, "g_proj": gate, "o_proj": nn.Identity()})
    plain = MLAModules(**{**parts.__dict__, "o_proj": nn.Identity()})
    hidden, positions = torch.randn(TOKENS, HIDDEN), torch.arange(TOKENS)
    wanted = layer(plain, None)(positions, hidden) * torch.sigmoid(gate(hidden))
    torch.testing.assert_close(layer(gated, None)(positions, hidden), wanted)


def test_without_a_rotation_positions_do_not_matter() -> None:
    theirs, rotary = reference(None, torch.float32)
    parts = MLAModules(**{**modules(theirs, rotary).__dict__, "rotary_emb": None})
    hidden, positions = torch.randn(TOKENS, HIDDEN), torch.arange(TOKENS)
    ours = layer(parts, None)
    assert torch.equal(ours(positions, hidden), ours(positions + 7, hidden))


def test_the_caller_chooses_how_tokens_attend() -> None:
    theirs, rotary = reference(20, torch.float32)
    calls = []

    def attend(query: Tensor, kv_c: Tensor, k_pe: Tensor, weight: Tensor, scale: float) -> Tensor:
        calls.append((query.shape, kv_c.shape, k_pe.shape, weight.shape, scale))
        return query.new_zeros(TOKENS, HEADS, VALUE)

    out = layer(modules(theirs, rotary), 20, attention=attend)(
        torch.arange(TOKENS), torch.randn(TOKENS, HIDDEN)
    )
    assert not out.any()
    sizes = (TOKENS, HEADS, NOPE + ROPE), (TOKENS, LATENT), (TOKENS, ROPE)
    assert calls == [(*sizes, (HEADS * (NOPE + VALUE), LATENT), (NOPE + ROPE) ** -0.5)]


@pytest.mark.parametrize(
    ("q_lora_rank", "missing"),
    [(20, "fused_qkv_a_proj, q_a_layernorm, q_b_proj"), (None, "kv_a_proj_with_mqa, q_proj")],
)
def test_a_module_that_is_missing_is_named(q_lora_rank: int | None, missing: str) -> None:
    norm, linear_map = nn.Identity(), nn.Identity()
    with pytest.raises(InvalidLayerError, match=f"lacks {missing}; give"):
        layer(MLAModules(norm, linear_map, None, linear_map), q_lora_rank)
