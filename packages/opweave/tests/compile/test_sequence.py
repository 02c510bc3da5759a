"""Sequence parallelism: which collectives are left, and that ranks together give the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import _functional_collectives as functional_collectives
from torch.fx import Graph, GraphModule

import opweave.compile
from opweave import ir
from opweave.compile import compat, sequence
from opweave.compile.graph import GraphInfo, fake_of, graph_text
from opweave.compile.options import CompileOptions
from opweave.compile.plan import Context, Plan
from opweave.compile.sequence import WAIT, collective, find_group, shard_tokens

from .conftest import compiled
from .ranks import Case, Outcome, run_ranks

aten = torch.ops.aten
RANKS, RANK, TOKENS, HIDDEN = 4, 1, 16, 8
MATRIX, WEIGHT, SCALE = torch.randn(HIDDEN, HIDDEN), torch.ones(HIDDEN), torch.full((1,), 0.05)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group that moves nothing, seen from its second rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    yield
    distributed.destroy_process_group()


in_group = pytest.mark.usefixtures("group")


def all_reduce(x: Tensor) -> Tensor:
    summed: Tensor = functional_collectives.all_reduce(x, "sum", distributed.group.WORLD)
    return summed


def linear(x: Tensor) -> Tensor:
    """A row parallel layer."""
    return all_reduce(x @ MATRIX)


def norm(x: Tensor) -> Tensor:
    normalized: Tensor = ir.ops.rms_norm(x, WEIGHT, 1e-5)
    return normalized


def add_norm(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y, s = ir.ops.fused_add_rms_norm(x, r, WEIGHT, 1e-5)
    return y, s


def tokens(count: int = TOKENS) -> Tensor:
    return torch.randn(count, HIDDEN)


def context(**options: Any) -> Context:
    return Context(Plan.capture([ir.current_registry()], CompileOptions(**options)))


def traced(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> Graph:
    """Return the graph that the pass gets."""
    found: list[Graph] = []

    def backend(module: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        return compat.compile_aot(module, examples, lambda each: found.append(each.graph))

    torch.compiler.reset()
    for value in inputs if dynamic else ():
        torch._dynamo.mark_dynamic(value, 0)
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (graph,) = found
    return graph


def sharded(function: Callable[..., Any], *inputs: Any, **how: Any) -> tuple[Graph, Context]:
    """Trace *function*, run the pass, and check what holds of every graph."""
    graph, done = traced(function, *inputs, **how), context()
    before = outputs(graph)
    shard_tokens(GraphInfo(graph), done)
    graph.lint()
    assert outputs(graph) == before
    text = graph_text(graph)
    shard_tokens(GraphInfo(graph), context())
    assert graph_text(graph) == text, "the pass is not idempotent"
    return graph, done


def moved(graph: Graph) -> list[str]:
    """The collectives in order, and what they give."""
    found = [(collective(node), node) for node in graph.nodes]
    return [f"{name} {show(fake_of(node))}" for name, node in found if name not in ("", WAIT)]


def show(value: Tensor) -> str:
    sizes = ", ".join(map(str, value.shape))
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"


def outputs(graph: Graph) -> list[str]:
    values: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    return [show(fake_of(v)) for v in (values if isinstance(values, (list, tuple)) else [values])]


def called(graph: Graph, *targets: Any) -> list[tuple[Any, ...]]:
    return [node.args[1:] for node in graph.nodes if node.target in targets]


ONCE = ["reduce_scatter float32[4, 8]", "all_gather float32[16, 8]"]


@in_group
def test_a_norm_between_two_linears() -> None:
    graph, done = sharded(lambda x: norm(linear(x)) @ MATRIX, tokens())
    assert moved(graph) == ONCE
    assert done.report.collectives == {"all_gather": 1, "reduce_scatter": 1}
    assert done.notes == [
        "1 all_reduce become 1 reduce_scatter and 1 all_gather over 4 ranks, around rms_norm"
    ]


@in_group
def test_the_residual_stays_sharded_through_all_layers() -> None:
    def layers(x: Tensor, r: Tensor) -> Tensor:
        for _ in range(3):
            x, r = add_norm(linear(x), r)
        return x @ MATRIX

    graph, _ = sharded(layers, tokens(), tokens())
    assert moved(graph) == ONCE * 3
    assert called(graph, aten.select.int) == [(0, RANK)], "the first residual is cut, once"
    assert called(graph, aten.constant_pad_nd.default, aten.slice.Tensor) == []


@in_group
@pytest.mark.parametrize("dequantized", [False, True])
def test_activations_are_gathered_after_they_are_quantized(dequantized: bool) -> None:
    def layer(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        q, scale = ir.ops.dynamic_per_token_quant_fp8(add_norm(linear(x), r)[0])
        return (q.to(torch.float32) * scale @ MATRIX, scale) if dequantized else (q, scale)

    graph, _ = sharded(layer, tokens(), tokens())
    scattered, *gathered = moved(graph)
    assert scattered == "reduce_scatter float32[4, 8]"
    assert sorted(gathered) == ["all_gather float32[16, 1]", "all_gather uint8[16, 8]"]


@in_group
@pytest.mark.parametrize(
    ("scale", "gathered"),
    [
        (SCALE, "all_gather uint8[16, 8]"),
        (torch.full((1, HIDDEN), 0.05), "all_gather uint8[16, 8]"),
        (torch.full((TOKENS, 1), 0.05), "all_gather uint8[16, 8]"),
        (torch.full((2, 1), 0.05), "all_gather float32[16, 8]"),
    ],
    ids=["tensor", "channel", "token", "blocks of tokens"],
)
def test_static_scales(scale: Tensor, gathered: str) -> None:
    graph, _ = sharded(lambda x: ir.ops.static_quant_fp8(norm(linear(x)), scale), tokens())
    assert moved(graph) == ["reduce_scatter float32[4, 8]", gathered]


@in_group
def test_one_scale_for_all_tokens_needs_all_of_them() -> None:
    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        q, scale = ir.ops.dynamic_per_tensor_quant_fp8(norm(linear(x)))
        return q, scale

    assert moved(sharded(layer, tokens())[0]) == ONCE


@in_group
def test_a_norm_in_plain_torch() -> None:
    def layer(x: Tensor) -> Tensor:
        y = linear(x)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        heads = y.view(TOKENS, 2, 4)[:, None].transpose(1, 2).softmax(-1)
        return torch.cat([heads.flatten(1), y], 1)[:, :HIDDEN].clone() @ MATRIX

    assert moved(sharded(layer, tokens())[0]) == ONCE


@in_group
def test_the_cheapest_place_to_gather() -> None:
    graph, _ = sharded(lambda x: norm(linear(x)).to(torch.float64) @ MATRIX.double(), tokens())
    assert moved(graph) == ONCE, "before it is made wider"
    graph, _ = sharded(lambda x: norm(linear(x)).to(torch.bfloat16) @ MATRIX.bfloat16(), tokens())
    assert moved(graph) == ["reduce_scatter float32[4, 8]", "all_gather bfloat16[16, 8]"]


@in_group
def test_an_input_that_is_written_to_gets_all_rows() -> None:
    def layer(x: Tensor, r: Tensor) -> Tensor:
        r.copy_(add_norm(linear(x), r)[1])
        return r @ MATRIX

    graph, _ = sharded(layer, tokens(), tokens())
    assert moved(graph) == ONCE
    ((written,),) = called(graph, aten.copy_.default)
    assert fake_of(written).shape == (TOKENS, HIDDEN)


# Numbers of tokens


@in_group
def test_tokens_that_the_ranks_do_not_divide_are_padded() -> None:
    def layers(x: Tensor, r: Tensor) -> Tensor:
        for _ in range(2):
            x, r = add_norm(linear(x), r)
        return x @ MATRIX

    graph, _ = sharded(layers, tokens(17), tokens(17))
    assert moved(graph) == ["reduce_scatter float32[5, 8]", "all_gather float32[20, 8]"] * 2
    assert called(graph, aten.constant_pad_nd.default) == [([0, 0, 0, 3],)] * 3
    assert called(graph, aten.slice.Tensor) == [(0, 0, 17)] * 2


@in_group
def test_few_tokens_are_left_alone() -> None:
    graph, done = sharded(lambda x: norm(linear(x)) @ MATRIX, tokens(3 * RANKS - 1))
    assert moved(graph) == ["all_reduce float32[11, 8]"]
    assert done.notes == ["all_reduce left: fewer than 3 tokens for each of 4 ranks"]
    graph, _ = sharded(lambda x: norm(linear(x)) @ MATRIX, tokens(3 * RANKS))
    assert moved(graph) == ["reduce_scatter float32[3, 8]", "all_gather float32[12, 8]"]


@in_group
@pytest.mark.parametrize(
    ("first", "found", "held"),
    [
        (20, {"all_gather": 2, "reduce_scatter": 2}, (12, 13, 16, 99)),
        (7, {"all_reduce": 2}, (2, 4, 5, 11)),
    ],
)
def test_numbers_of_tokens_that_vary(
    first: int, found: dict[str, int], held: tuple[int, ...]
) -> None:
    def layers(x: Tensor, r: Tensor) -> Tensor:
        for _ in range(2):
            x, r = add_norm(linear(x), r)
        return x @ MATRIX

    run = compiled(layers)
    for count in (first, *held):
        x, r = tokens(count), tokens(count)
        for value in (x, r):
            torch._dynamo.mark_dynamic(value, 0)
        with torch._dynamo.config.patch(error_on_recompile=count != first):
            assert run(x, r).shape == (count, HIDDEN)
        assert opweave.compile.report().collectives == found


@in_group
def test_varying_numbers_that_the_ranks_divide_are_not_padded() -> None:
    def layer(x: Tensor) -> Tensor:
        x = x.view(-1, HIDDEN)  # RANKS times as many
        return norm(linear(x)) @ MATRIX

    graph, _ = sharded(layer, torch.randn(8, RANKS * HIDDEN), dynamic=True)
    assert called(graph, aten.constant_pad_nd.default, aten.slice.Tensor) == []


# Where it does not pay, or would be wrong


def mixes_tokens(x: Tensor, r: Tensor) -> Any:
    y = linear(x)
    return y.softmax(0), y.sum(0), y.cumsum(0), y.t(), y.flip(0), y[2:]


def adds_its_own_part(x: Tensor, r: Tensor) -> Any:
    y = linear(x)
    return norm(y) @ MATRIX, all_reduce(y / RANKS + x @ MATRIX)


LEFT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all rows are returned": lambda x, r: (linear(x), r),
    "the residual is returned": lambda x, r: add_norm(linear(x), r),
    "tokens are mixed": mixes_tokens,
    "a rank adds its own part": adds_its_own_part,
    "the residual of a matrix product": lambda x, r: add_norm(linear(x), r @ MATRIX)[0] @ MATRIX,
    "random": lambda x, r: torch.nn.functional.dropout(linear(x), 0.5) @ MATRIX,
    "one row": lambda x, r: linear(x[:, 0] @ MATRIX[:1].expand(TOKENS, HIDDEN)).relu() @ MATRIX,
    "transposed": lambda x, r: (
        linear(x)[:, :, None].expand(TOKENS, HIDDEN, TOKENS) * torch.ones(TOKENS)
    ),
    "another size": lambda x, r: linear(x)[None] + r[:, None, None],
}


@in_group
@pytest.mark.parametrize("name", LEFT)
def test_left_as_it_was(name: str) -> None:
    graph = traced(LEFT[name], tokens(), tokens())
    text, done = graph_text(graph), context()
    shard_tokens(GraphInfo(graph), done)
    assert graph_text(graph) == text
    assert all(" left: " in note for note in done.notes)


@in_group
def test_a_refusal_says_what_is_in_the_way() -> None:
    _, done = sharded(LEFT["the residual of a matrix product"], tokens(), tokens())
    (note,) = done.notes
    assert note.startswith("all_reduce left: no row-wise op follows that could be sharded; ")
    assert note.endswith("fused_add_rms_norm: mm_1 may differ between ranks")
    _, done = sharded(LEFT["the residual is returned"], tokens(), tokens())
    assert "fused_add_rms_norm: its result would cost more to gather" in done.notes[0]


def test_nothing_happens_without_a_group() -> None:
    done = context()
    shard_tokens(GraphInfo(traced(norm, tokens())), done)
    assert done.report.collectives == {}
    assert done.notes == []
    assert find_group("0") is None
    graph = Graph()
    assert collective(graph.placeholder("x")) == ""


@in_group
def test_the_option_turns_it_off() -> None:
    def layer(x: Tensor) -> Tensor:
        return norm(linear(x)) @ MATRIX

    compiled(layer, sequence_parallelism=False)(tokens())
    assert "shard tokens" not in [p.name for p in opweave.compile.report().passes]
    torch.compiler.reset()
    compiled(layer)(tokens())
    assert opweave.compile.report().collectives == {"all_gather": 1, "reduce_scatter": 1}


def test_rank_and_size_are_in_the_keys_of_caches(request: pytest.FixtureRequest) -> None:
    without = context().plan.digest
    request.getfixturevalue("group")
    assert sequence.find_group("0") == sequence.Group("0", RANKS, RANK)
    assert context().plan.digest != without


# Ranks together

CASES = {
    "llama": Case("llama", (8,)),
    "dynamic": Case("llama", (9, 16, 7), dynamic=True),
    "quantized": Case("quantized", (9,)),
    "mixture": Case("mixture", (8,)),
    "by hand": Case("by_hand", (11,)),
    "parts that differ": Case("parts_that_differ", (8,)),
    "generated code": Case("one_layer", (9, 16), dynamic=True, codegen=True),
}
EVERY_PUSH = {"dynamic", "parts that differ"}  # make test-all runs all cases
# The promises of docs/design/sequence-parallelism.md.
COLLECTIVES = {
    "llama": {"all_gather": 4, "reduce_scatter": 4},
    "dynamic": {"all_gather": 4, "reduce_scatter": 4},
    "quantized": {"all_gather": 3, "all_reduce": 1, "reduce_scatter": 2},
    "mixture": {"all_gather": 2, "reduce_scatter": 2},
    "by hand": {"all_gather": 1, "all_reduce": 1, "reduce_scatter": 1},
    "parts that differ": {"all_reduce": 2},
    "generated code": {"all_gather": 2, "reduce_scatter": 2},
}


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Outcome]]:
    """Return the results of each of two ranks, by case, for the cases that were selected."""
    selected = {item.name for item in request.session.items}
    test = test_ranks_together_give_what_one_gives.__name__
    names = [name for name in CASES if f"{test}[{name}]" in selected]
    found = run_ranks([CASES[name] for name in names], tmp_path_factory.mktemp("ranks"))
    return dict(zip(names, map(list, zip(*found, strict=True)), strict=True))


@pytest.mark.parametrize(
    "name",
    [n if n in EVERY_PUSH else pytest.param(n, marks=pytest.mark.slow) for n in CASES],
)
def test_ranks_together_give_what_one_gives(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes[name]:
        assert outcome.difference < 1e-4
        assert outcome.collectives == [COLLECTIVES[name]] * len(CASES[name].tokens)
