"""Every architecture gives transformers' logits, in one forward and through a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.running import GrowingCache, assert_near, expected, in_steps, step_context, whole
from models.tiny_checkpoints import KINDS, random_ids
from opweave import ir
from opweave.ir.testing import restored
from opweave_engine import load_model
from opweave_engine.models import forward_context

Checkpoints = Callable[[str], tuple[Path, Any]]
TOKENS = 17  # more than the sliding windows
OPS = (
    "embedding", "rms_norm", "fused_add_rms_norm", "linear", "rotary_embedding", "silu_and_mul",
    "causal_attention", "varlen_attention",
)  # fmt: skip


def _providers() -> list[tuple[str, str]]:
    ir.current_registry().ensure_ready()
    ops = [ir.current_registry().op(name) for name in OPS]
    return [(op.name, provider) for op in ops for provider in op.supported_providers()]


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, checkpoint: Checkpoints) -> None:
    path, reference = checkpoint(kind)
    model = load_model(path)
    ids = torch.tensor(random_ids(1, TOKENS))
    logits = expected(reference, ids)
    assert logits.std() > 0.3  # a comparison of zeros would prove nothing
    assert_near(whole(model, ids), logits)
    assert_near(in_steps(model, ids, prefill=6), logits)


@pytest.mark.parametrize(("op", "provider"), _providers())
@pytest.mark.parametrize("kind", ["biases", "mistral", "qwen3"])
def test_every_provider_gives_the_same_logits(
    kind: str, op: str, provider: str, checkpoint: Checkpoints
) -> None:
    path, reference = checkpoint(kind)
    model = load_model(path)
    ids = torch.tensor(random_ids(2, TOKENS))
    with ir.priority({op: [provider]}):
        assert_near(whole(model, ids), expected(reference, ids))
        assert_near(in_steps(model, ids, 9), expected(reference, ids))


def test_every_op_of_the_list_runs(checkpoint: Checkpoints) -> None:
    model = load_model(checkpoint("llama")[0])
    ids = torch.tensor(random_ids(3, 4))
    with ir.record() as log:
        whole(model, ids)
        in_steps(model, ids, 2)
    assert log.selected_impls.keys() == set(OPS)


def test_donated_tensors_are_not_read_again(checkpoint: Checkpoints) -> None:
    path, reference = checkpoint("qwen3")
    model, plain = load_model(path), load_model(checkpoint("llama")[0])
    ids = torch.tensor(random_ids(4, TOKENS))
    before = whole(plain, ids)
    settings = ir.current_registry().settings
    settings.check_donation = True
    try:
        assert_near(whole(model, ids), expected(reference, ids))
        assert_near(whole(plain, ids), before)
    finally:
        settings.check_donation = False


@pytest.mark.parametrize("kind", ["biases", "qwen3"])
def test_kernels_may_reuse_what_is_donated(kind: str, checkpoint: Checkpoints) -> None:
    path, reference = checkpoint(kind)
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

        model, ids = load_model(path), torch.tensor(random_ids(8, TOKENS))
        with ir.priority(rotary_embedding="in_place!", fused_add_rms_norm="in_place!"):
            for _repeat in range(2):  # no weight was overwritten either
                assert_near(whole(model, ids), expected(reference, ids))
                assert_near(in_steps(model, ids, 5), expected(reference, ids))


def test_positions_are_used(checkpoint: Checkpoints) -> None:
    path, reference = checkpoint("llama")
    model = load_model(path)
    ids, positions = torch.tensor(random_ids(5, 6)), torch.tensor([0, 3, 4, 9, 20, 90])
    logits = reference(ids[None], position_ids=positions[None]).logits[0]
    got = model.compute_logits(model(ids, positions))
    assert_near(got, logits)


@pytest.mark.parametrize("kind", ["llama3_rope", "qwen3", "qwen2"])
def test_bfloat16_rounds_where_transformers_rounds(kind: str, checkpoint: Checkpoints) -> None:
    path, _ = checkpoint(kind)
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model = load_model(path, dtype="bfloat16")
    ids = torch.tensor(random_ids(6, TOKENS))
    logits = expected(reference, ids)
    got = whole(model, ids)
    assert got.dtype == torch.bfloat16
    error = (got.float() - logits.float()).abs().mean() / logits.float().std()
    assert error < 0.02


def test_the_model_is_one_graph(checkpoint: Checkpoints) -> None:
    path, reference = checkpoint("mistral")
    model = load_model(path)
    ids = torch.tensor(random_ids(7, TOKENS))
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    logits = expected(reference, ids)
    # The same graph serves with and without a context.
    assert_near(model.compute_logits(compiled(ids, torch.arange(TOKENS))), logits)
    cache, starts = GrowingCache(), torch.tensor([0, TOKENS])
    with forward_context(step_context(starts, starts, cache)):
        hidden = compiled(ids, torch.arange(TOKENS))
    assert_near(model.compute_logits(hidden), logits)
    assert cache.layers.keys() == {0, 1}
