"""State-space mixers equal those of transformers, with any batching and number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from layers.mixers import HIDDEN, PAIRS, PLAMO2, load, plamo2, randomized
from layers.switch import ranks
from opweave import ir
from opweave.layers import (
    DuplicateLayerError,
    LayerArgumentError,
    MambaMixer,
    MambaMixer2,
    SequenceStates,
    ShardingError,
    StateCache,
    StatefulLayer,
    TensorParallel,
    WeightLoadError,
    sequence_states,
    stateful_layers,
    tensor_parallel,
)

EVERY = [*PAIRS, "plamo2"]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def ours(kind: str, **options: Any) -> StatefulLayer:
    """A mixer of that kind with random weights."""
    if kind == "plamo2":
        layer = randomized(plamo2(**options))
        layer.A.copy_(-torch.rand_like(layer.A) - 0.1)
        return layer
    pair = PAIRS[kind]()
    return load(pair.make(**options), randomized(pair.theirs).state_dict())


def near(found: Tensor, wanted: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("kind", PAIRS)
def test_mixers_are_those_of_transformers(kind: str) -> None:
    pair = PAIRS[kind]()
    theirs = randomized(pair.theirs)
    layer = load(pair.make(), theirs.state_dict())
    hidden = torch.randn(11, HIDDEN)
    wanted = theirs(hidden[None])[0]
    assert wanted.std() > 0.03
    near(layer(hidden), wanted)


def bfloat16_errors(kind: str) -> Tensor:
    """How far our mixer is from float32 with the same weights, and how far transformers' is."""
    pair = PAIRS[kind]()
    theirs = randomized(pair.theirs).to(torch.bfloat16)
    layer = load(pair.make(params_dtype=torch.bfloat16), theirs.state_dict())
    hidden = torch.randn(11, HIDDEN).to(torch.bfloat16)
    results = [layer(hidden), theirs(hidden[None])[0]]
    assert all(result.dtype == torch.bfloat16 for result in results)
    exact = theirs.float()(hidden[None].float())[0]
    return torch.stack([(result.float() - exact).norm() for result in results]) / exact.norm()


@pytest.mark.parametrize("kind", ["jamba", "mamba2"])
def test_bfloat16(kind: str) -> None:
    # Medians: weights drawn at random lose much to rounding now and then, in either mixer.
    ours, others = torch.stack([bfloat16_errors(kind) for _ in range(16)]).median(0).values
    assert ours < 0.02
    assert ours < 1.25 * others  # ours rounds less often


def steps(layer: StatefulLayer, hidden: Tensor, sizes: list[int], cache: StateCache) -> Tensor:
    """One sequence in slot 2, in pieces."""
    results, known = [], 0
    for part in hidden.split(sizes):
        with sequence_states(SequenceStates.of([len(part)], [known], [2], cache)):
            results.append(layer(part))
        known += len(part)
    return torch.cat(results)


@pytest.mark.parametrize("kind", EVERY)
def test_split_prefill_and_decoding_equal_one_prefill(kind: str) -> None:
    layer, hidden = ours(kind), torch.randn(11, HIDDEN)
    whole = layer(hidden)
    for sizes in ([11], [5, 6], [4, 3, 1, 1, 1, 1], [1] * 11):
        near(steps(layer, hidden, sizes, StateCache(4)), whole)


@pytest.mark.parametrize(
    ("kind", "provider"),
    [(kind, "aten") for kind in EVERY]
    + [(kind, other) for kind in ("mamba", "mamba2") for other in ("native", "batch_invariant")],
)
def test_packed_sequences_equal_each_alone(kind: str, provider: str) -> None:
    layer, cache = ours(kind), StateCache(6)
    lengths, slots = [8, 7, 5, 9], [4, 0, 5, 2]
    hidden = [torch.randn(n, HIDDEN) for n in lengths]
    ops = ("causal_conv1d", "selective_scan", "selective_state_update", "ssd_chunk_scan")
    with ir.priority({op: [provider] for op in ops}):
        alone = [layer(h) for h in hidden]
        done = [0, 0, 0, 0]
        # Decodes and prefills in one forward, some sequences not in it, and padding at the end.
        for news in ([3, 7, 0, 0], [1, 0, 4, 0], [1, 0, 1, 8], [3, 0, 0, 1]):
            order = sorted((i for i in range(4) if news[i]), key=lambda i: news[i] != 1)
            tokens = [hidden[i][done[i] : done[i] + news[i]] for i in order]
            states = SequenceStates.of(
                [news[i] for i in order], [done[i] for i in order], [slots[i] for i in order], cache
            )
            with sequence_states(states):
                found = layer(torch.cat([*tokens, torch.randn(2, HIDDEN)]))
            assert found.shape == (sum(news) + 2, HIDDEN)
            for i, part in zip(order, found.split([*(news[i] for i in order), 2]), strict=False):
                near(part, alone[i][done[i] : done[i] + news[i]])
                done[i] += news[i]
    assert done == lengths


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(("mamba2", 2), ("mamba", 4), ("jamba", 2), ("bamba", 2), ("bamba", 4)),
        ("short_conv_biased", 4),
    ],
)
def test_tensor_parallel_equals_one_rank(kind: str, size: int) -> None:
    pair = PAIRS[kind]()
    weights, hidden = randomized(pair.theirs).state_dict(), torch.randn(9, HIDDEN)
    whole = load(pair.make(), weights)

    def run(rank: int, layer: StatefulLayer) -> Tensor:
        load(layer, weights)
        assert {k: s[0] * size for k, s in layer.state_shapes.items() if k == "ssm"} == {
            k: s[0] for k, s in whole.state_shapes.items() if k == "ssm"
        }
        # A tensor that already is this rank's shard is loaded too.
        load(layer, {**weights, "D": layer.D.clone()} if "D" in weights else weights)
        return steps(layer, hidden, [7, 1, 1], StateCache(3))

    found = ranks(size, pair.make, run)
    for part in found:
        near(part, whole(hidden))


def test_plamo2_is_its_formula() -> None:
    """Mamba's projections and norms around the recurrence of Mamba-2, written out."""
    layer: Any = ours("plamo2")
    hidden, heads, size = torch.randn(9, HIDDEN), 4, 6
    gate, x = functional.linear(hidden, layer.in_proj.weight).chunk(2, -1)
    padded = torch.cat((torch.zeros(3, heads * size), x))
    x = functional.silu(sum(padded[j : j + 9] * layer.conv1d.weight[:, 0, j] for j in range(4)))
    projected = functional.linear(x, layer.bcdt_proj.weight).split([5, 5, 64], -1)
    b, c, dt = (
        functional.rms_norm(t, t.shape[-1:], norm.weight, 1e-4)
        for t, norm in zip(projected, (layer.B_norm, layer.C_norm, layer.dt_norm), strict=True)
    )
    dt = functional.softplus(functional.linear(dt, layer.dt_proj.weight) + layer.dt_bias)
    h, results = torch.zeros(heads, size, 5), []
    for t in range(9):
        u, step = x[t].view(heads, size), dt[t][:, None]
        h = torch.exp(step * layer.A[:, None])[..., None] * h + (step * u)[..., None] * b[t]
        results.append((h @ c[t] + layer.D[:, None] * u).flatten())
    y = torch.stack(results) * functional.silu(gate)
    near(layer(hidden), functional.linear(y, layer.out_proj.weight))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_plamo2_takes_the_heads_of_in_proj_apart(size: int) -> None:
    whole: Any = ours("plamo2")
    weights, hidden = {n: p.clone() for n, p in whole.named_parameters()}, torch.randn(5, HIDDEN)
    heads, width = PLAMO2.mamba_num_heads, PLAMO2.hidden_size_per_head
    gate, x = weights["in_proj.weight"].unflatten(0, (2, heads, width)).unbind()
    weights["in_proj.weight"] = torch.cat([torch.cat(pair) for pair in zip(gate, x, strict=True)])
    weights["A_log"] = torch.log(-weights.pop("A"))

    def run(rank: int, layer: Any) -> Tensor:
        load(layer, weights)
        rows = weights["in_proj.weight"].chunk(size)[rank]
        kept = layer.in_proj.weight.clone()
        layer.in_proj.weight.weight_loader(layer.in_proj.weight, rows)
        assert torch.equal(layer.in_proj.weight, kept)
        result: Tensor = layer(hidden)
        return result

    for found in ranks(size, plamo2, run):
        near(found, whole(hidden))
    with pytest.raises(WeightLoadError, match=r"in_proj.*weight"):
        whole.in_proj.weight.weight_loader(whole.in_proj.weight, torch.randn(7, HIDDEN))


def test_states_are_those_of_their_slots() -> None:
    layer, cache = ours("short_conv"), StateCache(5)
    with sequence_states(SequenceStates.of([5], [0], [3], cache)):
        layer(torch.randn(5, HIDDEN))
    shape = layer.state_shapes["conv"]
    state = cache.get(layer.prefix, "conv", shape, torch.float32, "cpu").clone()
    assert state.shape == (5, HIDDEN, 2)
    assert state[3].abs().min() > 0
    assert not state[[0, 1, 2, 4]].any()
    with sequence_states(SequenceStates.of([1, 1], [5, 2], [3, 1], cache)):
        layer(torch.randn(2, HIDDEN))
    after = cache.get(layer.prefix, "conv", shape, torch.float32, "cpu")
    assert (after[[1, 3]] != state[[1, 3]]).any(-1).all()
    assert not after[[0, 2, 4]].any()


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "plamo2"])
def test_a_mixer_is_one_graph_for_every_batching(kind: str) -> None:
    layer, hidden = ours(kind), torch.randn(9, HIDDEN)
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    near(compiled(hidden), layer(hidden))
    near(steps(compiled, hidden, [6, 3], StateCache(3)), layer(hidden))


def test_states_keep_the_precision_of_a_scan() -> None:
    layer, cache = ours("mamba2", params_dtype=torch.bfloat16), StateCache(1)
    with sequence_states(SequenceStates.of([3], [0], [0], cache)):
        layer(torch.randn(3, HIDDEN).to(torch.bfloat16))
    kinds = {kind: state.dtype for (_, kind), state in cache._states.items()}
    assert kinds == {"conv": torch.bfloat16, "ssm": torch.float32}


def test_donated_tensors_are_not_read_again() -> None:
    settings = ir.current_registry().settings
    settings.check_donation = True
    try:
        for kind in EVERY:
            layer, hidden = ours(kind), torch.randn(7, HIDDEN)
            with ir.priority(causal_conv1d="native", ssd_chunk_scan="native"):
                near(steps(layer, hidden, [4, 2, 1], StateCache(3)), layer(hidden))
    finally:
        settings.check_donation = False


def test_layers_of_one_model_have_names_of_their_own() -> None:
    with stateful_layers() as layers:
        first, second = ours("mamba", prefix="model.0"), ours("mamba2", prefix="model.1")
        assert layers == {"model.0": first, "model.1": second}
        with pytest.raises(DuplicateLayerError, match=r"'model\.0'.*own prefix"):
            ours("short_conv", prefix="model.0")
    again = ours("mamba", prefix="model.0")  # another model
    assert again.prefix == first.prefix
    assert ours("mamba").prefix != ours("mamba").prefix


def test_mistakes() -> None:
    sizes = {"use_conv_bias": True, "use_bias": False}
    with pytest.raises(LayerArgumentError, match="make 24 channels, but intermediate_size=32"):
        MambaMixer2(16, 4, 4, 32, **sizes, num_heads=8, head_dim=3)
    with pytest.raises(LayerArgumentError, match="n_groups=3 does not divide num_heads=8"):
        MambaMixer2(16, 4, 4, 32, **sizes, num_heads=8, head_dim=4, n_groups=3)
    three = TensorParallel(0, 3, all_reduce=lambda x: x, all_gather=lambda x, dim=-1: x)
    with tensor_parallel(three):
        with pytest.raises(ShardingError, match=r"output_sizes\[0\]=32"):
            MambaMixer(16, 4, 4, 32, 3, True, False, False)
        with pytest.raises(ShardingError, match="num_heads=8"):
            MambaMixer2(16, 4, 4, 32, **sizes, num_heads=8, head_dim=4)
    four = TensorParallel(0, 4, all_reduce=lambda x: x, all_gather=lambda x, dim=-1: x)
    with tensor_parallel(four), pytest.raises(ShardingError, match="n_groups=2"):
        MambaMixer2(16, 4, 4, 32, **sizes, num_heads=8, head_dim=4, n_groups=2)
    with pytest.raises(LayerArgumentError, match="2 new_tokens, 1 known_tokens and 2 slots"):
        SequenceStates.of([1, 1], [0], [0, 1], StateCache(2))
    with pytest.raises(LayerArgumentError, match="num_slots=-1"):
        StateCache(-1)
    layer: Any = ours("mamba")
    with pytest.raises(WeightLoadError, match=r"A is loaded .*\(3, 4\); it takes \(32, 4\)"):
        layer.A.weight_loader(layer.A, torch.randn(3, 4))
