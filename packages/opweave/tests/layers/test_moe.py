"""The mixture of experts as layers: routing, methods, weight loading, the sum over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from opweave import ir
from opweave.layers import (
    FusedMoE,
    FusedMoEMethod,
    FusedMoEModularMethod,
    GroupedTopk,
    TransformersFusedMoE,
    UnquantizedFusedMoEMethod,
)
from opweave.layers.moe import ModularKernel, OpExperts
from opweave.layers.moe_routing import ExpertPlacement, Router
from opweave.layers.parallel import TensorParallel, tensor_parallel
from opweave.layers.registry import LayerArgumentError, ShardingError, WeightLoadError

E, K, H, SIZE = 6, 2, 24, 12


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def filled(layer: nn.Module) -> Any:
    for parameter in layer.parameters():
        parameter.normal_(std=0.3)
    return layer


def rank_of(rank: int, size: int) -> TensorParallel:
    """A rank whose collectives do nothing: the test adds the parts up itself."""
    return TensorParallel(
        rank, size, all_reduce=lambda x: x.clone(), all_gather=lambda x, dim=-1: x
    )


def moe(**options: Any) -> FusedMoE:
    return FusedMoE(**{"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": SIZE,
                       **options})  # fmt: skip


def tokens(count: int = 9, experts: int = E) -> tuple[Tensor, Tensor]:
    return torch.randn(count, H), torch.randn(count, experts)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


# Routing


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_grouped_topk(enabled: bool, scoring: str) -> None:
    layer = GroupedTopk(3, True, 4, 2, scoring, 2.5, enforce_enable=enabled)
    x, logits, bias = torch.randn(7, 5), torch.randn(7, 16), torch.randn(16)
    for given in (None, bias):
        wanted = ir.ops.grouped_topk.native(logits, 3, 4, 2, True, scoring, 2.5, given)
        found = layer(x, logits, given)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
    with pytest.raises(LayerArgumentError, match="7 tokens, but logits of 6"):
        layer(x, logits[:6])


def test_no_groups_and_shared_experts() -> None:
    logits = torch.randn(5, 16)
    layer = GroupedTopk(3, True, scoring_func="sigmoid", num_fused_shared_experts=2)
    weights, ids = layer(logits, logits)
    plain = ir.ops.topk_sigmoid(logits, 3, True)
    assert torch.equal(weights, torch.cat([plain[0], torch.ones(5, 2)], 1))
    assert ids.tolist() == [[*row, 16, 17] for row in plain[1].tolist()]
    assert ids.dtype is torch.int32


def test_ways_to_route() -> None:
    x, logits = tokens()
    bias = torch.randn(E)
    cases: list[tuple[dict[str, Any], tuple[Tensor, Tensor]]] = [
        ({}, ir.ops.topk_softmax(logits, K, True)),
        ({"renormalize": False}, ir.ops.topk_softmax(logits, K)),
        ({"scoring_func": "sigmoid"}, ir.ops.topk_sigmoid(logits, K, True)),
        (
            {"scoring_func": "sqrtsoftplus", "e_score_correction_bias": bias},
            ir.ops.topk_sqrtsoftplus(logits, K, True, bias),
        ),
        (
            {"e_score_correction_bias": bias, "routed_scaling_factor": 2.0},
            ir.ops.topk_softmax(logits, K, True, bias, 2.0),
        ),
        (
            {"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 2,
             "scoring_func": "sigmoid", "e_score_correction_bias": bias,
             "routed_scaling_factor": 2.5},
            ir.ops.grouped_topk(logits, K, 3, 2, True, "sigmoid", 2.5, bias),
        ),
    ]  # fmt: skip
    for options, wanted in cases:
        layer = filled(moe(**options))
        found = layer.select_experts(x, logits)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
        expected = ir.ops.fused_experts(x, layer.w13_weight, layer.w2_weight, *wanted)
        assert_near(layer(x, logits), expected)
        assert "e_score_correction_bias" not in "".join(layer.state_dict())


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_routing_runs_what_the_platform_prefers(scoring: str) -> None:
    op, (x, logits) = getattr(ir.ops, f"topk_{scoring}"), tokens()
    layer = filled(moe(scoring_func=scoring))
    assert op.get_priority()[-1] == "native"
    for preferred in (op.get_priority(), ["batch_invariant", "native"]):
        with op.set_priority(preferred), ir.record() as record:
            layer(x, logits)
        assert record.selected_impls[op.name] == {preferred[0]: 1}
        assert {name for name in record.selected_impls if "topk" in name} == {op.name}


def test_a_routing_function_of_ones_own() -> None:
    def first(x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        ids = torch.arange(top_k).expand(len(x), top_k)
        return torch.full(ids.shape, 0.5, dtype=torch.bfloat16), ids

    x, logits = tokens()
    layer = filled(moe(custom_routing_function=first, routed_scaling_factor=3.0))
    weights, ids = layer.select_experts(x, logits)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert (weights == 1.5).all()
    assert layer(x, logits).shape == x.shape


# Methods


class Loud(UnquantizedFusedMoEMethod):
    """Says that it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward_native(self, *args: Any) -> Tensor:
        self.calls += 1
        return super().forward_native(*args)


class Config:
    def __init__(self, method: object) -> None:
        self.method, self.prefixes = method, [""]

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        self.prefixes.append(prefix)
        return self.method


def test_a_quant_config_chooses_the_method() -> None:
    method, (x, logits) = Loud(), tokens()
    config = Config(method)
    layer = filled(moe(quant_config=config, prefix="model.layers.0.mlp"))
    assert layer.quant_method is method
    assert config.prefixes == ["", "model.layers.0.mlp"]
    layer(x, logits)
    assert method.calls == 1
    assert isinstance(moe(quant_config=Config(None)).quant_method, UnquantizedFusedMoEMethod)
    with pytest.raises(LayerArgumentError, match="must be a FusedMoEMethod"):
        moe(quant_config=Config("fp8"))


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_modular_method_computes_the_same(activation: str, dtype: torch.dtype) -> None:
    layer = filled(moe(activation=activation, has_bias=True, params_dtype=dtype))
    x, logits = tokens()
    x = x.to(dtype)
    plain = layer(x, logits)
    layer.quant_method = FusedMoEModularMethod.make(layer)
    assert torch.equal(layer(x, logits), plain)
    assert torch.equal(layer(x[:0], logits[:0]), plain[:0])
    weights, ids = layer.select_experts(x, logits)
    ids[0], ids[1, 0] = -1, E  # no experts
    method = layer.quant_method
    old = method.old_quant_method
    assert torch.equal(method(layer, x, weights, ids), old(layer, x, weights, ids))
    assert method.method_name == old.method_name == "UnquantizedFusedMoEMethod"
    assert method.quant_config is None
    with pytest.raises(NotImplementedError, match="another method has created"):
        method.create_weights(layer, None)


def test_the_modular_method_with_weights_on_the_input_and_parts() -> None:
    x, logits = tokens()
    layer = filled(moe(top_k=1, apply_router_weight_on_input=True, renormalize=False))
    plain = layer(x, logits)
    layer.quant_method = FusedMoEModularMethod.make(layer)
    assert torch.equal(layer(x, logits), plain)
    with tensor_parallel(rank_of(1, 2)):
        part = filled(moe(ep_size=2, has_bias=True))
    plain = part(x, logits)
    part.quant_method = FusedMoEModularMethod.make(part)
    assert torch.equal(part(x, logits), plain)


def test_steps_of_the_kernel_can_be_exchanged() -> None:
    class Doubled(OpExperts):
        def apply(self, layer: FusedMoE, routed: Any) -> Tensor:
            return 2 * super().apply(layer, routed)

    x, logits = tokens()
    layer = filled(moe())
    plain = layer(x, logits)
    layer.quant_method = FusedMoEModularMethod.make(layer, ModularKernel(experts=Doubled()))
    torch.testing.assert_close(layer(x, logits), 2 * plain)


def test_modules_can_be_initialized_the_usual_way() -> None:
    seen: list[nn.Module] = []
    moe().apply(seen.append)
    assert any(isinstance(m, FusedMoEMethod) for m in seen)
    with pytest.raises(NotImplementedError, match="FusedMoEMethod creates no weights"):
        FusedMoEMethod().create_weights(moe(), None)  # type: ignore[arg-type]


# The layer


def test_shared_experts_and_activation_constants() -> None:
    x, logits = tokens()
    shared = nn.Linear(H, H)
    layer = filled(moe(shared_experts=shared))
    weights, ids = layer.select_experts(x, logits)
    routed = ir.ops.fused_experts(x, layer.w13_weight, layer.w2_weight, weights, ids)
    assert_near(layer(x, logits), routed + shared(x))
    clamped = filled(moe(activation="swigluoai", alpha=1.0, beta=0.0, limit=0.5))
    wanted = ir.ops.fused_experts(
        x, clamped.w13_weight, clamped.w2_weight, weights, ids, "swigluoai",
        alpha=1.0, beta=0.0, limit=0.5,
    )  # fmt: skip
    assert_near(clamped(x, logits), wanted)


INVALID: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"use_grouped_topk": True}, LayerArgumentError, "num_expert_group and topk_group"),
    ({"use_grouped_topk": True, "num_expert_group": 2}, LayerArgumentError, "topk_group=None"),
    ({"scoring_func": "tanh"}, LayerArgumentError, "'tanh' is not one of softmax, sigmoid"),
    ({"activation": "tanh"}, ValueError, "'tanh'.*silu, gelu"),
    ({"apply_router_weight_on_input": True}, LayerArgumentError, "top_k=2"),
    ({"expert_placement_strategy": "random"}, LayerArgumentError, "not one of linear, round_robin"),
    ({"ep_size": 2}, ShardingError, "ep_size=2 does not divide the 1 ranks"),
    ({"ep_size": 0}, LayerArgumentError, "ep_size=0"),
]


@pytest.mark.parametrize("case", range(len(INVALID)))
def test_errors(case: int) -> None:
    options, error, match = INVALID[case]
    with pytest.raises(error, match=match):
        moe(**options)


@pytest.mark.parametrize("shape", [(5, E - 1), (5, E + 1), (4, E), (E,), (1, 5, E)])
def test_logits_of_other_experts_or_tokens(shape: tuple[int, ...]) -> None:
    layer = moe()
    with pytest.raises(LayerArgumentError, match=r"router_logits must have shape \(5, 6\).*found"):
        layer(torch.randn(5, H), torch.randn(shape))


def test_an_intermediate_size_that_ranks_cannot_share() -> None:
    with (
        tensor_parallel(rank_of(0, 5)),
        pytest.raises(ShardingError, match=r"intermediate_size=12.*5 ranks"),
    ):
        moe()
    with pytest.raises(LayerArgumentError, match="not one of softmax"):
        Router(2, scoring_func="max")


# Placement


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize(("experts", "ranks"), [(6, 3), (7, 3), (8, 3), (2, 4), (5, 1)])
def test_every_expert_has_one_place(strategy: str, experts: int, ranks: int) -> None:
    seen, sizes = [], []
    for rank in range(ranks):
        placement = ExpertPlacement.of(experts, rank_of(rank, ranks), ranks, strategy)
        local, where = placement.local_experts, placement.expert_map()
        seen += local
        sizes.append(len(local))
        if ranks == 1:
            assert where is None
            continue
        assert where is not None
        assert where.dtype is torch.int32
        assert where.tolist() == [local.index(e) if e in local else -1 for e in range(experts)]
        if strategy == "round_robin":
            assert list(local) == list(range(rank, experts, ranks))
        else:
            assert list(local) == list(range(local[0], local[-1] + 1)) if local else True
    assert sorted(seen) == list(range(experts))
    assert sizes == sorted(sizes, reverse=True)  # the first have one more
    assert max(sizes) - min(sizes) <= 1


# Weights and ranks


def checkpoint(activation: str = "silu", bias: bool = True) -> dict[str, Tensor]:
    """The weights of one layer as they are for all ranks, in the form of the parameters."""
    rows = SIZE if activation.endswith("no_mul") else 2 * SIZE
    whole = {"w13_weight": torch.randn(E, rows, H) / 4, "w2_weight": torch.randn(E, H, SIZE) / 3}
    if bias:
        whole |= {"w13_bias": torch.randn(E, rows), "w2_bias": torch.randn(E, H)}
    return whole


def load_fused(layer: FusedMoE, whole: dict[str, Tensor]) -> None:
    for name, tensor in whole.items():
        parameter = getattr(layer, name)
        assert parameter.weight_loader(parameter, tensor, name.partition("_")[0])


def load_each(layer: FusedMoE, whole: dict[str, Tensor], interleaved: bool) -> set[int]:
    """One tensor per expert and product, as most checkpoints have them."""
    here = set()
    for name, tensor in whole.items():
        parameter = getattr(layer, name)
        for expert, value in enumerate(tensor):
            parts = {"w2": value}
            if name.startswith("w13"):
                halves = (value[0::2], value[1::2]) if interleaved else value.chunk(2)
                parts = dict(zip(("w1", "w3"), halves, strict=True))
            for shard, part in parts.items():
                if layer.weight_loader(parameter, part, shard, expert):
                    here.add(expert)
    return here


@pytest.mark.parametrize(
    ("size", "ep_size", "activation", "strategy"),
    [
        (1, 1, "swigluoai", "linear"),
        (2, 1, "relu2_no_mul", "linear"),
        (2, 2, "silu", "round_robin"),
        (4, 2, "swigluoai", "round_robin"),
        (4, 2, "silu", "linear"),
        (6, 6, "relu2_no_mul", "linear"),
    ],
)
def test_the_parts_of_all_ranks_add_up(
    size: int, ep_size: int, activation: str, strategy: str
) -> None:
    whole, (x, logits) = checkpoint(activation), tokens()
    options = {"activation": activation, "has_bias": True}
    full = moe(**options)
    load_fused(full, whole)
    assert torch.equal(full.w13_weight, whole["w13_weight"])
    total = torch.zeros_like(x)
    for rank in range(size):
        with tensor_parallel(rank_of(rank, size)):
            part = moe(**options, ep_size=ep_size, expert_placement_strategy=strategy)
        load_fused(filled(part), whole)
        total += part(x, logits)
        if activation != "relu2_no_mul":
            with tensor_parallel(rank_of(rank, size)):
                other = moe(**options, ep_size=ep_size, expert_placement_strategy=strategy)
            here = load_each(filled(other), whole, activation == "swigluoai")
            assert here == set(part.placement.local_experts)
            for name, value in part.state_dict().items():
                assert torch.equal(value, other.state_dict()[name])
        # A tensor that already is this rank's shard is loaded unchanged.
        with tensor_parallel(rank_of(rank, size)):
            again = filled(moe(**options, ep_size=ep_size, expert_placement_strategy=strategy))
        load_fused(again, dict(part.named_parameters()))
        assert torch.equal(again.w2_weight, part.w2_weight)
    assert_near(total, full(x, logits))


def test_the_sum_over_ranks_is_asked_for_once() -> None:
    calls: list[Tensor] = []

    def all_reduce(x: Tensor) -> Tensor:
        calls.append(x)
        return 2 * x

    parallel = TensorParallel(0, 2, all_reduce=all_reduce, all_gather=lambda x, dim=-1: x)
    x, logits = tokens()
    with tensor_parallel(parallel):
        reduced, partial = filled(moe()), moe(reduce_results=False)
    partial.load_state_dict(reduced.state_dict())
    assert_near(reduced(x, logits), 2 * partial(x, logits))
    assert len(calls) == 1
    assert_near(partial.all_reduce(partial(x, logits)), reduced(x, logits))


def test_transposed_weights() -> None:
    whole = checkpoint("swigluoai")
    layer = moe(activation="swigluoai", has_bias=True)
    for name, tensor in whole.items():
        parameter = getattr(layer, name)
        stored = tensor.mT.contiguous() if "weight" in name else tensor
        parameter.weight_loader(parameter, stored, name.partition("_")[0], is_transposed=True)
        assert torch.equal(parameter, tensor)


def test_weights_that_do_not_fit() -> None:
    layer = moe()
    w13, w2 = layer.w13_weight, layer.w2_weight
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((w13, torch.randn(SIZE + 1, H), "w1", 0), WeightLoadError, r"w1.*\(13, 24\).*\(12, 24\)"),
        ((w13, torch.randn(H, SIZE), "w3", 0), WeightLoadError, "is_transposed=True"),
        ((w2, torch.randn(E + 1, H, SIZE), "w2"), WeightLoadError, "7 experts in the checkpoint"),
        ((w13, torch.randn(SIZE, H), "w2", 0), LayerArgumentError, "not one of w1, w3, w13"),
        ((w2, torch.randn(H, SIZE), "w1", 0), LayerArgumentError, "of w2_weight is not one of w2"),
        ((w2, torch.randn(H, SIZE), "w2", E), LayerArgumentError, "expert_id=6.*6 experts"),
        (
            (nn.Parameter(w2.data), w2, "w2"),
            LayerArgumentError,
            "parameter of this layer: w13_weight",
        ),
        ((w2, torch.tensor(1.0), "w2"), WeightLoadError, r"w2_weight of all experts.* 3 dim.*\(\)"),
        ((w13, torch.tensor(1.0), "w13", 0), WeightLoadError, r"one expert.* 2 dimensions"),
        ((w2, torch.randn(H), "w2", 0, True), WeightLoadError, r"one expert.*\(24,\)"),
    ]
    for arguments, error, match in cases:
        with pytest.raises(error, match=match):
            layer.weight_loader(*arguments)
    plain = moe(activation="silu_no_mul")
    with pytest.raises(LayerArgumentError, match="no gate"):
        plain.weight_loader(plain.w13_weight, torch.randn(SIZE, H), "w3", 0)


def test_mapping_of_names() -> None:
    mapping = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", 2)
    assert mapping[:3] == [
        ("experts.w13_", "experts.0.gate_proj.", 0, "w1"),
        ("experts.w2_", "experts.0.down_proj.", 0, "w2"),
        ("experts.w13_", "experts.0.up_proj.", 0, "w3"),
    ]
    assert len(mapping) == 6
    name = "model.layers.3.mlp.experts.1.up_proj.weight"
    (found,) = [m for m in mapping if m[1] in name]
    assert name.replace(found[1], found[0]) == "model.layers.3.mlp.experts.w13_weight"


# Models of other people


def test_in_the_place_of_transformers_experts() -> None:
    from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    sizes: dict[str, Any] = {"hidden_size": H, "num_experts_per_tok": K}
    local = {**sizes, "intermediate_size": SIZE, "num_local_experts": E}
    deepseek = DeepseekV3Config(
        **sizes, moe_intermediate_size=SIZE, n_routed_experts=E, n_group=2, topk_group=1
    )
    x = torch.randn(2, 5, H)
    for block in (MixtralSparseMoeBlock(MixtralConfig(**local)), DeepseekV3MoE(deepseek)):
        filled(block)
        wanted, theirs = block(x), block.experts
        block.experts = TransformersFusedMoE(E, K, H, SIZE)
        load_fused(
            block.experts, {"w13_weight": theirs.gate_up_proj, "w2_weight": theirs.down_proj}
        )
        assert_near(block(x), wanted)
    block = filled(GptOssMLP(GptOssConfig(**local)))
    wanted, theirs = block(x)[0], block.experts
    ours = TransformersFusedMoE(E, K, H, SIZE, has_bias=True, activation="swigluoai")
    for name in ("w13", "w2"):
        source = {"w13": "gate_up_proj", "w2": "down_proj"}[name]
        weight, bias = getattr(ours, f"{name}_weight"), getattr(ours, f"{name}_bias")
        weight.weight_loader(weight, getattr(theirs, source), name, is_transposed=True)
        bias.weight_loader(bias, getattr(theirs, f"{source}_bias"), name)
    block.experts = ours
    assert_near(block(x)[0], wanted)
    ids = torch.randint(E, (3, K))
    assert_near(
        ours(x[0, :3], ids, torch.ones(3, K).bfloat16(), unknown=1),
        ours(x[0, :3], ids.int(), torch.ones(3, K)),
    )


def test_deepseek_by_the_layer_itself() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=H, num_experts_per_tok=3, moe_intermediate_size=SIZE, n_routed_experts=16,
        n_group=4, topk_group=2, routed_scaling_factor=2.5, n_shared_experts=2,
    )  # fmt: skip
    block = filled(DeepseekV3MoE(config))
    block.gate.e_score_correction_bias.normal_()
    layer = FusedMoE(
        16, 3, H, SIZE, use_grouped_topk=True, num_expert_group=4, topk_group=2,
        scoring_func="sigmoid", routed_scaling_factor=2.5,
        e_score_correction_bias=block.gate.e_score_correction_bias,
        shared_experts=block.shared_experts,
    )  # fmt: skip
    experts = block.experts
    load_fused(layer, {"w13_weight": experts.gate_up_proj, "w2_weight": experts.down_proj})
    x = torch.randn(9, H)
    assert_near(layer(x, functional.linear(x, block.gate.weight)), block(x[None])[0])
