"""Every language model gives transformers' logits: at once, in steps, compiled, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from models import layer_checkpoints
from models.running import (
    GrowingCache,
    assert_near,
    compiled,
    each_codegen,
    expected,
    in_steps,
    on_ranks,
    step_context,
    whole,
)
from models.tiny_checkpoints import KINDS as LLAMAS
from models.tiny_checkpoints import PAD, random_ids
from opweave import ir
from opweave.ir.testing import restored
from opweave.layers import SequenceStates, StateCache, sequence_states
from opweave_engine import load_model
from opweave_engine.models import CausalLM, Mamba2ForCausalLM, forward_context

Checkpoints = Callable[[str], tuple[Path, Any]]
LAYERS = [kind for kind in layer_checkpoints.KINDS if not kind.startswith("bert")]
ONE_LAYER = [kind for kind in LAYERS if kind.endswith("one_layer")]
TOKENS = 17  # more than the sliding windows
OPS = {
    "embedding", "rms_norm", "fused_add_rms_norm", "linear", "rotary_embedding", "silu_and_mul",
    "causal_attention", "varlen_attention",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture
def built(checkpoint: Checkpoints, layer_checkpoint: Checkpoints) -> Checkpoints:
    return lambda kind: (checkpoint if kind in LLAMAS else layer_checkpoint)(kind)


def load(path: Path, dtype: str = "auto") -> CausalLM:
    model = load_model(path, dtype=dtype)
    assert isinstance(model, CausalLM)
    return model


def tokens(seed: int, count: int = TOKENS) -> Tensor:
    return torch.tensor(random_ids(seed, count))


@pytest.mark.parametrize("kind", [*LLAMAS, *LAYERS])
def test_logits_are_those_of_transformers(kind: str, built: Checkpoints) -> None:
    path, reference = built(kind)
    model, ids = load(path), tokens(1)
    logits = expected(reference, ids)
    assert logits.std() > 0.3  # a comparison of zeros would prove nothing
    assert_near(whole(model, ids), logits)
    assert_near(in_steps(model, ids, [6]), logits)
    if isinstance(model, Mamba2ForCausalLM):
        assert_near(in_steps(model, ids, [6, 11]), logits)


@pytest.mark.parametrize("kind", ["biases", *(kind for kind in LAYERS if kind not in ONE_LAYER)])
def test_two_ranks_give_the_same_logits(kind: str, built: Checkpoints) -> None:
    path, reference = built(kind)
    ids = tokens(3)
    logits = expected(reference, ids)
    for result in on_ranks(2, lambda: load(path), lambda m: (whole(m, ids), in_steps(m, ids, [9]))):
        assert_near(result[0], logits)
        assert_near(result[1], logits)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe_mixed"])
def test_two_ranks_share_experts_in_one_tensor(
    kind: str, built: Checkpoints, tmp_path: Path
) -> None:
    _, reference = built(kind)
    reference.save_pretrained(tmp_path, save_original_format=False)
    ids = tokens(4)
    for result in on_ranks(2, lambda: load(tmp_path), lambda model: whole(model, ids)):
        assert_near(result, expected(reference, ids))


@pytest.mark.parametrize("kind", ["deepseek", "gemma3"])
def test_packed_sequences_do_not_see_each_other(kind: str, built: Checkpoints) -> None:
    path, reference = built(kind)
    model = load(path)
    texts = [tokens(4 + i, n) for i, n in enumerate((5, 1, 7))]
    ends = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    positions = torch.cat([torch.arange(len(ids)) for ids in texts])
    with forward_context(step_context(ends, ends, GrowingCache())):
        logits = model.compute_logits(model(torch.cat(texts), positions))
    for ids, part in zip(texts, logits.split([5, 1, 7]), strict=True):
        assert_near(part, expected(reference, ids))


def test_packed_sequences_with_states(built: Checkpoints) -> None:
    path, reference = built("mamba2")
    model, cache = load(path), StateCache(4)
    texts = [tokens(3 + i, n) for i, n in enumerate((6, 5, 7))]
    logits: list[list[Tensor]] = [[], [], []]
    done = [0, 0, 0]
    for news in ([5, 0, 0], [1, 4, 0], [0, 1, 7]):
        order = [i for i in range(3) if news[i]]
        parts = [texts[i][done[i] : done[i] + news[i]] for i in order]
        states = SequenceStates.of(
            [news[i] for i in order], [done[i] for i in order], [3 - i for i in order], cache
        )
        starts = states.query_start_loc
        with forward_context(step_context(starts, starts, GrowingCache(), states)):
            packed = model.compute_logits(model(torch.cat(parts), torch.zeros(len(parts)).long()))
        for i, part in zip(order, packed.split([news[i] for i in order]), strict=True):
            logits[i].append(part)
            done[i] += news[i]
    for result, ids in zip(logits, texts, strict=True):
        assert_near(torch.cat(result), expected(reference, ids))


@pytest.mark.parametrize(
    "kind",
    ["llama3_rope", "qwen3", "qwen2", "deepseek", "gemma3", "mixtral", "mamba2", "mamba2_tied"],
)
def test_bfloat16_is_near_transformers(kind: str, built: Checkpoints) -> None:
    path, _ = built(kind)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    ids = tokens(6)
    logits, result = expected(reference, ids), whole(load(path, "bfloat16"), ids)
    assert result.dtype == torch.bfloat16
    # Experts whose scores are as close as bfloat16 is coarse are chosen either way.
    error = (result.float() - logits.float()).abs().mean() / logits.float().std()
    assert error < (0.03 if kind in LAYERS else 0.02)


@each_codegen
@pytest.mark.parametrize(
    "kind",
    [
        "gemma3",
        "deepseek_one_layer",
        "mamba2_one_layer",
        pytest.param("mixtral_one_layer", marks=pytest.mark.slow),
    ],
)
def test_compiled_is_the_same_and_one_graph(kind: str, codegen: bool, built: Checkpoints) -> None:
    path, reference = built(kind)
    model, ids = load(path), tokens(7)
    whole(model, ids)  # the first use of an op makes graphs from before it invalid
    run = compiled(model, codegen)
    logits = expected(reference, ids)
    assert_near(model.compute_logits(run(ids, torch.arange(TOKENS))), logits)
    # The same graph serves with and without a context.
    run.compute_logits = model.compute_logits
    assert_near(in_steps(run, ids, [8, 9]), logits)


def test_the_model_is_one_graph(built: Checkpoints) -> None:
    path, reference = built("mistral")
    model, ids = load(path), tokens(7)
    run: Any = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    logits = expected(reference, ids)
    assert_near(model.compute_logits(run(ids, torch.arange(TOKENS))), logits)
    cache, starts = GrowingCache(), torch.tensor([0, TOKENS])
    with forward_context(step_context(starts, starts, cache)):
        hidden = run(ids, torch.arange(TOKENS))
    assert_near(model.compute_logits(hidden), logits)
    assert cache.layers.keys() == {0, 1}


@pytest.mark.parametrize(
    ("kind", "ops"),
    [
        ("llama", OPS),
        ("deepseek", {"mla_attention_prefill", "mla_attention_decode"}),
        ("mamba2", {"causal_conv1d", "causal_conv1d_update", "ssd_chunk_scan",
                    "selective_state_update"}),
    ],
)  # fmt: skip
def test_the_ops_that_run(kind: str, ops: set[str], built: Checkpoints) -> None:
    model, ids = load(built(kind)[0]), tokens(5, 6)
    with ir.record() as log:
        whole(model, ids)
        in_steps(model, ids, [3])
    assert ops <= log.selected_impls.keys()
    assert kind != "llama" or ops == log.selected_impls.keys()


def test_the_stateful_layers_of_mamba(built: Checkpoints) -> None:
    mixers: Any = load(built("mamba2")[0]).mixers
    assert [*mixers] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    shapes = {"conv": (64 + 2 * 32, 3), "ssm": (8, 8, 16)}
    assert mixers["backbone.layers.0.mixer"].state_shapes == shapes


@pytest.mark.parametrize("kind", ["mamba2", "mamba2_one_group"])
def test_greedy_decoding_is_that_of_transformers(kind: str, built: Checkpoints) -> None:
    path, reference = built(kind)
    model, ids = load(path), tokens(2, 5)
    texts = reference.generate(
        ids[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=PAD
    )
    cache, written, new = StateCache(1), ids.tolist(), ids
    while len(written) < texts.shape[1]:
        start = len(written) - len(new)
        with sequence_states(SequenceStates.of([len(new)], [start], [0], cache)):
            hidden = model(new, torch.arange(start, len(written)))
        new = model.compute_logits(hidden[-1:]).argmax(-1)
        written.append(int(new))
    assert written == texts[0].tolist()


def test_gemma_caps_scores_where_the_configuration_says_so(built: Checkpoints) -> None:
    path, reference = built("gemma3")
    model, ids = load(path), tokens(2)
    for layer in model.model.layers:
        layer.self_attn.attention.soft_cap = 0.5
    # transformers reads attn_logit_softcapping but does not hand it on; its attention takes it.
    logits = reference(ids[None], softcap=0.5).logits[0]
    assert (logits - expected(reference, ids)).abs().max() > 1e-2
    assert_near(whole(model, ids), logits)


def test_donated_tensors_are_not_read_again(built: Checkpoints) -> None:
    path, reference = built("qwen3")
    model, plain = load(path), load(built("llama")[0])
    ids = tokens(4)
    before = whole(plain, ids)
    settings = ir.current_registry().settings
    settings.check_donation = True
    try:
        assert_near(whole(model, ids), expected(reference, ids))
        assert_near(whole(plain, ids), before)
    finally:
        settings.check_donation = False


def test_kernels_may_reuse_what_is_donated(built: Checkpoints) -> None:
    path, reference = built("qwen3")
    rotary, fused = ir.ops.rotary_embedding, ir.ops.fused_add_rms_norm
    with restored(rotary, fused):

        @rotary.register_impl("in_place", inplace=True)
        def _(
            x_query: Tensor,
            x_key: Tensor,
            positions: Tensor,
            cos_sin_cache: Tensor,
            head_size: int,
            is_neox_style: bool = True,
        ) -> tuple[Tensor, Tensor]:
            native = rotary.impls["native"].impl_fn
            query, key = native(x_query, x_key, positions, cos_sin_cache, head_size, is_neox_style)
            return x_query.copy_(query), x_key.copy_(key)

        @fused.register_impl("in_place", inplace=True)
        def _(
            x: Tensor,
            x_residual: Tensor,
            weight: Tensor | None,
            epsilon: float,
            variance_size: int | None = None,
        ) -> tuple[Tensor, Tensor]:
            native = fused.impls["native"].impl_fn
            normed, total = native(x, x_residual, weight, epsilon, variance_size)
            return x.copy_(normed), x_residual.copy_(total)

        model, ids = load(path), tokens(8)
        with ir.priority(rotary_embedding="in_place!", fused_add_rms_norm="in_place!"):
            for _repeat in range(2):  # no weight was overwritten either
                assert_near(whole(model, ids), expected(reference, ids))
                assert_near(in_steps(model, ids, [5]), expected(reference, ids))


def test_positions_are_used(built: Checkpoints) -> None:
    path, reference = built("llama")
    model = load(path)
    ids, positions = tokens(5, 6), torch.tensor([0, 3, 4, 9, 20, 90])
    logits = reference(ids[None], position_ids=positions[None]).logits[0]
    assert_near(model.compute_logits(model(ids, positions)), logits)
