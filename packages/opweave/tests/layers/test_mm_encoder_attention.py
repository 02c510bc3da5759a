"""The encoders' attention against torch's, and transformers' encoders."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from layers.switch import both_ways, built
from opweave import ir
from opweave.config import CompilationConfig, compilation_config
from opweave.layers import LayerArgumentError, MMEncoderAttention


@pytest.fixture(params=["all", "none", "native"])
def attend(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Build a layer and call it; ``native`` calls what no configuration chooses."""

    def run(layer: Callable[[], MMEncoderAttention], *arguments: Any) -> Tensor:
        made = built("none" if request.param == "none" else "all", layer)
        method = made.forward_native if request.param == "native" else made
        found: Tensor = method(*arguments)
        return found

    return run


def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Of ``(batch, tokens, heads, size)``, in float64."""
    group = query.shape[2] // key.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (query, key, value))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.is_contiguous()
    atol, rtol = ir.ops.varlen_attention.get_tolerance(found.dtype)
    torch.testing.assert_close(found.double(), expected.double(), atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype"),
    [
        (1, 1, 64, torch.float32),
        (16, 16, 72, torch.bfloat16),
        (16, 1, 80, torch.float16),
        (4, 2, 72, torch.float32),
    ],
    ids=str,
)
def test_dense(
    attend: Callable[..., Tensor], heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> None:
    query = torch.randn(2, 7, heads, size).to(dtype)
    key, value = torch.randn(2, 2, 9, kv_heads, size).to(dtype)

    def make() -> MMEncoderAttention:
        return MMEncoderAttention(heads, size, num_kv_heads=kv_heads)

    expected = sdpa(query, key, value)
    close(attend(make, query, key, value), expected)
    flat = attend(make, query.flatten(2), key.flatten(2), value.flatten(2))
    close(flat, expected.flatten(2))


@pytest.mark.parametrize(
    ("lengths", "batch", "dtype"),
    [
        ([5, 1, 8, 3], 2, torch.float32),
        ([5, 1, 8, 3], 1, torch.bfloat16),
        ([17], 2, torch.float16),
        ([0, 9, 0, 8, 0], 1, torch.float32),
    ],
    ids=str,
)
def test_segments(
    attend: Callable[..., Tensor], lengths: list[int], batch: int, dtype: torch.dtype
) -> None:
    heads, kv_heads, size = 4, 2, 80
    query = torch.randn(batch, 17, heads, size).to(dtype)
    key, value = torch.randn(2, batch, 17, kv_heads, size).to(dtype)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    layers_own = (query.flatten(2), key.flatten(2), value.flatten(2), cu_seqlens)
    found = attend(lambda: MMEncoderAttention(heads, size, 0.2, kv_heads), *layers_own)
    parts = zip(*(t.split(lengths, 1) for t in (query, key, value)), strict=True)
    expected = torch.cat([sdpa(q, k, v, 0.2) for q, k, v in parts if q.shape[1]], 1)
    close(found, expected.flatten(2))


def test_nothing_to_attend(attend: Callable[..., Tensor]) -> None:
    empty = torch.randn(1, 0, 64)
    assert attend(lambda: MMEncoderAttention(4, 16), empty, empty, empty).shape == (1, 0, 64)
    cu = torch.zeros(1, dtype=torch.int32)
    assert attend(lambda: MMEncoderAttention(4, 16), empty, empty, empty, cu).shape == (1, 0, 64)


def test_inside_the_attention_of_qwen2_vl(attend: Callable[..., Tensor]) -> None:
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

    config = Qwen2VLVisionConfig(embed_dim=64, num_heads=4)
    config._attn_implementation = "sdpa"
    theirs = qwen2_vl.VisionAttention(config)
    hidden, cu = torch.randn(12, 64), torch.tensor([0, 4, 12], dtype=torch.int32)
    angles = torch.rand(12, 16) * 6
    cos, sin = angles.cos(), angles.sin()
    with torch.no_grad():
        expected = theirs(hidden, cu_seqlens=cu, position_embeddings=(cos, sin))
        query, key, value = theirs.qkv(hidden).reshape(12, 3, 4, 16).unbind(1)
        query, key = qwen2_vl.apply_rotary_pos_emb_vision(query, key, cos, sin)
        mixed = attend(lambda: MMEncoderAttention(4, 16), query[None], key[None], value[None], cu)
        found = theirs.proj(mixed[0].flatten(1))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@both_ways
def test_it_is_always_enabled(custom_ops: str) -> None:
    with compilation_config(CompilationConfig(custom_ops=custom_ops)):
        assert MMEncoderAttention.enabled()
        layer = MMEncoderAttention(2, 8)
    x = torch.randn(1, 3, 16)
    with ir.record() as record, torch.no_grad():
        layer(x, x, x)
        layer(x, x, x, torch.tensor([0, 3], dtype=torch.int32), torch.tensor(3))
    assert {*record.selected_impls} == {"bidirectional_attention", "varlen_attention"}


def test_mistakes() -> None:
    with pytest.raises(LayerArgumentError, match=r"num_kv_heads=3.*num_heads=4"):
        MMEncoderAttention(4, 8, num_kv_heads=3)
    layer, x = MMEncoderAttention(4, 8), torch.randn(1, 3, 32)
    with pytest.raises(LayerArgumentError, match=r"key has shape \(1, 3, 16\)"):
        layer(x, x[..., :16], x)
    with pytest.raises(LayerArgumentError, match=r"query has shape \(3, 32\)"):
        layer(x[0], x, x)


@pytest.mark.parametrize(
    ("key", "value", "cu", "match"),
    [
        ((2, 6), (2, 7), None, r"\(2, 4\), \(2, 6\) and \(2, 7\).*key and value have the same"),
        ((1, 4), (1, 4), None, r"\(2, 4\), \(1, 4\) and \(1, 4\).*one batch"),
        ((2, 6), (2, 6), [0, 2, 4], "with cu_seqlens, all three have the same"),
        ((2, 4), (2, 4), [0, 2, 3], r"cu_seqlens=\[0, 2, 3\] must go from 0 to 4"),
        ((2, 4), (2, 4), [0, 2, 9], "from 0 to 4"),
        ((2, 4), (2, 4), [1, 4], "from 0 to 4"),
        ((2, 4), (2, 4), [0, 3, 2, 4], "never down"),
        ((2, 4), (2, 4), [], "from 0 to 4"),
        ((2, 4), (2, 4), [0.0, 4.0], "int32 or int64.*float32"),
        ((2, 4), (2, 4), [[0, 4]], r"\(segments \+ 1,\)"),
    ],
)
def test_tokens_that_do_not_fit(
    key: tuple[int, int], value: tuple[int, int], cu: list[Any] | None, match: str
) -> None:
    layer, query = MMEncoderAttention(2, 8), torch.randn(2, 4, 16)
    keys, values = torch.randn(*key, 16), torch.randn(*value, 16)
    starts = None
    if cu is not None:
        starts = torch.tensor(cu, dtype=None if cu and isinstance(cu[0], float) else torch.int32)
    for method in (layer, layer.forward_native):
        with pytest.raises(LayerArgumentError, match=match):
            method(query, keys, values, starts)


def test_segments_in_a_graph_are_not_looked_at() -> None:
    layer, x = MMEncoderAttention(2, 8), torch.randn(2, 4, 16)
    starts = torch.tensor([0, 1, 4], dtype=torch.int32)
    compiled = torch.compile(layer.forward_native, fullgraph=True, backend="eager", dynamic=True)
    close(compiled(x, x, x, starts), layer(x, x, x, starts))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, x, x, starts)]
        assert layer.forward_native(*fakes).shape == x.shape
