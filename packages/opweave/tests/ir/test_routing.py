"""Routing: against loops and other people's routers; ties, non-finite scores, errors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ir.workloads import dense
from opweave import ir

PLAIN = ("topk_softmax", "topk_sigmoid", "topk_sqrtsoftplus")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
each_plain = pytest.mark.parametrize("name", PLAIN)
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
Row = tuple[list[float], list[int]]


def providers(name: str) -> list[str]:
    found: list[str] = getattr(ir.ops, name).supported_providers()
    return found


def scores_of(logits: list[float], name: str) -> list[float]:
    if name == "softmax":
        powers = [math.exp(v - max(logits)) for v in logits]
        return [p / sum(powers) for p in powers]
    if name == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in logits]
    return [math.sqrt(math.log1p(math.exp(v))) for v in logits]


def best(choice: list[float], count: int) -> list[int]:
    """The places of the highest; of equal ones the first."""
    return sorted(range(len(choice)), key=lambda i: (-choice[i], i))[:count]


def weighted(scores: list[float], ids: list[int], renormalize: bool, scale: float) -> Row:
    total = sum(scores[i] for i in ids) if renormalize else 1.0
    return [scores[i] / total * scale for i in ids], ids


def plain(logits: Tensor, k: int, renormalize: bool, bias: Any, scale: float, name: str) -> Any:
    rows = []
    for row in logits.double().tolist():
        scores = scores_of(row, name)
        added = [0.0] * len(row) if bias is None else bias.double().tolist()
        ids = best([s + b for s, b in zip(scores, added, strict=True)], k)
        rows.append(weighted(scores, ids, renormalize, scale))
    return rows


def grouped(
    logits: Tensor, k: int, groups: int, kept: int, renormalize: bool, name: str, scale: float,
    bias: Any,
) -> Any:  # fmt: skip
    rows = []
    for row in logits.double().tolist():
        scores, size = scores_of(row, name), len(row) // groups
        added = [0.0] * len(row) if bias is None else bias.double().tolist()
        choice = [s + b for s, b in zip(scores, added, strict=True)]
        parts = [sorted(choice[g * size : (g + 1) * size])[::-1] for g in range(groups)]
        good = best([sum(p[: 1 if bias is None else 2]) for p in parts], kept)
        masked = [c if i // size in good else -math.inf for i, c in enumerate(choice)]
        rows.append(weighted(scores, best(masked, k), renormalize, scale))
    return rows


def assert_rows(found: tuple[Tensor, Tensor], rows: list[Row], logits: Tensor) -> None:
    weights, ids = found
    assert ids.dtype is torch.int32
    assert weights.dtype is (torch.float64 if logits.dtype is torch.float64 else torch.float32)
    assert weights.is_contiguous()
    assert ids.is_contiguous()
    assert ids.tolist() == [row[1] for row in rows]
    wanted = torch.tensor([row[0] for row in rows], dtype=weights.dtype).reshape(weights.shape)
    torch.testing.assert_close(weights, wanted, atol=1e-6, rtol=2e-5)


def separated(tokens: int, experts: int) -> Tensor:
    """Logits of which no two in a row round to the same score."""
    order = torch.stack([torch.randperm(experts) for _ in range(max(tokens, 1))])[:tokens]
    return (order + torch.rand(tokens, experts) * 0.5) * (6.0 / experts) - 3.0


@each_plain
@pytest.mark.parametrize("experts", [6, 16, 352])
@pytest.mark.parametrize("k", [3, 4])
def test_plain_routing(name: str, experts: int, k: int) -> None:
    op, logits = getattr(ir.ops, name), separated(7, experts)
    scoring = name.removeprefix("topk_")
    for renormalize, bias in itertools.product((True, False), (None, torch.randn(experts))):
        wanted = plain(logits, k, renormalize, bias, 2.5, scoring)
        for provider in providers(name):
            found = op.using(f"{provider}!")(logits, k, renormalize, bias, 2.5)
            assert_rows(found, wanted, logits)
        assert_rows(op(logits, k), plain(logits, k, False, None, 1.0, scoring), logits)


@pytest.mark.parametrize(
    "sizes", [(16, 2, 8, 2), (128, 2, 8, 2), (256, 8, 8, 4), (384, 8, 1, 1), (512, 22, 1, 1)]
)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_grouped_routing(sizes: tuple[int, int, int, int], scoring: str) -> None:
    experts, *rest = sizes
    logits = separated(5, experts)
    for renormalize, scale, bias in itertools.product(
        (True, False), (1.0, 2.5), (None, torch.randn(experts))
    ):
        options = (*rest, renormalize, scoring, scale, bias)
        wanted = grouped(logits, *rest, renormalize, scoring, scale, bias)
        for provider in providers("grouped_topk"):
            found = ir.ops.grouped_topk.using(f"{provider}!")(logits, *options)
            assert_rows(found, wanted, logits)


@pytest.mark.parametrize("name", [*PLAIN, "grouped_topk"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_rows_that_are_not_finite(name: str, renormalize: bool) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[nan] * 8, [inf] * 8, [-inf] * 8, [nan, inf, -inf, 1.0] * 2, [0.0] * 7 + [inf]]
    logits = torch.tensor(rows)
    op, extra = getattr(ir.ops, name), (4, 4) if name == "grouped_topk" else ()
    for provider in providers(name):
        weights, ids = op.using(f"{provider}!")(logits, 3, *extra, renormalize)
        assert weights.isfinite().all()
        assert all(len(set(row)) == 3 for row in ids.tolist())
        assert ids[0].tolist() == [0, 1, 2]
        assert not weights[0].any()
        # A bad row does not spread. Good ones take its place, by which torch rounds the others.
        usual = separated(7, 8)
        among_bad = op.using(f"{provider}!")(torch.cat([logits, usual[5:]]), 3, *extra, renormalize)
        among_good = op.using(f"{provider}!")(usual, 3, *extra, renormalize)
        assert torch.equal(among_bad[0][5:], among_good[0][5:])
        assert torch.equal(among_bad[1][5:], among_good[1][5:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_equal_scores_the_lower_number_wins(dtype: torch.dtype) -> None:
    logits = torch.randint(3, (40, 64)).to(dtype)
    for name in PLAIN:
        _, ids = getattr(ir.ops, name)(logits, 20)
        assert ids.tolist() == [best(row, 20) for row in logits.tolist()]
    _, ids = ir.ops.grouped_topk(logits, 8, 8, 3)
    wanted = grouped(logits, 8, 8, 3, False, "softmax", 1.0, None)
    assert ids.tolist() == [row[1] for row in wanted]


def by_id(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(-1)
    return weights.gather(1, order), ids.gather(1, order).long()


def assert_same_routing(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    (a, i), (b, j) = by_id(*ours), by_id(*theirs)
    assert torch.equal(i, j)
    torch.testing.assert_close(a, b.to(a.dtype), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_routers_of_transformers() -> None:
    from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter
    from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    x = torch.randn(11, 16)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_experts_per_tok": 4}
    eight = {**sizes, "num_local_experts": 8}
    groups = {**sizes, "n_routed_experts": 32, "n_group": 8, "topk_group": 4}
    softmax, deepseek = ir.ops.topk_softmax, ir.ops.grouped_topk
    three = {**groups, "routed_scaling_factor": 2.5}
    two = {**groups, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
    cases: list[tuple[Any, Any]] = [
        (MixtralTopKRouter(MixtralConfig(**eight)), lambda r, s: softmax(r, 4, True)),
        (GptOssTopKRouter(GptOssConfig(**eight)), lambda r, s: softmax(r, 4, True)),
        (
            Qwen3MoeTopKRouter(Qwen3MoeConfig(**sizes, num_experts=8)),
            lambda r, s: softmax(r, 4, False),
        ),
        (
            DeepseekV4TopKRouter(DeepseekV4Config(**sizes, n_routed_experts=16)),
            lambda r, s: ir.ops.topk_sqrtsoftplus(
                r, 4, True, s.e_score_correction_bias, s.routed_scaling_factor
            ),
        ),
        (
            DeepseekV3TopkRouter(DeepseekV3Config(**three)),
            lambda r, s: deepseek(
                r, 4, 8, 4, True, "sigmoid", 2.5, s.e_score_correction_bias
            ),
        ),
        (
            Glm4MoeTopkRouter(Glm4MoeConfig(**three)),
            lambda r, s: deepseek(
                r, 4, 8, 4, True, "sigmoid", 2.5, s.e_score_correction_bias
            ),
        ),
        (
            DeepseekV2TopkRouter(DeepseekV2Config(**two, num_attention_heads=2)),
            lambda r, s: deepseek(r, 4, 8, 4, False, "softmax", 16.0),
        ),
    ]  # fmt: skip
    for router, ours in cases:
        for tensor in router.state_dict().values():
            tensor.normal_()
        logits, weights, ids = router(x)
        assert_same_routing(ours(logits, router), (weights, ids))


@torch.no_grad()
def test_llama4_routes_to_one_expert() -> None:
    from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4Router

    router = Llama4Router(
        Llama4TextConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=1)
    )
    scores, logits = router(torch.randn(9, 16))
    weights, ids = ir.ops.topk_sigmoid(logits, 1)
    torch.testing.assert_close(weights, scores.gather(1, ids.long()))
    assert scores.count_nonzero() == 9


@pytest.mark.parametrize("name", [*PLAIN, "grouped_topk"])
def test_gradients(name: str) -> None:
    op = getattr(ir.ops, name)
    logits = separated(3, 16).double().requires_grad_()
    extra = (4, 2) if name == "grouped_topk" else ()
    assert torch.autograd.gradcheck(lambda t: op(t, 3, *extra, True)[0], logits)


@each_dtype
def test_moe_sum(dtype: torch.dtype) -> None:
    for shape in [(5, 3, 24), (0, 3, 24), (4, 1, 7), (3, 0, 8)]:
        x = dense(*shape, dtype=dtype)
        wanted = x.double().numpy().sum(1)
        for provider in providers("moe_sum"):
            found = ir.ops.moe_sum.using(f"{provider}!")(x)
            atol, rtol = ir.ops.moe_sum.get_tolerance(dtype)
            expected = torch.from_numpy(wanted).to(dtype)
            torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


LOGITS = torch.zeros(3, 8)
INVALID: list[tuple[str, tuple[Any, ...], str]] = [
    ("topk_softmax", (LOGITS, 9), "topk=9.*number of experts, 8"),
    ("topk_softmax", (LOGITS, 0), "topk=0"),
    ("topk_sigmoid", (LOGITS[0], 1), r"\(tokens, experts\); found \(8,\)"),
    ("topk_softmax", (LOGITS[None].expand(2, 3, 8), 1), r"found \(2, 3, 8\)"),
    ("grouped_topk", (LOGITS[None].expand(2, 3, 8), 1, 2, 1), r"found \(2, 3, 8\)"),
    ("topk_sqrtsoftplus", (LOGITS, 2, False, torch.zeros(7)), "bias.*8 experts.*7"),
    ("grouped_topk", (LOGITS, 2, 3, 1), "num_expert_group=3 does not divide the 8"),
    ("grouped_topk", (LOGITS, 2, 0, 0), "num_expert_group=0"),
    ("grouped_topk", (LOGITS, 2, 4, 5), "topk_group=5.*num_expert_group=4"),
    ("grouped_topk", (LOGITS, 2, 4, 0), "topk_group=0"),
    ("grouped_topk", (LOGITS, 5, 4, 2), "topk=5.*2 groups of 2"),
    ("grouped_topk", (LOGITS, 2, 4, 2, False, "tanh"), "'sigmoid', not 'tanh'"),
    ("grouped_topk", (LOGITS, 2, 8, 2, False, "sigmoid", 1.0, torch.zeros(8)), "at least two"),
    ("moe_sum", (LOGITS,), "x must have shape"),
]


@pytest.mark.parametrize("case", range(len(INVALID)))
def test_errors(case: int) -> None:
    name, values, match = INVALID[case]
    op = getattr(ir.ops, name)
    for provider in providers(name):
        for call in (op.using(provider), op.torch_op):
            with pytest.raises(ValueError, match=match):
                call(*values)
