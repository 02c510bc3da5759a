"""Every language model gives transformers' logits: at once, in steps, compiled, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.running import assert_near, compiled, each_codegen, expected, in_steps, on_ranks, whole
from models.tiny_checkpoints import LAYERS as ALL_LAYERS
from models.tiny_checkpoints import LLAMAS, Checkpoints, gpt_oss_block, random_ids
from opweave import ir
from opweave_engine import load_model
from opweave_engine.models import CausalLM, GptOssMoE, Mamba2ForCausalLM

LAYERS = [kind for kind in ALL_LAYERS if not kind.startswith("bert")]
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


def load(path: Path, dtype: str = "auto") -> CausalLM:
    model = load_model(path, dtype=dtype)
    assert isinstance(model, CausalLM)
    return model


def tokens(seed: int, count: int = TOKENS) -> Tensor:
    return torch.tensor(random_ids(seed, count))


@pytest.mark.parametrize("kind", [*LLAMAS, *LAYERS])
def test_logits_are_those_of_transformers(kind: str, checkpoint: Checkpoints) -> None:
    path, reference = checkpoint(kind)
    model, ids = load(path), tokens(1)
    logits = expected(reference, ids)
    assert logits.std() > 0.3  # a comparison of zeros would prove nothing
    assert_near(whole(model, ids), logits)
    assert_near(in_steps(model, ids, [6]), logits)
    if isinstance(model, Mamba2ForCausalLM):
        assert_near(in_steps(model, ids, [6, 11]), logits)


@pytest.mark.parametrize("kind", ["biases", *(kind for kind in LAYERS if kind not in ONE_LAYER)])
def test_two_ranks_give_the_same_logits(kind: str, checkpoint: Checkpoints) -> None:
    path, reference = checkpoint(kind)
    ids = tokens(3)
    logits = expected(reference, ids)
    for result in on_ranks(2, lambda: load(path), lambda m: (whole(m, ids), in_steps(m, ids, [9]))):
        assert_near(result[0], logits)
        assert_near(result[1], logits)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe_mixed"])
def test_two_ranks_share_experts_in_one_tensor(
    kind: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    _, reference = checkpoint(kind)
    reference.save_pretrained(tmp_path, save_original_format=False)
    ids = tokens(4)
    for result in on_ranks(2, lambda: load(tmp_path), lambda model: whole(model, ids)):
        assert_near(result, expected(reference, ids))


def test_two_ranks_share_the_experts_of_gpt_oss() -> None:
    config, block = gpt_oss_block()
    hidden = torch.randn(TOKENS, config["hidden_size"])

    def build() -> GptOssMoE:
        part = GptOssMoE.from_hf(config, dtype=torch.float32)
        part.load_weights(block.state_dict().items())
        return part

    for result in on_ranks(2, build, lambda part: part(hidden)):
        assert_near(result, block(hidden[None])[0][0])


@pytest.mark.parametrize(
    "kind",
    ["llama3_rope", "qwen3", "qwen2", "deepseek", "gemma3", "mixtral", "mamba2", "mamba2_tied"],
)
def test_bfloat16_is_near_transformers(kind: str, checkpoint: Checkpoints) -> None:
    path, _ = checkpoint(kind)
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
def test_compiled_is_the_same_and_one_graph(
    kind: str, codegen: bool, checkpoint: Checkpoints
) -> None:
    path, reference = checkpoint(kind)
    model, ids = load(path), tokens(7)
    whole(model, ids)  # the first use of an op makes graphs from before it invalid
    run = compiled(model, codegen)
    logits = expected(reference, ids)
    assert_near(model.compute_logits(run(ids, torch.arange(TOKENS))), logits)
    # The same graph serves with and without a context.
    run.compute_logits = model.compute_logits
    assert_near(in_steps(run, ids, [8, 9]), logits)


@pytest.mark.parametrize(
    ("kind", "ops"),
    [
        ("llama", OPS),
        ("deepseek", {"mla_attention_prefill", "mla_attention_decode"}),
        ("mamba2", {"causal_conv1d", "causal_conv1d_update", "ssd_chunk_scan",
                    "selective_state_update"}),
    ],
)  # fmt: skip
def test_the_ops_that_run(kind: str, ops: set[str], checkpoint: Checkpoints) -> None:
    model, ids = load(checkpoint(kind)[0]), tokens(5, 6)
    with ir.record() as log:
        whole(model, ids)
        in_steps(model, ids, [3])
    assert ops <= log.selected_impls.keys()
    assert kind != "llama" or ops == log.selected_impls.keys()


def test_gemma_caps_scores_where_the_configuration_says_so(checkpoint: Checkpoints) -> None:
    path, reference = checkpoint("gemma3")
    model, ids = load(path), tokens(2)
    for layer in model.model.layers:
        layer.self_attn.attention.soft_cap = 0.5
    # transformers reads attn_logit_softcapping but does not hand it on; its attention takes it.
    logits = reference(ids[None], softcap=0.5).logits[0]
    assert (logits - expected(reference, ids)).abs().max() > 1e-2
    assert_near(whole(model, ids), logits)


def test_donated_tensors_are_not_read_again(checkpoint: Checkpoints) -> None:
    path, reference = checkpoint("qwen3")
    model, plain = load(path), load(checkpoint("llama")[0])
    ids = tokens(4)
    before = whole(plain, ids)
    settings = ir.current_registry().settings
    settings.check_donation = True
    try:
        for _repeat in range(2):  # no weight was given up either
            assert_near(whole(model, ids), expected(reference, ids))
            assert_near(in_steps(model, ids, [5]), expected(reference, ids))
            assert_near(whole(plain, ids), before)
    finally:
        settings.check_donation = False
