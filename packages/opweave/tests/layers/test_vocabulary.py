"""The vocabulary divided over ranks: lookups bit for bit, heads, and which row is whose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from opweave import ir
from opweave.layers import (
    LayerArgumentError,
    LayerCallError,
    LogitsProcessor,
    ParallelLMHead,
    ShardingError,
    TensorParallel,
    VocabParallelEmbedding,
    WeightLoadError,
    tensor_parallel,
)
from opweave.layers.linear_methods import (
    LayerSizes,
    MethodOfWeights,
    UnquantizedLinearMethod,
    Weight,
)

from .switch import ranks


def only(rank: int, size: int) -> TensorParallel:
    """A rank without others."""
    return TensorParallel(rank, size, lambda x: x, lambda x, dim=-1: x)


def load(param: Any, tensor: Tensor) -> None:
    param.weight_loader(param, tensor)


@pytest.mark.parametrize(
    ("vocab", "org", "size", "index"),
    [
        (1026, 1010, 2, torch.int64),
        (1010, 1010, 1, torch.int32),
        (1010, 1010, 8, torch.int64),
        (64, 1, 4, torch.int32),
        (1500, 300, 1, torch.int64),
        (32256, 32000, 4, torch.int32),
        (128256, 128256, 2, torch.int64),
    ],
    ids=str,
)
def test_ranks_together_are_the_whole_table(
    vocab: int, org: int, size: int, index: torch.dtype
) -> None:
    table = torch.randn(vocab, 6, dtype=torch.bfloat16)
    ids = torch.cat([torch.randint(vocab, (40,)), torch.tensor([0, org - 1, org % vocab])])
    for shape in ((43,), (1, 43, 1)):
        shaped = ids.to(index).view(shape)

        def make() -> VocabParallelEmbedding:
            layer = VocabParallelEmbedding(
                vocab, 6, org_num_embeddings=org, params_dtype=torch.bfloat16
            )
            layer.weight.data.fill_(float("nan"))
            load(layer.weight, table)
            return layer

        def run(rank: int, layer: nn.Module, ids: Tensor = shaped) -> Tensor:
            found: Tensor = layer(ids)
            return found

        for found in ranks(size, make, run):
            assert torch.equal(found, functional.embedding(shaped, table))


def test_the_rows_of_two_ranks() -> None:
    """1010 ids and 16 added ones: base ids and their padding come first, on each rank."""
    table = torch.arange(1026.0)[:, None].expand(-1, 3) + 1
    expected = {
        0: [*range(512), *range(1010, 1026), *[-1] * 16],
        1: [*range(512, 1010), *[-1] * 14, *[-1] * 32],
    }
    rows = []
    for rank in range(2):
        with tensor_parallel(only(rank, 2)):
            layer = VocabParallelEmbedding(1026, 3, org_num_embeddings=1010)
        assert (layer.org_vocab_size_padded, layer.num_embeddings_padded) == (1024, 1088)
        assert layer.num_embeddings_per_partition == 544
        load(layer.weight, table)
        assert layer.weight[:, 0].tolist() == [i + 1.0 for i in expected[rank]]
        rows.append(layer.weight.clone())
        load(layer.weight, rows[-1] + 1)  # this rank's part
        assert torch.equal(layer.weight, rows[-1] + 1)
        load(layer.weight, table[:1010])  # a checkpoint without the added ids
        assert layer.weight[512:].count_nonzero() == 0
        assert torch.equal(layer.weight[:498], rows[-1][:498])
        found = layer(torch.tensor([511, 512]))
        assert found[:, 0].tolist() == ([512.0, 0.0] if rank == 0 else [0.0, 513.0])
    order = layer.get_sharded_to_full_mapping()
    assert order is not None
    assert sorted(order) == list(range(1088))
    whole = torch.cat(rows)[order]
    assert torch.equal(whole[:1026], table)
    assert whole[1026:].count_nonzero() == 0
    assert VocabParallelEmbedding(1026, 3).get_sharded_to_full_mapping() is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bits_are_summed_as_bytes(dtype: torch.dtype) -> None:
    table, ids = torch.randn(100, 4).to(dtype), torch.randint(100, (30,))

    def make() -> VocabParallelEmbedding:
        layer = VocabParallelEmbedding(100, 4, dtype)
        load(layer.weight, table)
        return layer

    for found in ranks(2, make, lambda rank, layer: layer(ids)):
        assert found.dtype is dtype
        assert torch.equal(found.float(), table[ids].float())


def test_parts_that_are_not_summed_and_parallelism_that_is_disabled() -> None:
    table, ids, parts = torch.randn(70, 4), torch.arange(70), []
    for rank in range(2):
        with tensor_parallel(only(rank, 2)):
            layer = VocabParallelEmbedding(70, 4, reduce_results=False)
            whole = VocabParallelEmbedding(70, 4, disable_tp=True)
        load(layer.weight, table)
        load(whole.weight, table)
        parts.append(layer(ids))
        assert torch.equal(whole(ids), table)
    assert torch.equal(parts[0] + parts[1], table)
    assert parts[1][:64].count_nonzero() == 0
    assert repr(layer) == "VocabParallelEmbedding(70, 4, rank=1 of 2)"


def test_ids_that_are_not_there() -> None:
    layer = VocabParallelEmbedding(64, 4)
    for bad in (64, -1):
        with pytest.raises(IndexError):
            layer(torch.tensor([bad]))
    assert layer(torch.empty(0, 2, dtype=torch.int32)).shape == (0, 2, 4)


class Scaled(MethodOfWeights):
    """A table of 8 bits with one scale."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return {"head": UnquantizedLinearMethod(), "table": self}.get(prefix)

    def weights(self, sizes: LayerSizes) -> Iterator[Weight]:
        yield Weight("weight", (sizes.rows, sizes.inputs), torch.int8, {"output_dim": 0})
        yield Weight("scale", (1,), torch.float32, {})

    def embedding(self, layer: VocabParallelEmbedding, input_ids: Tensor) -> Tensor:
        shard, scale = layer.shard, layer.get_parameter("scale")
        rows: Tensor = ir.ops.masked_embedding(
            input_ids, layer.weight, shard.org_start, shard.org_end
        )
        return rows.float() * scale

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = ir.ops.linear_w8a16(x, layer.weight, layer.scale, bias)
        return y


def test_a_quantized_table() -> None:
    table, ids = torch.randint(-127, 128, (100, 4), dtype=torch.int8), torch.arange(100)

    def make() -> VocabParallelEmbedding:
        layer = VocabParallelEmbedding(100, 4, quant_config=Scaled(), prefix="table")
        load(layer.weight, table)
        load(layer.get_parameter("scale"), torch.tensor(0.5))
        return layer

    for found in ranks(2, make, lambda rank, layer: layer(ids)):
        assert torch.equal(found, table * 0.5)
    assert ParallelLMHead(100, 4, quant_config=Scaled(), prefix="head").weight.shape == (128, 4)
    with pytest.raises(LayerArgumentError, match="UnquantizedLinearMethod has no embedding"):
        VocabParallelEmbedding(100, 4, quant_config=Scaled(), prefix="head")


def test_a_head() -> None:
    bias = torch.randn(100)
    for rank in range(2):
        with tensor_parallel(only(rank, 2)):
            head = ParallelLMHead(100, 4, bias=True)
            embedding = VocabParallelEmbedding(100, 4)
            other = VocabParallelEmbedding(200, 4)
        load(head.bias, bias)
        expected = torch.cat([bias, torch.zeros(28)])[64 * rank : 64 * rank + 64]
        assert head.bias is not None
        assert torch.equal(head.bias, expected)
        assert head.tie_weights(embedding) is head
        assert head.weight is embedding.weight
        with pytest.raises(LayerArgumentError, match=r"\(64, 4\) and cannot be tied.*\(128, 4\)"):
            head.tie_weights(other)
    with pytest.raises(RuntimeError, match="LogitsProcessor") as caught:
        head(torch.tensor([1]))
    assert isinstance(caught.value, LayerCallError)
    assert dict(ParallelLMHead(100, 4).named_parameters()).keys() == {"weight"}


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: VocabParallelEmbedding(100, 4, padding_size=1), ShardingError, "vocabulary"),
        (
            lambda: VocabParallelEmbedding(97, 4, org_num_embeddings=96, padding_size=3),
            ShardingError,
            "added vocabulary",
        ),
        (
            lambda: VocabParallelEmbedding(9, 4, org_num_embeddings=10),
            LayerArgumentError,
            "org_num_embeddings=10",
        ),
        (lambda: VocabParallelEmbedding(9, 4, padding_size=0), LayerArgumentError, "padding_size"),
    ],
)
def test_sizes_that_do_not_fit(
    build: Callable[[], object], error: type[Exception], message: str
) -> None:
    with tensor_parallel(only(0, 8)), pytest.raises(error, match=message):
        build()


def test_weights_that_do_not_fit() -> None:
    with tensor_parallel(only(1, 2)):
        layer = VocabParallelEmbedding(1026, 4, org_num_embeddings=1010, prefix="model.embed")
    for shape in ((1011, 4), (1010, 5), (4,)):
        with pytest.raises(WeightLoadError, match=r"model.embed: weight"):
            load(layer.weight, torch.ones(shape))
    with pytest.raises(
        WeightLoadError,
        match=r"takes \(1010, 4\) or \(1026, 4\), a row for each id, or \(544, 4\),",
    ):
        load(layer.weight, torch.ones(1024, 4))


def test_a_table_of_the_padded_size_is_of_another_vocabulary() -> None:
    head = ParallelLMHead(100, 4, bias=True)
    with pytest.raises(
        WeightLoadError, match=r"\(128, 4\); it takes \(100, 4\), a row for each id\."
    ):
        load(head.weight, torch.ones(128, 4))
    with pytest.raises(WeightLoadError, match=r"\(128,\); it takes \(100,\), a row for each id\."):
        load(head.bias, torch.ones(128))


# Logits: those of the models that cap and scale them, on any number of ranks.

VOCAB, HIDDEN = 100, 16


def head(
    weight: Tensor, org: int | None = None, bias: Tensor | None = None, **options: Any
) -> ParallelLMHead:
    layer = ParallelLMHead(
        len(weight),
        weight.shape[1],
        bias is not None,
        weight.dtype,
        org_num_embeddings=org,
        **options,
    )
    layer.weight.data.fill_(float("nan"))
    for param, tensor in ((layer.weight, weight), (layer.bias, bias)):
        if param is not None:
            param.weight_loader(param, tensor)  # type: ignore[attr-defined]
    return layer


def models() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name in transformers, what its configuration adds, and our options."""
    return [
        ("Gemma2", {"final_logit_softcapping": 3.0, "head_dim": 8}, {"soft_cap": 3.0}),
        ("Granite", {"logits_scaling": 4.0}, {"scale": 1 / 4.0}),
        ("Cohere", {"logit_scale": 0.0625}, {"scale": 0.0625}),
    ]


@pytest.mark.parametrize(("name", "config", "options"), models(), ids=lambda v: str(v)[:8])
def test_other_peoples_models(name: str, config: dict[str, Any], options: dict[str, Any]) -> None:
    import transformers

    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made = getattr(transformers, f"{name}Config")(**sizes, **heads, **ends, **config)
    model = getattr(transformers, f"{name}ForCausalLM")(made).eval()
    model.lm_head.weight.data.normal_()
    ids = torch.randint(VOCAB, (1, 5))
    with torch.no_grad():
        hidden, theirs = model.model(ids).last_hidden_state, model(ids).logits
        process = LogitsProcessor(VOCAB, **options)

        def make() -> ParallelLMHead:
            return head(model.lm_head.weight)

        for size in (1, 2):
            for found in ranks(size, make, lambda rank, layer: process(layer, hidden)):
                torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)
            tops = ranks(size, make, lambda rank, layer: process.get_top_tokens(layer, hidden))
            for top in tops:
                assert torch.equal(top, theirs.argmax(-1))


@pytest.mark.parametrize(
    ("org", "wanted", "dtype", "size"),
    [
        (VOCAB, VOCAB, torch.bfloat16, 2),
        (VOCAB, 90, torch.float32, 4),
        (70, VOCAB, torch.float32, 1),
        (70, VOCAB, torch.bfloat16, 4),
        (70, 70, torch.float32, 1),
        (70, 70, torch.bfloat16, 2),
        (70, 80, torch.float32, 8),
    ],
    ids=str,
)
def test_logits_are_in_the_order_of_ids(
    org: int, wanted: int, dtype: torch.dtype, size: int
) -> None:
    """Also where added ids have rows after the padding of each rank."""
    weight, bias = torch.randn(VOCAB, HIDDEN).to(dtype), torch.randn(VOCAB).to(dtype)
    hidden = torch.randn(2, 3, HIDDEN).to(dtype)
    process = LogitsProcessor(VOCAB, wanted, scale=0.5, soft_cap=20.0)
    logits = nn.functional.linear(hidden, weight, bias)
    expected = (20 * torch.tanh(logits / 20) * 0.5)[..., :wanted]

    def make() -> ParallelLMHead:
        return head(weight, org, bias)

    atol = 1e-5 if dtype is torch.float32 else 8e-2
    found = ranks(size, make, lambda rank, layer: process(layer, hidden, layer.bias))
    assert all(torch.equal(f, found[0]) for f in found)
    torch.testing.assert_close(found[0], expected, atol=atol, rtol=1e-2)
    without = ranks(size, make, lambda rank, layer: process(layer, hidden))
    assert not torch.equal(without[0], found[0])
    tops = ranks(size, make, lambda rank, layer: process.get_top_tokens(layer, hidden, layer.bias))
    for top in tops:
        assert top.dtype is torch.int64
        assert torch.equal(top, found[0].argmax(-1))


INF, NAN = float("inf"), float("nan")
TIES: list[tuple[float, dict[int, float], tuple[int, int]]] = [
    # the logit of most ids, those of others, and who wins: without a cap, and with one
    (0.0, {20: 3.0, 68: 3.0, 95: 3.0}, (20, 20)),
    (0.0, {95: 3.0, 72: 3.0}, (72, 72)),
    (-5.0, {}, (0, 0)),  # less than the zeros of padding
    (-INF, {}, (0, 0)),
    (0.0, {97: NAN, 40: NAN, 3: INF}, (40, 40)),
    (0.0, {99: INF, 72: INF}, (72, 72)),
    (0.0, {60: 300.0, 80: 400.0}, (80, 60)),
]


@pytest.mark.parametrize(
    ("cap", "org", "size"), [(None, VOCAB, 1), (2.0, VOCAB, 4), (None, 70, 2), (2.0, 70, 1)]
)
def test_ties_and_values_that_are_no_numbers(cap: float | None, org: int, size: int) -> None:
    """The lowest id wins, as in ``argmax``, over all ranks and over added ids."""
    process = LogitsProcessor(VOCAB, soft_cap=cap)
    for most, others, winners in TIES:
        weight = torch.full((VOCAB, 1), most)
        for token, logit in others.items():
            weight[token] = logit

        def make(weight: Tensor = weight) -> ParallelLMHead:
            return head(weight, org)

        def run(rank: int, layer: ParallelLMHead) -> Tensor:
            found: Tensor = process.get_top_tokens(layer, torch.ones(1, 1))
            return found

        assert [top.tolist() for top in ranks(size, make, run)] == [
            [winners[cap is not None]]
        ] * size


def test_a_rank_by_itself_and_logits_as_input() -> None:
    weight, hidden = torch.randn(VOCAB, HIDDEN), torch.randn(3, HIDDEN)
    process = LogitsProcessor(VOCAB, 90, soft_cap=1.5, scale=3.0)

    def local(rank: int, layer: ParallelLMHead) -> Tensor:
        found: Tensor = process(layer, hidden, skip_gather=True)
        return found

    parts = ranks(2, lambda: head(weight), local)
    assert [part.shape for part in parts] == [(3, 64), (3, 64)]
    whole = process(head(weight), hidden)
    torch.testing.assert_close(torch.cat(parts, -1)[:, :90], whole)
    plain = LogitsProcessor(VOCAB)(head(weight), hidden)
    given = LogitsProcessor(VOCAB, logits_as_input=True, soft_cap=1.5, scale=3.0)
    torch.testing.assert_close(given(head(weight), plain)[:, :90], whole)
    tops = given.get_top_tokens(head(weight), plain)
    assert torch.equal(tops, given(head(weight), plain).argmax(-1))
    assert torch.equal(LogitsProcessor(VOCAB)(head(weight), hidden[:0]), plain[:0])
    assert process.get_top_tokens(head(weight), hidden[:0]).shape == (0,)


def test_a_head_in_another_dtype() -> None:
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16)
    bias = torch.randn(VOCAB, dtype=torch.bfloat16)
    hidden, layer = torch.randn(3, HIDDEN, dtype=torch.bfloat16), head(weight, bias=bias)
    process = LogitsProcessor(VOCAB, head_dtype=torch.float32)
    found = process(layer, hidden, layer.bias)
    expected = nn.functional.linear(hidden.float(), weight.float(), bias.float())
    torch.testing.assert_close(found, expected)
    layer.quant_method = UnquantizedLinearMethod()
    with pytest.raises(LayerArgumentError, match="UnquantizedLinearMethod"):
        process(layer, hidden)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_top_tokens_need_a_positive_scale(scale: float) -> None:
    with pytest.raises(ValueError, match=str(scale)) as caught:
        LogitsProcessor(VOCAB, scale=scale).get_top_tokens(
            head(torch.ones(VOCAB, HIDDEN)), torch.ones(1, HIDDEN)
        )
    assert isinstance(caught.value, LayerArgumentError)
