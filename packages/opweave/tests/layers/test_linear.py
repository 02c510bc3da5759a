"""Linear layers are ``nn.Linear``, on any number of ranks, from whole or divided checkpoints."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.testing._internal.distributed import fake_pg

from opweave import ir
from opweave.layers import (
    ColumnParallelLinear,
    LayerArgumentError,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    ShardingError,
    TensorParallel,
    WeightLoadError,
    current_tensor_parallel,
    tensor_parallel,
)
from opweave.layers.linear_methods import ActivationScheme, UnquantizedLinearMethod, W8A8Method
from opweave.layers.parallel import set_weight_attrs

from .switch import ranks
from .two_ranks import RANKS, Model, run_rank

DTYPES = [torch.float32, torch.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_size = pytest.mark.parametrize("size", [1, 4])


def close(found: Tensor, expected: Tensor) -> None:
    """Within the tolerance of ``linear``; ranks sum in another order."""
    atol, rtol = ir.ops.linear.get_tolerance(expected.dtype)
    atol = max(atol, 8 * torch.finfo(expected.dtype).eps)
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


def reference(
    inputs: int, outputs: int, bias: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias).to(dtype).requires_grad_(False)


def load(layer: LinearBase, theirs: nn.Module, *shard: object) -> None:
    """Fill *layer* through the loaders of its parameters."""
    for name, tensor in theirs.named_parameters():
        param: Any = layer.get_parameter(name)
        assert param.weight_loader(param, tensor.data, *shard) is None


def only(rank: int, size: int) -> TensorParallel:
    """A rank without others."""

    def gather(x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat([x] * size, dim)

    return TensorParallel(rank, size, lambda x: x, gather)


@each_dtype
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [ReplicatedLinear, ColumnParallelLinear, RowParallelLinear])
def test_one_rank_is_linear(
    kind: Callable[..., LinearBase], bias: bool, dtype: torch.dtype
) -> None:
    theirs = reference(24, 16, bias, dtype)
    layer = kind(24, 16, bias, params_dtype=dtype)
    load(layer, theirs)
    assert {n: p.shape for n, p in layer.named_parameters()} == {
        n: p.shape for n, p in theirs.named_parameters()
    }
    base = torch.randn(5, 30).to(dtype)
    transposed = torch.randn(24, 3, 2).to(dtype).transpose(0, 2)
    for x in (base[:, :24], base[0, :24], base[:0, :24], transposed):
        y, returned = layer(x)
        assert returned is None
        close(y, theirs(x))
    twin = copy.deepcopy(layer)
    twin.load_state_dict(theirs.state_dict(), strict=True)
    assert torch.equal(twin(base[:, :24])[0], layer(base[:, :24])[0])


@pytest.mark.parametrize("kind", [ReplicatedLinear, ColumnParallelLinear, RowParallelLinear])
def test_what_is_returned(kind: Callable[..., LinearBase]) -> None:
    theirs, x = reference(4, 6), torch.randn(3, 4)
    for skip, returns in ((False, False), (True, False), (False, True), (True, True)):
        layer = kind(4, 6, skip_bias_add=skip, return_bias=returns)
        load(layer, theirs)
        y, bias = layer(x) if returns else (layer(x), None)
        close(y, x @ theirs.weight.T if skip else theirs(x))
        assert bias is (layer.bias if skip and returns else None)


@each_size
@each_dtype
@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
def test_a_column_and_a_row(size: int, dtype: torch.dtype, divided: bool) -> None:
    """As in an MLP: what one returns, the other takes."""
    first, second = reference(12, 32, dtype=dtype), reference(32, 10, dtype=dtype)
    x = torch.randn(2, 3, 12).to(dtype)

    def make() -> nn.Sequential:
        up = ColumnParallelLinear(12, 32, params_dtype=dtype, return_bias=False)
        down = RowParallelLinear(32, 10, params_dtype=dtype, return_bias=False)
        ours = nn.Sequential(up, down)
        for param, tensor, dim in (
            (up.weight, first.weight, 0),
            (up.bias, first.bias, 0),
            (down.weight, second.weight, 1),
            (down.bias, second.bias, None),
        ):
            part = tensor.chunk(size, dim)[up.tp_rank] if divided and dim is not None else tensor
            param.weight_loader(param, part)  # type: ignore[union-attr]
        return ours

    found = ranks(size, make, lambda rank, layer: layer(x))
    assert len(found) == size
    for y in found:
        close(y, second(first(x)))


@each_size
def test_a_gathered_column_and_a_row_that_takes_its_own(size: int) -> None:
    theirs, x = reference(16, 24), torch.randn(3, 16)

    def column() -> LinearBase:
        layer = ColumnParallelLinear(16, 24, gather_output=True, skip_bias_add=True)
        load(layer, theirs)
        return layer

    def row() -> LinearBase:
        layer = RowParallelLinear(16, 24, input_is_parallel=False, return_bias=False)
        load(layer, theirs)
        return layer

    def run(rank: int, layer: LinearBase) -> Tensor:
        y, bias = layer(x)
        result: Tensor = y + bias
        return result

    for y in [*ranks(size, column, run), *ranks(size, row, lambda rank, layer: layer(x))]:
        close(y, theirs(x))


def test_parts_of_the_sum_and_a_bias_for_later() -> None:
    theirs, x, parts = reference(8, 6), torch.randn(3, 8), []
    for rank in range(2):
        with tensor_parallel(only(rank, 2)):
            layer = RowParallelLinear(8, 6, reduce_results=False, skip_bias_add=True)
        load(layer, theirs)
        y, bias = layer(x.chunk(2, -1)[rank])
        assert bias is layer.bias
        parts.append(y)
    close(parts[0] + parts[1] + theirs.bias, theirs(x))


@pytest.mark.parametrize(
    ("size", "how", "gathers"),
    [(1, "all", True), (2, "own", False), (2, "each", True), (4, "all", True), (8, "each", False)],
)
def test_merged_columns(size: int, how: str, gathers: bool) -> None:
    sizes = [16, 8, 32]
    theirs, x = [reference(12, n) for n in sizes], torch.randn(3, 12)

    def load_all(layer: LinearBase, rank: int) -> None:
        for param, name in ((layer.weight, "weight"), (layer.bias, "bias")):
            tensors = [getattr(linear, name) for linear in theirs]
            own = [t.chunk(size)[rank] for t in tensors]
            loader: Any = param.weight_loader  # type: ignore[union-attr]
            if how == "each":
                for i, tensor in enumerate(tensors):
                    loader(param, own[i] if i == 1 else tensor, i)
            else:
                loader(param, torch.cat(tensors if how == "all" else own))

    def make() -> LinearBase:
        layer = MergedColumnParallelLinear(12, sizes, gather_output=gathers, return_bias=False)
        load_all(layer, layer.tp_rank)
        return layer

    for rank, y in enumerate(ranks(size, make, lambda rank, layer: layer(x))):
        whole = [linear(x) for linear in theirs]
        close(y, torch.cat(whole if gathers else [t.chunk(size, -1)[rank] for t in whole], -1))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(8, 8, 1), (8, 2, 2), (8, 2, 4), (8, 2, 8), (8, 1, 8), (8, None, 4), (4, 4, 4), (8, 1, 1)],
)
@pytest.mark.parametrize("how", ["each", "all", "own"])
def test_heads(heads: int, kv_heads: int | None, size: int, how: str) -> None:
    """Ranks beyond the key heads share them, in neighboring groups."""
    head, v_head, x, kv = 6, 4, torch.randn(3, 12), kv_heads or heads
    theirs = {
        "q": reference(12, heads * head),
        "k": reference(12, kv * head),
        "v": reference(12, kv * v_head),
    }
    for rank in range(size):
        with tensor_parallel(only(rank, size)):
            layer = QKVParallelLinear(12, head, heads, kv_heads, v_head_size=v_head)
        replicas = max(1, size // kv)
        assert (layer.num_heads, layer.num_kv_heads) == (heads // size, max(1, kv // size))
        assert layer.num_kv_head_replicas == replicas
        share = {"q": (rank, size), "k": (rank // replicas, size // replicas)}
        share["v"] = share["k"]

        def own(key: str, t: Tensor, dim: int, share: Any = share) -> Tensor:
            index, count = share[key]
            part: Tensor = t.chunk(count, dim)[index]
            return part

        for name in ("weight", "bias"):
            param: Any = layer.get_parameter(name)
            tensors = {key: getattr(linear, name) for key, linear in theirs.items()}
            if how == "each":
                for key, tensor in tensors.items():
                    param.weight_loader(param, tensor, key)
            else:
                parts = [t if how == "all" else own(key, t, 0) for key, t in tensors.items()]
                param.weight_loader(param, torch.cat(parts))
        expected = [own(key, linear(x), -1) for key, linear in theirs.items()]
        close(layer(x)[0], torch.cat(expected, -1))


def test_disabled_parallelism_is_one_rank() -> None:
    with tensor_parallel(only(1, 3)):
        for layer in (
            ColumnParallelLinear(4, 5, gather_output=True, disable_tp=True),
            RowParallelLinear(4, 5, disable_tp=True),
            ReplicatedLinear(4, 5, disable_tp=True),
            MergedColumnParallelLinear(4, [2, 3], disable_tp=True),
            QKVParallelLinear(4, 1, 3, 1, disable_tp=True),
        ):
            assert (layer.tp_size, layer.weight.shape) == (1, (5, 4))
            x, theirs = torch.randn(2, 4), reference(4, 5)
            load(layer, theirs)
            close(layer(x)[0], theirs(x))


class Int8:
    """Weights of 8 bits, with a scale for each output and one that nobody divides."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Int8 | None:
        return None if "skip" in prefix else self

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attrs: Any,
    ) -> None:
        rows, count = sum(output_partition_sizes), len(output_partition_sizes)
        weight = torch.empty(rows, input_size_per_partition, dtype=torch.int8)
        for name, data, dims in (
            ("weight", weight, {"output_dim": 0, "input_dim": 1}),
            ("scale", torch.empty(rows), {"output_dim": 0}),
            ("block_scale", torch.empty(rows // 4), {"output_dim": 0}),
            ("part_scale", torch.empty(count), {}),
        ):
            param = nn.Parameter(data, requires_grad=False)
            set_weight_attrs(param, **attrs, **dims)
            layer.register_parameter(name, param)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = ir.ops.linear_w8a16(x, layer.weight, layer.scale, bias)
        return y


def test_a_quantization_method() -> None:
    weight = torch.randint(-127, 128, (24, 12), dtype=torch.int8)
    scale, blocks, x = torch.rand(24), torch.rand(6), torch.randn(3, 12)
    expected = x @ (weight * scale[:, None]).T
    for rank in range(2):
        with tensor_parallel(only(rank, 2)):
            layer: Any = MergedColumnParallelLinear(12, [16, 8], bias=False, quant_config=Int8())
            row: Any = RowParallelLinear(12, 24, bias=False, quant_config=Int8())
            plain = ReplicatedLinear(12, 24, quant_config=Int8(), prefix="skip.me")
        params: dict[str, Any] = dict(layer.named_parameters())
        for i, rows in enumerate((slice(0, 16), slice(16, 24))):
            params["weight"].weight_loader(params["weight"], weight[rows], i)
            params["scale"].weight_loader(params["scale"], scale[rows], i)
            params["part_scale"].weight_loader(params["part_scale"], torch.tensor(2.0 + i), i)
        params["block_scale"].weight_loader(params["block_scale"], blocks)
        own = [slice(8 * rank, 8 * rank + 8), slice(16 + 4 * rank, 20 + 4 * rank)]
        close(layer(x)[0], torch.cat([expected[:, rows] for rows in own], -1))
        assert layer.part_scale.tolist() == [2.0, 3.0]
        assert torch.equal(layer.block_scale, blocks[[2 * rank, 2 * rank + 1, 4 + rank]])
        row.weight.weight_loader(row.weight, weight)
        assert torch.equal(row.weight, weight.chunk(2, 1)[rank])
        assert isinstance(plain.quant_method, UnquantizedLinearMethod)


def test_numbers_and_other_dtypes_load() -> None:
    layer = ReplicatedLinear(1, 1, params_dtype=torch.bfloat16)
    bias: Any = layer.bias
    bias.weight_loader(bias, torch.tensor(3.0))
    assert layer.bias is not None
    assert layer.bias.tolist() == [3.0]
    assert layer.bias.dtype is torch.bfloat16


def test_the_default_dtype_and_device() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            layer = ColumnParallelLinear(4, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (layer.weight.dtype, layer.weight.device.type) == (torch.bfloat16, "meta")
    assert repr(layer) == "ColumnParallelLinear(4, 8, bias=True)"
    with tensor_parallel(only(1, 2)):
        assert repr(RowParallelLinear(4, 8, False)).endswith("(4, 8, bias=False, rank=1 of 2)")


BUILT_WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: ColumnParallelLinear(4, 6), ShardingError, "output_size=6.*4"),
    (lambda: RowParallelLinear(6, 4), ShardingError, "input_size=6.*4"),
    (lambda: MergedColumnParallelLinear(4, [8, 6]), ShardingError, r"output_sizes\[1\]=6"),
    (lambda: MergedColumnParallelLinear(4, []), LayerArgumentError, "output_sizes"),
    (lambda: QKVParallelLinear(4, 2, 6), ShardingError, "total_num_heads=6"),
    (lambda: QKVParallelLinear(4, 2, 12, 6), ShardingError, "total_num_kv_heads=6"),
    (lambda: QKVParallelLinear(4, 2, 12, 3), ShardingError, "total_num_kv_heads=3.*shared"),
    (lambda: RowParallelLinear(8, 4, reduce_results=False), LayerArgumentError, "skip_bias_add"),
]


@pytest.mark.parametrize(("build", "error", "message"), BUILT_WRONG)
def test_sizes_that_do_not_fit(
    build: Callable[[], object], error: type[Exception], message: str
) -> None:
    with tensor_parallel(only(0, 4)), pytest.raises(error, match=message) as caught:
        build()
    assert isinstance(caught.value, ValueError)


def test_weights_that_do_not_fit() -> None:
    with tensor_parallel(only(0, 2)):
        column: Any = ColumnParallelLinear(4, 8, prefix="model.up")
        row: Any = RowParallelLinear(8, 4)
        merged: Any = MergedColumnParallelLinear(4, [8, 4], quant_config=Int8(), bias=False)
        qkv: Any = QKVParallelLinear(4, 2, 4, 2)
        shared: Any = QKVParallelLinear(4, 2, 4, 1)  # both ranks have the key head
    with pytest.raises(WeightLoadError, match=r"\(16, 4\); it takes \(8, 4\)"):
        shared.weight.weight_loader(shared.weight, torch.ones(16, 4))
    with pytest.raises(WeightLoadError, match=r"model.up: weight.*\(5, 4\).*\(8, 4\), or \(4, 4\)"):
        column.weight.weight_loader(column.weight, torch.ones(5, 4))
    with pytest.raises(WeightLoadError, match=r"bias.*\(4,\)"):
        row.bias.weight_loader(row.bias, torch.ones(2))
    with pytest.raises(WeightLoadError, match=r"\(4, 8\), or \(4, 4\)"):
        row.weight.weight_loader(row.weight, torch.ones(4))
    with pytest.raises(WeightLoadError, match=r"part 'k',.*\(4, 4\), or \(2, 4\)"):
        qkv.weight.weight_loader(qkv.weight, torch.ones(8, 4), "k")
    with pytest.raises(LayerArgumentError, match=r"loaded_shard_id=0.*'q', 'k', 'v'"):
        qkv.weight.weight_loader(qkv.weight, torch.ones(8, 4), 0)
    with pytest.raises(WeightLoadError, match=r"1 rows.*in proportion"):
        merged.block_scale.weight_loader(merged.block_scale, torch.ones(3))
    replicated: Any = ReplicatedLinear(2, 3)
    with pytest.raises(WeightLoadError, match=r"ReplicatedLinear: weight.*takes \(3, 2\)\. The"):
        replicated.weight.weight_loader(replicated.weight, torch.ones(2, 3))


# The linear method of 8-bit weights and activations: shapes, sharding, schemes.

FP8 = torch.float8_e4m3fn
BLOCKS = W8A8Method(FP8, block_rows=128)


def unused(x: Tensor, dim: int = -1) -> Tensor:
    raise AssertionError("nothing is computed")


def shapes(layer: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in layer.named_parameters()}


def test_parameters() -> None:
    layer = MergedColumnParallelLinear(256, [192, 64], bias=False)
    layer.set_quant_method(W8A8Method(torch.int8))
    assert shapes(layer) == {"weight": (256, 256), "scale": (256,)}
    layer.set_quant_method(W8A8Method(FP8, ActivationScheme(is_static=True)))
    assert shapes(layer) == {"weight": (256, 256), "scale": (256,), "input_scale": (2,)}
    layer.set_quant_method(BLOCKS.for_outputs([192, 64]))
    assert shapes(layer) == {"weight": (256, 256), "scale": (4, 2)}
    with pytest.raises(LayerArgumentError, match=r"block_rows=128 does not divide .*\[192, 64\]"):
        layer.set_quant_method(BLOCKS)


def test_inputs_are_sharded_by_whole_groups() -> None:
    with tensor_parallel(TensorParallel(1, 2, unused, unused)):
        layer = RowParallelLinear(256, 128, bias=False)
        layer.set_quant_method(BLOCKS)
        assert shapes(layer) == {"weight": (128, 128), "scale": (1, 1)}
        layer = RowParallelLinear(384, 128, bias=False, prefix="down")
        with pytest.raises(ShardingError, match=r"down: .* 192 of 384 inputs are not a multiple"):
            layer.set_quant_method(BLOCKS)


@pytest.mark.parametrize("narrow", [torch.int8, FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_schemes(narrow: torch.dtype, dtype: torch.dtype) -> None:
    x, largest = torch.randn(5, 256).to(dtype), 127 if narrow is torch.int8 else 448
    for scheme in (ActivationScheme(), ActivationScheme(is_static=True)):
        layer = ReplicatedLinear(256, 64, bias=False, return_bias=False)
        layer.set_quant_method(W8A8Method(narrow, scheme))
        weight = torch.randn(64, 256)
        scale = weight.abs().amax(1) / largest
        codes = weight / scale[:, None]
        codes = codes.round() if narrow is torch.int8 else codes
        layer.weight.data.copy_(codes.to(narrow))
        layer.scale.data.copy_(scale)
        if scheme.is_static:
            layer.input_scale.data.fill_(float(x.abs().max()) / largest)
        found, wanted = layer(x), x.float() @ weight.T
        assert found.dtype is dtype
        assert (found - wanted).norm() < (0.02 if narrow is torch.int8 else 0.06) * wanted.norm()


def test_an_upper_bound_limits_the_scale() -> None:
    x = torch.tensor([[1.04, 100.0], [1.0, 2.0]])
    codes, scale = W8A8Method(FP8, ActivationScheme(upper_bound=4.48)).quantized(x)
    torch.testing.assert_close(scale, torch.tensor([[0.01], [2 / 448]]))
    assert codes[0].tolist() == [104.0, 448.0]


# Tensor parallelism: what a layer is told, and torch.distributed behind it.


def no_gather(x: Tensor, dim: int = -1) -> Tensor:
    raise AssertionError


def rank_of(rank: int, size: int) -> TensorParallel:
    return TensorParallel(rank, size, torch.neg, no_gather)


def test_by_default_there_is_one_rank() -> None:
    parallel, x = current_tensor_parallel(), torch.ones(2)
    assert (parallel.rank, parallel.size) == (0, 1)
    assert parallel.all_reduce(x) is x
    assert parallel.all_gather(x, dim=0) is x


def test_a_scope_ends() -> None:
    with tensor_parallel(rank_of(1, 4)):
        assert current_tensor_parallel().rank == 1
        layer = ColumnParallelLinear(3, 8)
        with tensor_parallel(TensorParallel()):
            assert current_tensor_parallel().size == 1
        assert current_tensor_parallel().size == 4
    assert current_tensor_parallel().size == 1
    assert (layer.tp_rank, layer.tp_size) == (1, 4)


def test_mistakes() -> None:
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ShardingError, match=f"rank={rank}.*size={size}"):
            rank_of(rank, size)
    with pytest.raises(ShardingError, match="size=2 ranks need all_reduce"):
        TensorParallel(0, 2)
    with pytest.raises(ShardingError, match=r"heads=6.*4 tensor-parallel ranks"):
        rank_of(0, 4).divide(6, "heads")
    with pytest.raises(ShardingError, match="init_process_group"):
        TensorParallel.from_process_group()


def test_two_processes(tmp_path: Path) -> None:
    spawn: Any = multiprocessing.spawn  # type: ignore[attr-defined]
    spawn(run_rank, (tmp_path,), nprocs=RANKS)
    for rank in range(RANKS):
        outcome = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert outcome == {"place": [rank, RANKS], "gathered": True, "reduced": True, "model": True}


@pytest.fixture
def pretended_group() -> Iterator[None]:
    """Two ranks, of which only the second exists, and nothing is exchanged."""
    distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=1, world_size=RANKS)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("pretended_group")
def test_collectives_are_traced() -> None:
    parallel = TensorParallel.from_process_group()
    assert (parallel.rank, parallel.size) == (1, RANKS)
    with tensor_parallel(parallel):
        model = Model()
    torch.compiler.reset()
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    found = torch.compile(model, backend=backend, fullgraph=True)(torch.tensor([1, 2]))
    assert found.shape == (2, 6)
    (targets,) = graphs
    assert sum("all_reduce" in target for target in targets) == 2
    assert sum("all_gather_into_tensor" in target for target in targets) == 1


@pytest.mark.usefixtures("pretended_group")
def test_groups_of_some_processes() -> None:
    alone = distributed.new_group([1])
    assert TensorParallel.from_process_group(alone) == TensorParallel()
    with pytest.raises(ShardingError, match="rank 1 of all, is not in"):
        TensorParallel.from_process_group(distributed.new_group([0]))
