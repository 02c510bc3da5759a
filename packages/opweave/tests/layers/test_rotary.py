"""The rotary layers against transformers', against each other, and against the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from layers.switch import both_ways, built
from opweave import ir
from opweave.config import CompilationConfig, compilation_config
from opweave.layers import (
    ApplyRotaryEmb,
    DualChunkRotaryEmbedding,
    LayerArgumentError,
    MRotaryEmbedding,
    RotaryEmbedding,
    get_rope,
)
from opweave.layers.rotary_scaling import ROPE_TYPES, LongRopeScaling, Scaling

DTYPES = (torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_style = pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
ROWS = 96


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    atol, rtol = ir.ops.rotary_embedding.get_tolerance(found.dtype)
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


def definition(x: Tensor, positions: Tensor, size: int, neox: bool, base: float = 1e4) -> Tensor:
    """Turn the pairs of ``(tokens, heads, head_size)`` as complex numbers, in float64."""
    wide, half = x.double(), size // 2
    frequencies = base ** (-torch.arange(half).double() / half)
    turns = torch.polar(torch.ones(()).double(), torch.outer(positions.double(), frequencies))
    rotated = wide[..., :size]
    pairs = torch.unflatten(rotated, -1, (2, half) if neox else (half, 2))
    real, imaginary = pairs.unbind(-2 if neox else -1)
    turned = torch.complex(real, imaginary) * turns[:, None]
    joined = torch.stack((turned.real, turned.imag), -2 if neox else -1).flatten(-2)
    return torch.cat((joined, wide[..., size:]), -1)


@both_ways
@each_style
@pytest.mark.parametrize(
    ("head", "rotated", "dtype"),
    [
        (64, 64, torch.float32),
        (80, 32, torch.bfloat16),
        (120, 32, torch.float32),
        (256, 256, torch.bfloat16),
    ],
    ids=str,
)
def test_rotary_embedding(
    head: int, rotated: int, dtype: torch.dtype, neox: bool, custom_ops: str
) -> None:
    layer = built(custom_ops, lambda: RotaryEmbedding(head, rotated, ROWS, 1e4, neox, dtype))
    positions = torch.randint(ROWS, (7,))
    query = torch.randn(7, 4 * head + 5).to(dtype)[:, 5:]  # a slice of something wider
    key = torch.randn(7, 2 * head).to(dtype)
    wanted = [
        definition(torch.unflatten(x, -1, (-1, head)), positions, rotated, neox)
        for x in (query, key)
    ]
    # An angle of up to 96 in float32 is off by 4e-6, and elements go up to 5.
    atol = 4e-5 if dtype is torch.float32 else 0.06
    for heads in (False, True):
        q, k = (x.clone() for x in (query, key))
        if heads:
            q, k = (torch.unflatten(x, -1, (-1, head)) for x in (q, k))
        shapes = q.shape, k.shape
        found = layer(positions, q, k)
        alone, nothing = layer(positions, query.clone().view(shapes[0]))
        assert nothing is None
        for x, expected, shape in zip((*found, alone), (*wanted, wanted[0]), (*shapes, shapes[0]),
                                      strict=True):  # fmt: skip
            assert x.shape == shape
            assert x.dtype is dtype
            difference = x.double() - expected.reshape(shape)
            assert difference.abs().max() <= atol


@both_ways
@each_dtype
def test_that_of_llama(dtype: torch.dtype, custom_ops: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=ROWS)
    positions = torch.randint(ROWS, (1, 9))
    cos, sin = llama.LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions)
    query, key = torch.randn(9, 4, 64).to(dtype), torch.randn(9, 2, 64).to(dtype)
    theirs = llama.apply_rotary_pos_emb(query[None], key[None], cos, sin, unsqueeze_dim=2)
    layer = built(custom_ops, lambda: RotaryEmbedding(64, 64, ROWS, 1e4, True, dtype))
    for found, expected in zip(
        layer(positions[0], query.clone(), key.clone()), theirs, strict=True
    ):
        close(found, expected[0])
    apply = built(custom_ops, ApplyRotaryEmb)
    close(apply(query, cos[0, :, :32], sin[0, :, :32]), theirs[0][0])


@both_ways
@pytest.mark.parametrize("shape", [(2, 3), (6,)], ids=str)
@pytest.mark.parametrize("leading", [(2, 3), (6,)], ids=str)
def test_tokens_and_positions_may_be_flattened_differently(
    shape: tuple[int, ...], leading: tuple[int, ...], custom_ops: str
) -> None:
    layer = built(custom_ops, lambda: RotaryEmbedding(16, 16, ROWS, 1e4, True, torch.float32))
    positions, query = torch.randint(ROWS, (6,)), torch.randn(6, 4, 16)
    expected = definition(query, positions, 16, True).float()
    for last in ((64,), (4, 16)):
        given = query.clone().view(*leading, *last)
        found, key = layer(positions.view(shape), given, given.clone())
        close(found, expected.view(given.shape))
        close(key, expected.view(given.shape))


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda: plain()(torch.arange(5), torch.randn(6, 64)), r"\(5,\).*\(6, 64\)"),
        (lambda: mrope()(torch.zeros(2, 5).long(), torch.randn(5, 4, 32)), r"\(2, 5\)"),
        *((lambda size=size: plain(size), f"rotary_dim={size}") for size in (7, 0, 18)),
        (
            lambda: get_rope(2, TRAINED, True, {"rope_type": "dynamic", "factor": 2.0}),
            "more than 2",
        ),
    ],
)
def test_positions_and_sizes_that_do_not_fit(act: Callable[[], Any], match: str) -> None:
    with pytest.raises(LayerArgumentError, match=match):
        act()


def plain(size: int = 16) -> RotaryEmbedding:
    return RotaryEmbedding(16, size, ROWS, 1e4, True, torch.float32)


def test_the_table_is_a_buffer_in_the_dtype_that_is_not_saved() -> None:
    exact = RotaryEmbedding(16, 8, ROWS, 1e4, True, torch.float32)
    rounded = RotaryEmbedding(16, 8, ROWS, 1e4, True, torch.bfloat16)
    assert exact.cos_sin_cache.shape == (ROWS, 8)
    assert torch.equal(rounded.cos_sin_cache, exact.cos_sin_cache.bfloat16())
    assert not exact.state_dict()
    without = RotaryEmbedding(16, 8, ROWS, 1e4, True, torch.float32, init_cache=False)
    assert not [*without.buffers()]


@both_ways
@each_style
def test_apply_in_float32(neox: bool, custom_ops: str) -> None:
    x = torch.randn(2, 5, 3, 16, dtype=torch.bfloat16)
    angles = torch.rand(5, 4) * 6
    layer = built(custom_ops, lambda: ApplyRotaryEmb(False, neox, enable_fp32_compute=True))
    found = layer(x, angles.cos(), angles.sin())
    wide = built(custom_ops, lambda: ApplyRotaryEmb(False, neox))
    expected = wide(x.float(), angles.cos(), angles.sin()).bfloat16()
    torch.testing.assert_close(found, expected, atol=0, rtol=2**-8)
    assert torch.equal(found[..., 8:], x[..., 8:])


# M-RoPE


def multimodal_positions(tokens: int) -> Tensor:
    return torch.randint(ROWS, (3, tokens))


@both_ways
@pytest.mark.parametrize(
    ("name", "rotary", "section", "dtype"),
    [
        ("qwen2_vl", "Qwen2VLRotaryEmbedding", [4, 6, 6], torch.float32),
        ("qwen2_vl", "Qwen2VLRotaryEmbedding", [4, 6, 6], torch.bfloat16),
        ("qwen3_vl", "Qwen3VLTextRotaryEmbedding", [6, 5, 5], torch.float32),  # interleaved
    ],
    ids=str,
)
def test_mrope_is_that_of_transformers(
    name: str, rotary: str, section: list[int], dtype: torch.dtype, custom_ops: str
) -> None:
    module: Any = import_module(f"transformers.models.{name}.modeling_{name}")
    parameters: dict[str, Any] = {"rope_type": "default", "mrope_section": section}
    parameters |= {"rope_theta": 1e4, "mrope_interleaved": name == "qwen3_vl"}
    configs: Any = import_module(f"transformers.models.{name}.configuration_{name}")
    config = getattr(configs, f"{rotary[:7]}TextConfig")(
        hidden_size=128, num_attention_heads=4, head_dim=32, rope_parameters=parameters
    )
    positions = multimodal_positions(9)
    angles = getattr(module, rotary)(config)(torch.zeros(1, dtype=dtype), positions[:, None])
    query, key = torch.randn(9, 4, 32).to(dtype), torch.randn(9, 2, 32).to(dtype)
    heads_first = (x.transpose(0, 1)[None] for x in (query, key))
    theirs = module.apply_rotary_pos_emb(*heads_first, *angles)
    layer = built(custom_ops, lambda: get_rope(32, ROWS, True, parameters, dtype))
    for flat in (False, True):
        q, k = (x.flatten(1) if flat else x for x in (query.clone(), key.clone()))
        for found, expected in zip(layer(positions, q, k), theirs, strict=True):
            wanted = expected[0].transpose(0, 1)
            close(found, wanted.flatten(1) if flat else wanted)


def mrope(neox: bool = True) -> MRotaryEmbedding:
    return MRotaryEmbedding(32, 24, ROWS, 1e4, neox, torch.float32, [4, 4, 4])


@both_ways
@each_style
def test_text_has_one_position(neox: bool, custom_ops: str) -> None:
    layer = built(custom_ops, lambda: mrope(neox))
    plain = RotaryEmbedding(32, 24, ROWS, 1e4, neox, torch.float32)
    positions, query, key = torch.randint(ROWS, (5,)), torch.randn(5, 4, 32), torch.randn(5, 64)
    expected = plain.forward_native(positions, query, key)
    for given in (positions, positions.expand(3, 5)):
        for found, wanted in zip(layer(given, query.clone(), key.clone()), expected, strict=True):
            close(found, wanted)
    alone, nothing = layer(positions.expand(3, 5), query.clone())
    close(alone, expected[0])
    assert nothing is None


def test_native_form_never_dispatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where ``apply_rotary_emb`` is enabled and the layer is not, and the other way round."""
    ran = []
    native = ApplyRotaryEmb.forward_native

    def noted(self: ApplyRotaryEmb, *angles: Tensor) -> Tensor:
        ran.append("native")
        return native(self, *angles)

    def dispatched(self: ApplyRotaryEmb, *angles: Tensor) -> Tensor:
        ran.append("dispatched")
        return native(self, *angles)

    monkeypatch.setattr(ApplyRotaryEmb, "forward_native", noted)
    monkeypatch.setattr(ApplyRotaryEmb, "forward_cpu", dispatched)
    with compilation_config(CompilationConfig(custom_ops=["none", "+apply_rotary_emb"])):
        layer = mrope()
    arguments = multimodal_positions(5), torch.randn(5, 4, 32), torch.randn(5, 2, 32)
    layer(*arguments)
    assert ran == ["native", "native"]
    layer.forward_cuda(*arguments)
    assert ran[2:] == ["dispatched", "dispatched"]


# Dual chunk attention


def dual_chunk(chunk: int, local: int, head: int = 16, size: int = 16) -> DualChunkRotaryEmbedding:
    return DualChunkRotaryEmbedding(head, size, 4096, 1e4, True, torch.float32, chunk, local)


@both_ways
@pytest.mark.parametrize(
    ("chunk", "local", "size"), [(12, 4, 16), (12, 0, 8), (5, 4, 16), (64, 1, 8)]
)
def test_each_slot_is_a_plain_rotation(chunk: int, local: int, size: int, custom_ops: str) -> None:
    layer = built(custom_ops, lambda: dual_chunk(chunk, local, size=size))
    positions = torch.randint(1000, (9,))
    query, key = torch.randn(9, 64), torch.randn(9, 32)
    found, rotated_key = layer(positions, query, key)
    assert found.shape == (9, 5 * 64)
    length = chunk - local
    where = positions % length
    slots = [
        where,
        (where + length).clamp(max=chunk),
        torch.full_like(where, min(2 * length - 1, chunk)),
        where + length,
        where + chunk,
    ]
    for part, slot in zip(found.chunk(5, -1), slots, strict=True):
        wanted = definition(query.view(9, 4, 16), slot, size, True).float().view(9, 64)
        torch.testing.assert_close(part, wanted, atol=1e-5, rtol=0)
    wanted = definition(key.view(9, 2, 16), where, size, True).float().view(9, 32)
    torch.testing.assert_close(rotated_key, wanted, atol=1e-5, rtol=0)


@both_ways
def test_dual_chunk_of_one_token_with_an_offset(custom_ops: str) -> None:
    layer = built(custom_ops, lambda: dual_chunk(12, 4))
    query, key = torch.randn(1, 64), torch.randn(1, 32)
    found = layer(torch.tensor([3]), query, key, torch.tensor([70]))
    expected = layer(torch.tensor([73]), query, key)
    assert found[0].shape == (1, 5 * 64)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_dual_chunk_by_configuration() -> None:
    config = {"chunk_size": 12, "local_size": 4, "original_max_position_embeddings": 64}
    layer = get_rope(16, 64, dual_chunk_attention_config=config)
    assert isinstance(layer, DualChunkRotaryEmbedding)
    assert layer.cos_sin_cache.shape == (20, 16)
    with pytest.raises(LayerArgumentError, match="local_size"):
        get_rope(16, 64, dual_chunk_attention_config={"chunk_size": 12})
    with pytest.raises(LayerArgumentError, match="local_size=12"):
        dual_chunk(12, 12)


def test_a_replacement_is_built_in_place_of_the_layer() -> None:
    class Other(RotaryEmbedding):
        pass

    assert type(get_rope(16, 33)) is RotaryEmbedding
    RotaryEmbedding.register_oot(Other)
    try:
        assert type(get_rope(16, 33)) is Other
        assert type(mrope()) is MRotaryEmbedding  # a subclass is not replaced
    finally:
        del RotaryEmbedding.op_registry_oot["RotaryEmbedding"]


@pytest.mark.parametrize("kind", ["plain", "mrope", "dual"])
@pytest.mark.parametrize("change", ["bfloat16", "there and back", "meta"])
def test_what_a_model_has_cast_or_moved_is_its_own(kind: str, change: str) -> None:
    config = {"chunk_size": 12, "local_size": 4} if kind == "dual" else None
    parameters = {"mrope_section": [4, 2, 2]} if kind == "mrope" else None

    def make() -> nn.Module:
        return get_rope(16, 34, True, parameters, torch.float32, config)

    first = make()
    assert make() is first
    wanted = [table.clone() for table in first.buffers()]
    if change == "meta":
        nn.ModuleList([first]).to("meta")
    else:
        model = nn.ModuleList([first]).bfloat16()
        if change == "there and back":
            model.float()
    second = make()
    assert second is not first
    assert make() is second
    for table, expected in zip(second.buffers(), wanted, strict=True):
        assert torch.equal(table, expected)
        assert table.dtype == expected.dtype


def test_what_multimodal_rotation_is_made_of_is_asked_for() -> None:
    parameters = {"mrope_section": [4, 2, 2]}

    def method(custom_ops: list[str]) -> str:
        with compilation_config(CompilationConfig(custom_ops=custom_ops)):
            layer = get_rope(16, 35, rope_parameters=parameters, dtype=torch.float32)
        assert isinstance(layer, MRotaryEmbedding)
        return layer.apply_rotary_emb._forward_method.__name__

    assert method(["all", "-apply_rotary_emb"]) == "forward_native"
    assert method(["all"]) != "forward_native"


def test_compiles_in_one_graph() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = RotaryEmbedding(16, 16, ROWS, 1e4, True, torch.float32)
            self.multimodal = MRotaryEmbedding(16, 16, ROWS, 1e4, True, torch.float32, [4, 2, 2])

        def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
            q, k = self.plain(positions[0], query, key)
            multi: tuple[Tensor, ...] = self.multimodal(positions, q, k)
            return multi

    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    for tokens in (5, 9):
        arguments = multimodal_positions(tokens), torch.randn(tokens, 64), torch.randn(tokens, 32)
        given = [a.clone() for a in arguments]
        for dim, a in zip((1, 0, 0), given, strict=True):
            torch._dynamo.mark_dynamic(a, dim)
        for found, wanted in zip(compiled(*given), block(*arguments), strict=True):
            close(found, wanted)


# Every scaling against transformers' frequencies and magnitude.

HEAD, TRAINED = 64, 128


def scaling(rope_type: str, factor: float | None = 4.0, **options: Any) -> dict[str, Any]:
    """The parameters of a type for a model that was trained on 32 positions."""
    factors = {} if factor is None else {"factor": factor}
    trained = {"original_max_position_embeddings": 32}
    return {"rope_type": rope_type, **factors, **trained, **options}


PARAMETERS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": scaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": scaling("yarn"),
    "yarn-betas": scaling("yarn", beta_fast=8.0, beta_slow=2.0, truncate=False),
    "yarn-step": scaling("yarn", 2.0, beta_fast=1e9, beta_slow=1e9),
    "yarn-deepseek": scaling("yarn", 40.0, mscale=0.707, mscale_all_dim=1.0),
    "yarn-factor": scaling("yarn", attention_factor=1.7),
    "proportional": {"rope_type": "proportional", "factor": 2.0},
    "longrope-short": scaling(
        "longrope",
        None,
        short_factor=[1.0 + 0.1 * i for i in range(HEAD // 2)],
        long_factor=[2.0 + 0.3 * i for i in range(HEAD // 2)],
    ),
}
PARAMETERS["dynamic-longer"] = PARAMETERS["dynamic"]
PARAMETERS["longrope-long"] = PARAMETERS["longrope-short"]
PARAMETERS["longrope-factor"] = {**PARAMETERS["longrope-short"], "attention_factor": 1.25}


def hugging_face(
    parameters: dict[str, Any], length: int | None, share: float, theta: float
) -> tuple[Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        head_dim=HEAD,
        max_position_embeddings=TRAINED,
        rope_parameters={**parameters, "rope_theta": theta, "partial_rotary_factor": share},
    )
    found: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        config, torch.device("cpu"), seq_len=length
    )
    return found


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize(("share", "theta"), [(1.0, 5e5), (0.5, 1e4)])
def test_frequencies_and_table(name: str, share: float, theta: float) -> None:
    parameters = dict(PARAMETERS[name])
    size = HEAD if name == "proportional" else int(HEAD * share)
    for key in ("short_factor", "long_factor"):
        if key in parameters:
            parameters[key] = parameters[key][: size // 2]
    longest = {"longrope-short": 16, "dynamic-longer": 3 * TRAINED}.get(name, TRAINED)
    frequencies, magnitude = hugging_face(parameters, longest, share, theta)
    given = {**parameters, "rope_theta": theta, "partial_rotary_factor": share}
    layer = get_rope(HEAD, TRAINED, True, given, torch.float32, max_model_len=longest)
    assert isinstance(layer, RotaryEmbedding)
    assert layer.rotary_dim == size
    assert layer.scaling.magnitude == pytest.approx(magnitude)
    found = layer.scaling.frequencies(size, theta)
    torch.testing.assert_close(found, frequencies, atol=0, rtol=1e-6)
    angles = torch.outer(torch.arange(len(layer.cos_sin_cache)).double(), frequencies.double())
    expected = torch.cat((angles.cos(), angles.sin()), -1) * magnitude
    torch.testing.assert_close(layer.cos_sin_cache.double(), expected, atol=2e-4, rtol=0)
    assert len(layer.cos_sin_cache) >= max(TRAINED, longest)


@pytest.mark.parametrize("name", ["plain", "linear", "dynamic", "llama3", "yarn"])
def test_rows_suffice_for_the_stretched_context(name: str) -> None:
    rows = {"plain": 128, "linear": 512, "dynamic": 128, "llama3": 128, "yarn": 128}
    layer = get_rope(HEAD, TRAINED, True, PARAMETERS.get(name), torch.float32)
    assert len(layer.cos_sin_cache) == rows[name]


# The types that transformers does not have, with the frequency of pair i of 32 and the magnitude.
# In float64, from the formulas of the sources.
VLLM: dict[str, tuple[dict[str, Any], Callable[[int], float], float]] = {
    "ntk": ({"factor": 4.0}, lambda i: (4e4) ** (-i / 32) * 4.0 ** (-1 / 32), 1.0),
    "ntk mixed": (
        {"factor": 4.0, "mixed_b": 0.6},
        lambda i: 1e4 ** (-i / 32) * 4.0 ** -(((i + 1) / 32) ** 0.6),
        1.0,
    ),
    "dynamic alpha": ({"alpha": 50.0}, lambda i: (1e4 * 50.0 ** (64 / 62)) ** (-i / 32), 1.0),
    "dynamic trained": (
        {"factor": 2.0, "max_trained_positions": 64},
        lambda i: (1e4 * 3.0 ** (64 / 62)) ** (-i / 32),  # 2 * 128 / 64 - 1
        1.0,
    ),
}


@pytest.mark.parametrize("name", VLLM)
def test_types_of_vllm(name: str) -> None:
    parameters, frequency, magnitude = VLLM[name]
    layer = get_rope(HEAD, TRAINED, True, {"rope_type": name.split()[0], **parameters})
    assert isinstance(layer, RotaryEmbedding)
    expected = torch.tensor([frequency(i) for i in range(HEAD // 2)])
    torch.testing.assert_close(layer.scaling.frequencies(HEAD, 1e4), expected, atol=0, rtol=1e-5)
    assert layer.scaling.magnitude == magnitude
    assert len(layer.cos_sin_cache) == TRAINED


@pytest.mark.parametrize("kind", ["deepseek_yarn", "deepseek_llama_scaling"])
@pytest.mark.parametrize(
    ("weights", "magnitude"),
    [
        ({}, 0.1 * math.log(40) + 1),
        ({"mscale": 0.5}, 0.05 * math.log(40) + 1),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
    ],
)
def test_yarn_of_deepseek(kind: str, weights: dict[str, float], magnitude: float) -> None:
    rest = {"factor": 40.0, "original_max_position_embeddings": 32}
    layer = get_rope(HEAD, TRAINED, True, {"rope_type": kind, **rest, **weights})
    plain = get_rope(HEAD, TRAINED, True, {"rope_type": "yarn", **rest})
    assert isinstance(layer, RotaryEmbedding)
    assert isinstance(plain, RotaryEmbedding)
    assert layer.scaling.magnitude == pytest.approx(magnitude)
    assert layer.scaling.frequencies(64, 1e4).equal(plain.scaling.frequencies(64, 1e4))
    assert len(layer.cos_sin_cache) == 1280


def test_every_type_is_tested() -> None:
    tested = {p["rope_type"] for p in PARAMETERS.values()} | {"default", "mrope"}
    tested |= {name.split()[0] for name in VLLM} | {"deepseek_yarn", "deepseek_llama_scaling"}
    assert set(ROPE_TYPES) == tested


def test_the_older_key_means_the_same() -> None:
    old = get_rope(HEAD, 64, True, {"type": "linear", "factor": 2.0})
    assert old is get_rope(HEAD, 64, True, {"rope_type": "linear", "factor": 2.0})


def test_frequencies_one_by_one() -> None:
    found = Scaling().frequencies(8, 100.0)
    assert found.tolist() == pytest.approx([100.0 ** (-2 * i / 8) for i in range(4)])
    longrope = LongRopeScaling((1.0, 2.0), 1.0, 32)
    assert longrope.magnitude == 1.0
    assert longrope.frequencies(4, 1e4).tolist() == pytest.approx([1.0, 0.005])


def test_yarn_without_a_factor_takes_the_quotient_of_the_contexts() -> None:
    parameters = {"rope_type": "yarn", "original_max_position_embeddings": 32}
    layer = get_rope(HEAD, TRAINED, True, parameters)
    assert isinstance(layer, RotaryEmbedding)
    assert layer.scaling.magnitude == pytest.approx(0.1 * math.log(4.0) + 1)


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"rope_type": "yarm"}, "'yarm'.*yarn"),
        ({"rope_type": "linear"}, "'linear': factor.*None"),
        ({"rope_type": "linear", "factor": -1.0}, "factor.*-1.0"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        (scaling("llama3", low_freq_factor=4, high_freq_factor=4), "less than"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 8}, "long_factor"),
        ({"rope_type": "ntk"}, "'ntk': factor.*None"),
        ({"rope_type": "dynamic", "alpha": 0}, "'dynamic': alpha.*0"),
        (scaling("deepseek_yarn", mscale="1"), "mscale.*'1'"),
        (scaling("longrope", None, long_factor=[1.0]), "1 factors.*32"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor.*0.0"),
        ({"rope_theta": "big"}, "rope_theta.*'big'"),
        ({"rope_dim": 7}, "rotary_dim=7"),
        ({"rope_dim": 66}, "rotary_dim=66"),
        ({"mrope_section": [16, 16]}, "mrope_section"),
        ({"mrope_section": [16, 8, 9]}, "mrope_section"),
        ({"mrope_section": "abc"}, "mrope_section must be a list of integers, found 'abc'"),
        ({"mrope_section": [16, 8, 8], "mrope_interleaved": 1}, "mrope_interleaved must be true"),
        ({**PARAMETERS["longrope-long"], "attention_factor": "1"}, "attention_factor.*'1'"),
    ],
)
def test_mistakes(parameters: dict[str, Any], match: str) -> None:
    with pytest.raises(LayerArgumentError, match=match):
        get_rope(HEAD, TRAINED, True, parameters)


def test_the_same_arguments_give_the_same_layer() -> None:
    one = get_rope(HEAD, 77, True, {"rope_theta": 1e4}, torch.float32)
    assert one is get_rope(HEAD, 77)
    assert one is not get_rope(HEAD, 77, False)
    assert one is not get_rope(HEAD, 77, dtype=torch.bfloat16)
    with torch.device("meta"):
        other = get_rope(HEAD, 77)
    assert other is not one
    assert other.cos_sin_cache.is_meta


def test_yarn_goes_with_mrope() -> None:
    parameters = {**PARAMETERS["yarn"], "mrope_section": [16, 8, 8]}
    layer = get_rope(HEAD, TRAINED, True, parameters)
    assert isinstance(layer, MRotaryEmbedding)
    assert layer.scaling.magnitude > 1
