"""``fused_experts``: against a loop and transformers' experts; maps, partitions, errors, graphs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import opweave.compile
from ir.workloads import check
from opweave import ir

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OP = ir.ops.fused_experts
GATED = (
    "silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "swigluoai_uninterleave", "swiglustep",
    "situ",
)  # fmt: skip
UNGATED = ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul")
each_provider = pytest.mark.parametrize("provider", OP.supported_providers())
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


# One element of each activation, from its definition.


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v)) if v > -700 else 0.0


def gelu(v: float) -> float:
    return v / 2 * (1 + math.erf(v / math.sqrt(2)))


def gelu_tanh(v: float) -> float:
    return v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


def clip(v: float, limit: float) -> float:
    return max(-limit, min(limit, v))


def element(name: str, gate: float, up: float, **options: float) -> float:
    alpha, beta = options.get("alpha", 1.702), options.get("beta", 1.0)
    limit = options.get("limit", 7.0)
    single = {
        "silu": lambda v: v * sigmoid(v),
        "gelu": gelu,
        "gelu_tanh": gelu_tanh,
        "relu2": lambda v: max(v, 0.0) ** 2,
    }
    if name.startswith("swigluoai"):
        gate = min(gate, limit)
        return (clip(up, limit) + beta) * gate * sigmoid(alpha * gate)
    if name == "swiglustep":
        return min(gate * sigmoid(gate), limit) * clip(up, limit)
    if name == "situ":
        bounded = limit * math.tanh(up / limit) if "limit" in options else up
        return beta * math.tanh(gate / beta) * sigmoid(gate) * bounded
    return single[name.removesuffix("_no_mul")](gate) * (1.0 if name in UNGATED else up)


def activated(name: str, row: list[float], **options: float) -> list[float]:
    half = len(row) // 2
    if name in UNGATED:
        return [element(name, v, 0.0, **options) for v in row]
    pairs: Any = zip(row[:half], row[half:], strict=True)
    if name == "swigluoai":
        pairs = zip(row[0::2], row[1::2], strict=True)
    return [element(name, g, u, **options) for g, u in pairs]


def oracle(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: str = "silu",
    expert_map: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    on_input: bool = False,
    **options: float,
) -> Tensor:
    """One token and one expert at a time, in float64; an expert's result is rounded."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, k in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        expert, weight = int(ids[t, k]), float(weights[t, k])
        known = len(w13) if expert_map is None else len(expert_map)
        if not 0 <= expert < known:
            continue
        if expert_map is not None:
            expert = int(expert_map[expert])
            if expert < 0:
                continue
        row = x[t].double()
        if on_input:
            row, weight = (row * weight).to(x.dtype).double(), 1.0
        hidden = w13[expert].double() @ row
        if w13_bias is not None:
            hidden = hidden + w13_bias[expert].double()
        inner = activated(activation, hidden.tolist(), **options)
        hidden = torch.tensor(inner, dtype=torch.float64)
        result = w2[expert].double() @ hidden
        if w2_bias is not None:
            result = result + w2_bias[expert].double()
        out[t] += weight * result.to(x.dtype).double()
    return out.to(x.dtype)


def case(
    tokens: int = 7,
    hidden: int = 24,
    size: int = 10,
    experts: int = 5,
    k: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    activation: str = "silu",
    scale: float = 1.0,
) -> tuple[Any, ...]:
    rows = size if activation in UNGATED else 2 * size
    x = torch.randn(tokens, hidden)
    w13 = scale * torch.randn(experts, rows, hidden) / hidden**0.5
    w2 = torch.randn(experts, hidden, size) / size**0.5
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(max(tokens, 1))])[:tokens]
    values = x.to(dtype), w13.to(dtype), w2.to(dtype), torch.rand(tokens, k), ids.int()
    return *values, activation


def bias(w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(*w.shape[:2]).to(w.dtype) for w in (w13, w2))  # type: ignore[return-value]


def assert_right(found: Tensor, wanted: Tensor, what: object = "") -> None:
    check(OP, found, wanted, what)
    assert found.is_contiguous()


@each_provider
@each_dtype
def test_values(provider: str, dtype: torch.dtype) -> None:
    call = OP.using(f"{provider}!")
    for tokens, experts, k in [(7, 5, 2), (1, 5, 5), (0, 5, 2), (3, 40, 1), (9, 1, 1)]:
        values = case(tokens, experts=experts, k=k, dtype=dtype)
        before = [v.clone() for v in values[:5]]
        assert_right(call(*values), oracle(*values), (tokens, experts, k))
        assert all(torch.equal(a, b) for a, b in zip(before, values[:5], strict=True))


@each_provider
@pytest.mark.parametrize("activation", [*GATED, *UNGATED])
def test_every_activation(provider: str, activation: str) -> None:
    call = OP.using(f"{provider}!")
    scale = 6.0 if activation.startswith("swiglu") else 1.0  # so that limits are reached
    values = case(activation=activation, scale=scale)
    biases = bias(*values[1:3])
    assert_right(call(*values), oracle(*values))
    assert_right(call(*values, None, *biases), oracle(*values, None, *biases))
    constants: dict[str, dict[str, float]] = {
        "swigluoai": {"alpha": 1.0, "beta": 0.0, "limit": 3.0},
        "swigluoai_uninterleave": {"alpha": 1.0, "beta": 0.5, "limit": 10.0},
        "swiglustep": {"limit": 2.0},
        "situ": {"beta": 4.0, "limit": 25.0},
    }
    if given := constants.get(activation):
        assert_right(call(*values, **given), oracle(*values, **given))


@each_provider
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_biases_and_dtypes_of_the_routing(provider: str, dtype: torch.dtype) -> None:
    call = OP.using(f"{provider}!")
    values = case(dtype=dtype)
    biases = bias(*values[1:3])
    wanted = oracle(*values, None, *biases)
    assert_right(call(*values, None, *biases), wanted)
    assert_right(call(*values[:4], values[4].long(), "silu"), oracle(*values))
    half = values[3].bfloat16()
    assert_right(call(*values[:3], half, *values[4:]), oracle(*values[:3], half, *values[4:]))


@each_provider
def test_ids_of_no_expert_add_nothing(provider: str) -> None:
    call = OP.using(f"{provider}!")
    x, w13, w2, weights, ids, act = case(tokens=6, k=3)
    ids[0], ids[1, 1], ids[2, 0], ids[3, 2] = -1, 5, 1000, -7
    ids[4, 1] = ids[4, 0]  # the same expert twice counts twice
    weights[0], weights[1, 1] = float("nan"), float("inf")
    found = call(x, w13, w2, weights, ids, act)
    assert_right(found, oracle(x, w13, w2, weights, ids, act))
    assert not found[0].any()


@each_provider
def test_no_experts_per_token_or_none_here(provider: str) -> None:
    call = OP.using(f"{provider}!")
    x, w13, w2, weights, ids, act = case()
    assert not call(x, w13, w2, weights[:, :0], ids[:, :0], act).any()
    nowhere = torch.full((5,), -1, dtype=torch.int32)
    assert not call(x, w13[:0], w2[:0], weights, ids, act, nowhere).any()
    assert not call(x, w13[:0], w2[:0], weights, ids, act).any()
    transposed = x.t().contiguous().t()
    assert call(transposed, w13[:0], w2[:0], weights, ids, act, nowhere).is_contiguous()


@each_provider
def test_what_other_experts_compute_does_not_matter(provider: str) -> None:
    x, w13, w2, weights, ids, act = case(experts=6)
    ids %= 5
    clean = OP.using(f"{provider}!")(x, w13, w2, weights, ids, act)
    w13[5], w2[5] = float("inf"), float("nan")
    assert torch.equal(OP.using(f"{provider}!")(x, w13, w2, weights, ids, act), clean)
    x[1, 0] = float("nan")
    found = OP.using(f"{provider}!")(x, w13, w2, weights, ids, act)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3]], clean[[0, 2, 3]])


@each_provider
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_parts_of_expert_parallelism_add_up(provider: str, ranks: int) -> None:
    call = OP.using(f"{provider}!")
    x, w13, w2, weights, ids, act = case(experts=7, k=3)
    biases = bias(w13, w2)
    total = torch.zeros_like(x)
    for rank in range(ranks):
        mine = torch.arange(rank, 7, ranks)
        expert_map = torch.full((7,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(len(mine), dtype=torch.int32)
        part = (x, w13[mine], w2[mine], weights, ids, act, expert_map, *(b[mine] for b in biases))
        assert_right(call(*part), oracle(*part))
        total += call(*part)
    assert_right(total, oracle(x, w13, w2, weights, ids, act, None, *biases))


@each_provider
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_the_parts_of_tensor_parallelism_add_up(provider: str, activation: str) -> None:
    x, w13, w2, weights, ids, _ = values = case(size=12, activation=activation)
    total = torch.zeros_like(x)
    for rank in range(3):
        mine = slice(4 * rank, 4 * rank + 4)
        rows = w13[:, mine]
        if activation == "silu":  # gate and up halves separately
            rows = torch.cat([half[:, mine] for half in w13.chunk(2, dim=1)], 1)
        if activation == "swigluoai":
            rows = w13[:, 8 * rank : 8 * rank + 8]
        total += OP.using(f"{provider}!")(x, rows, w2[:, :, mine], weights, ids, activation)
    assert_right(total, oracle(*values))


@each_provider
@each_dtype
def test_weights_on_the_input(provider: str, dtype: torch.dtype) -> None:
    values = (*case(k=1, dtype=dtype), None, None, None, True)
    found = OP.using(f"{provider}!")(*values)
    assert_right(found, oracle(*values))
    assert (found - OP(*values[:-1])).abs().max() > 1e-3


def test_a_requirement_changes_no_bits_of_what_met_it_before() -> None:
    values = OP.generate_inputs(num_tokens=513, dtype=torch.bfloat16)
    chosen = OP.using("batch_invariant!")(*values)
    with ir.require("batch_invariant"):
        assert torch.equal(OP(*values), chosen)


# Other people's experts


def hf_experts(module: Any) -> Any:
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3)
    return module.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_experts_of_transformers(dtype: torch.dtype) -> None:
    from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
    from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    x, *_, weights, ids, _ = case(hidden=24, experts=5, dtype=dtype)
    weights = weights.to(dtype)  # transformers multiplies in the dtype of these
    sizes: dict[str, Any] = {"hidden_size": 24, "num_experts_per_tok": 2}
    inner = {**sizes, "moe_intermediate_size": 10}
    for experts in (
        MixtralExperts(MixtralConfig(**sizes, intermediate_size=10, num_local_experts=5)),
        Qwen3MoeExperts(Qwen3MoeConfig(**inner, num_experts=5)),
        DeepseekV3Experts(DeepseekV3Config(**inner, n_routed_experts=5)),
        Glm4MoeExperts(Glm4MoeConfig(**inner, n_routed_experts=5)),
    ):
        module = hf_experts(experts).to(dtype)
        theirs = module(x, ids.long(), weights)
        ours = OP(x, module.gate_up_proj, module.down_proj, weights, ids)
        check(OP, ours, theirs)
    config = GptOssConfig(**sizes, intermediate_size=10, num_local_experts=5)
    module = hf_experts(GptOssExperts(config)).to(dtype)
    module.gate_up_proj *= 4  # the limits are reached
    theirs = module(x, ids.long(), weights)
    w13, w2 = module.gate_up_proj.mT, module.down_proj.mT
    biases = module.gate_up_proj_bias, module.down_proj_bias
    ours = OP(x, w13, w2, weights, ids, "swigluoai", None, *biases)
    error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    assert error < (1e-5 if dtype is torch.float32 else 2e-2)  # theirs rounds at every step


# Autograd and graphs


def test_gradients_are_those_of_native() -> None:
    values = case(tokens=3, hidden=5, size=2, experts=3, dtype=torch.float64)
    leaves = [v.double().requires_grad_() for v in values[:4]]
    assert torch.autograd.gradcheck(lambda *v: OP(*v, values[4]), leaves)
    with ir.priority(fused_experts=["aten"]):
        assert OP.dispatch(*leaves, values[4]).provider == "native"


def test_one_graph_for_any_number_of_tokens() -> None:
    def program(x: Tensor, *rest: Any) -> Tensor:
        result: Tensor = OP(functional.relu(x), *rest)
        return result + x

    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return opweave.compile.backend(graph, inputs, options={"codegen": False})

    graph = torch.compile(program, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad(), ir.priority(fused_experts=["aten"]):
        cases = [OP.generate_inputs(num_tokens=tokens) for tokens in (5, 9, 2)]
        wanted = [program(*values) for values in cases]  # what it computes, and the fast path
        for values, expected in zip(cases, wanted, strict=True):
            check(OP, graph(*values), expected)
    assert len(graphs) == 1


# Mistakes


def wrong(**changes: Any) -> tuple[Any, ...]:
    names = ["x", "w13", "w2", "weights", "ids", "activation", "map", "b13", "b2", "on_input"]
    values = dict(zip(names, (*case(), None, None, None, False), strict=True))
    return tuple({**values, **changes}.values())


INVALID: list[tuple[tuple[Any, ...], str]] = [
    (wrong(activation="tanh"), "'tanh'.*silu, gelu, gelu_tanh.*relu2_no_mul"),
    (wrong(x=torch.randn(7, 23)), r"x must have shape \(7, 24\)"),
    (wrong(x=torch.randn(1, 7, 24)), r"x must have shape \(tokens, hidden\)"),
    (wrong(w13=torch.randn(5, 10, 24)), r"w13 must have shape \(5, 20, 24\).*'silu'"),
    (wrong(activation="silu_no_mul"), r"w13 must have shape \(5, 10, 24\)"),
    (wrong(w2=torch.randn(24, 10)), r"w2 must have shape \(experts"),
    (wrong(ids=torch.zeros(6, 2, dtype=torch.int32)), r"topk_ids must have shape \(7, 2\)"),
    (wrong(weights=torch.zeros(7, 1)), r"topk_weights must have shape \(7, 2\)"),
    (wrong(b13=torch.zeros(5, 10)), r"w13_bias must have shape \(5, 20\)"),
    (wrong(b2=torch.zeros(5)), r"w2_bias must have shape \(5, 24\)"),
    (wrong(w2=torch.randn(5, 24, 10).double()), "w2 must have the dtype of x.*float64"),
    (wrong(ids=torch.zeros(7, 2)), "topk_ids must be integers; found torch.float32"),
    (wrong(ids=torch.zeros(7, 2, dtype=torch.bool)), "topk_ids must be integers"),
    (wrong(on_input=True), "one expert per token; topk_ids has 2"),
    ((*wrong(), 1.0), "'silu' has no alpha.*swigluoai"),
    ((*wrong(activation="swiglustep"), None, 2.0), "'swiglustep' has no beta.*situ"),
]


@pytest.mark.parametrize("case_", range(len(INVALID)))
@each_provider
def test_errors(case_: int, provider: str) -> None:
    values, match = INVALID[case_]
    for call in (OP.using(provider), OP.torch_op):
        with pytest.raises(ValueError, match=match):
            call(*values)
