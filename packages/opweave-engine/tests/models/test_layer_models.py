"""DeepSeek-V3 and Gemma 3 give transformers' logits: at once, in steps, compiled, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

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
from models.tiny_checkpoints import random_ids
from opweave import ir
from opweave_engine import load_model
from opweave_engine.models import CausalLM, forward_context

Checkpoints = Callable[[str], tuple[Path, Any]]
KINDS = ("deepseek", "deepseek_direct", "gemma3", "gemma3_untied")
TOKENS = 17  # more than the sliding windows


def load(path: Path, dtype: str = "auto") -> CausalLM:
    model = load_model(path, dtype=dtype)
    assert isinstance(model, CausalLM)
    return model


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint(kind)
    model = load(path)
    ids = torch.tensor(random_ids(1, TOKENS))
    logits = expected(reference, ids)
    assert logits.std() > 0.3  # a comparison of zeros would prove nothing
    assert_near(whole(model, ids), logits)
    assert_near(in_steps(model, ids, prefill=6), logits)


def test_gemma_caps_scores_where_the_configuration_says_so(layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint("gemma3")
    model, ids = load(path), torch.tensor(random_ids(2, TOKENS))
    for layer in model.model.layers:
        layer.self_attn.attention.soft_cap = 0.5
    # transformers reads attn_logit_softcapping but does not hand it on; its attention takes it.
    with torch.inference_mode():
        logits: Tensor = reference(ids[None], softcap=0.5).logits[0]
    assert (logits - expected(reference, ids)).abs().max() > 1e-2
    assert_near(whole(model, ids), logits)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_same_logits(kind: str, layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint(kind)
    ids = torch.tensor(random_ids(3, TOKENS))
    logits = expected(reference, ids)
    for found in on_ranks(2, lambda: load(path), lambda model: whole(model, ids)):
        assert_near(found, logits)
    for found in on_ranks(2, lambda: load(path), lambda model: in_steps(model, ids, 9)):
        assert_near(found, logits)


@pytest.mark.parametrize("kind", ["deepseek", "gemma3"])
def test_packed_sequences_do_not_see_each_other(kind: str, layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint(kind)
    model = load(path)
    texts = [torch.tensor(random_ids(4 + i, n)) for i, n in enumerate((5, 1, 7))]
    ends = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    positions = torch.cat([torch.arange(len(ids)) for ids in texts])
    with forward_context(step_context(ends, ends, GrowingCache())):
        logits = model.compute_logits(model(torch.cat(texts), positions))
    for ids, found in zip(texts, logits.split([5, 1, 7]), strict=True):
        assert_near(found, expected(reference, ids))


def test_deepseek_decodes_in_the_absorbed_form(layer_checkpoint: Checkpoints) -> None:
    model, ids = load(layer_checkpoint("deepseek")[0]), torch.tensor(random_ids(5, 6))
    with ir.record() as log:
        in_steps(model, ids, prefill=3)
    assert {"mla_attention_prefill", "mla_attention_decode"} <= log.selected_impls.keys()


@pytest.mark.parametrize("kind", ["deepseek", "gemma3"])
def test_bfloat16_is_near_transformers(kind: str, layer_checkpoint: Checkpoints) -> None:
    path, _ = layer_checkpoint(kind)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model, ids = load(path, "bfloat16"), torch.tensor(random_ids(6, TOKENS))
    logits, found = expected(theirs, ids), whole(model, ids)
    assert found.dtype == torch.bfloat16
    # Experts whose scores are as close as bfloat16 is coarse are chosen either way.
    error = (found.float() - logits.float()).abs().mean() / logits.float().std()
    assert error < 0.03


@each_codegen
@pytest.mark.parametrize("kind", ["deepseek", "gemma3"])
def test_compiled_is_the_same_and_one_graph(
    kind: str, codegen: bool, layer_checkpoint: Checkpoints
) -> None:
    path, reference = layer_checkpoint(kind)
    model, ids = load(path), torch.tensor(random_ids(7, TOKENS))
    run = compiled(model, codegen)
    logits = expected(reference, ids)
    assert_near(model.compute_logits(run(ids, torch.arange(TOKENS))), logits)
    # The same graph serves with and without a context.
    cache, starts = GrowingCache(), torch.tensor([0, TOKENS])
    with forward_context(step_context(starts, starts, cache)):
        hidden = run(ids, torch.arange(TOKENS))
    assert_near(model.compute_logits(hidden), logits)
    assert cache.layers.keys() == {0, 1}
