"""Logits: those of the models that cap and scale them, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opweave.layers import LayerArgumentError, LogitsProcessor, ParallelLMHead
from opweave.layers.linear_methods import UnquantizedLinearMethod

from .switch import ranks

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
