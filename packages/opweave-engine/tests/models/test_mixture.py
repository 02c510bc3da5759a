"""Mixtral, Qwen3-MoE and the block of gpt-oss give transformers' logits, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from models.layer_checkpoints import gpt_oss_block
from models.running import assert_near, expected, in_steps, on_ranks, whole
from models.tiny_checkpoints import VOCABULARY
from opweave import ir
from opweave_engine import load_model
from opweave_engine.load.checkpoint import Checkpoint, TensorFile
from opweave_engine.models import (
    GptOssMoE,
    InvalidConfigError,
    MixtralForCausalLM,
    MixtureConfig,
    Qwen3MoeForCausalLM,
    UnsupportedModelError,
    WeightsError,
)

TOKENS = 17
KINDS = ("mixtral", "mixtral_window", "qwen3_moe", "qwen3_moe_mixed")
RAW: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "num_experts_per_tok": 2,
}  # fmt: skip
Checkpoints = Callable[[str], tuple[Path, Any]]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


def tensors(path: Path) -> list[tuple[str, Tensor]]:
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(f)) for f in Checkpoint(path).tensor_files()]
        return [(name, file.tensor(name)) for file in files for name in file.shapes()]


def load(kind: str, path: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = load_model(path, dtype=dtype)
    assert type(model) is (MixtralForCausalLM if "mixtral" in kind else Qwen3MoeForCausalLM)
    return model


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (TOKENS,))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint(kind)
    model, given = load(kind, path), ids()
    logits = expected(reference, given)
    assert logits.std() > 0.3  # a comparison of zeros would prove nothing
    assert_near(whole(model, given), logits)
    assert_near(in_steps(model, given, prefill=6), logits)


@pytest.mark.parametrize("provider", ir.ops.fused_experts.supported_providers())
def test_every_provider_gives_the_same_logits(provider: str, layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint("qwen3_moe")
    model, given = load("qwen3_moe", path), ids()
    with ir.priority(fused_experts=[f"{provider}!"]):
        assert_near(whole(model, given), expected(reference, given))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_bfloat16(kind: str, layer_checkpoint: Checkpoints) -> None:
    """Within 2 % of the logits' deviation on average: that of roundings in another order.

    Experts are given: where two score the same to within a rounding, one other expert would be
    another function altogether.
    """
    path, _ = layer_checkpoint(kind)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model, given = load(kind, path, torch.bfloat16), ids()
    pinned = Pinned(reference)
    logits = expected(reference, given).float()
    with pinned.into(model):
        found = whole(model, given)
    assert found.dtype is torch.bfloat16
    assert pinned.agreement > 0.8
    error = (found.float() - logits).abs().mean() / logits.std()
    assert error < 0.02


class Pinned:
    """Records which experts transformers chooses, and has ours choose the same."""

    def __init__(self, reference: Any) -> None:
        self.chosen: list[Tensor] = []
        self.same: list[float] = []
        for module in reference.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(lambda m, a, out: self.chosen.append(out[2]))

    @property
    def agreement(self) -> float:
        """The share of tokens that would have gone to the same experts."""
        return sum(self.same) / len(self.same)

    def into(self, model: Any) -> ExitStack:
        stack = ExitStack()
        waiting = iter(self.chosen)
        for module in model.modules():
            if type(module).__name__ == "FusedMoE":
                original = module.select_experts
                module.select_experts = self._choose(original, waiting)
                stack.callback(module.__dict__.pop, "select_experts")
        return stack

    def _choose(self, original: Any, waiting: Iterator[Tensor]) -> Any:
        def choose(hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
            forced = next(waiting)
            _, ids = original(hidden, logits)
            same = ids.sort(-1).values == forced.sort(-1).values
            self.same.append(same.all(-1).float().mean().item())
            weights = logits.float().softmax(-1).gather(1, forced)
            return weights / weights.sum(-1, keepdim=True), forced.int()

        return choose


def test_the_model_compiles_in_one_graph(layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint("mixtral_one_layer")
    model, given = load("mixtral_one_layer", path), ids()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="opweave", fullgraph=True, dynamic=True)
    for count in (TOKENS, 9):
        part = given[:count]
        hidden = compiled(part, torch.arange(count))
        assert_near(model.compute_logits(hidden), expected(reference, part))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe_mixed"])
def test_two_ranks_give_the_same_logits(kind: str, layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint(kind)
    given = ids()
    for found in on_ranks(2, lambda: load(kind, path), lambda model: whole(model, given)):
        assert_near(found, expected(reference, given))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe_mixed"])
def test_two_ranks_share_experts_in_one_tensor(
    kind: str, layer_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    _, reference = layer_checkpoint(kind)
    reference.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith(".experts.down_proj") for name, _ in tensors(tmp_path))
    given = ids()
    for found in on_ranks(2, lambda: load(kind, tmp_path), lambda model: whole(model, given)):
        assert_near(found, expected(reference, given))


# gpt-oss


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_block_of_gpt_oss(ranks: int) -> None:
    config, block = gpt_oss_block()
    hidden = torch.randn(TOKENS, config["hidden_size"])

    def ours() -> GptOssMoE:
        model = GptOssMoE.from_hf(config, dtype=torch.float32)
        model.load_weights(block.state_dict().items())
        return model

    wanted: Tensor = block(hidden[None])[0][0]
    assert wanted.std() > 0.1
    for result in on_ranks(ranks, ours, lambda model: model(hidden)):
        torch.testing.assert_close(result, wanted, rtol=0.0, atol=1e-5)


# Invalid checkpoints


def test_loading_is_strict(layer_checkpoint: Checkpoints) -> None:
    path, _ = layer_checkpoint("mixtral")
    given = dict(tensors(path))
    model = MixtralForCausalLM.from_hf(Checkpoint(path).config(), dtype=torch.float32)
    expert = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    short = {name: tensor for name, tensor in given.items() if name != expert}
    with pytest.raises(WeightsError, match=f"1 missing: {expert}"):
        model.load_weights(short.items())
    with pytest.raises(WeightsError, match=r"1 unexpected: lm_head.bias"):
        model.load_weights([*given.items(), ("lm_head.bias", torch.zeros(1))])
    with pytest.raises(WeightsError, match=rf"1 do not fit: {expert}: w2 .*\(64, 95\).*\(64, 96\)"):
        model.load_weights({**given, expert: given[expert][:, :95]}.items())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 777.0},
        {"sliding_window": 9, "use_sliding_window": True},
        {"head_dim": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
        {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 4},
    ],
)
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_absent_keys_mean_what_they_mean_to_transformers(
    model_type: str, changes: dict[str, Any]
) -> None:
    absent = ("max_position_embeddings", "num_experts_per_tok")
    sizes = {k: v for k, v in RAW.items() if k not in absent}
    theirs = AutoConfig.for_model(model_type, **{**sizes, **changes})
    read = MixtureConfig.mixtral if model_type == "mixtral" else MixtureConfig.qwen3_moe
    ours = read({**sizes, **changes})
    for name in ("max_position_embeddings", "rms_norm_eps", "num_key_value_heads", "vocab_size",
                 "intermediate_size", "num_experts_per_tok", "tie_word_embeddings"):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.num_experts == theirs.num_local_experts
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.sliding_window == theirs.sliding_window
    assert ours.rope["rope_theta"] == theirs.rope_parameters["rope_theta"]
    if model_type == "qwen3_moe":
        assert ours.norm_topk_prob == theirs.norm_topk_prob
        assert ours.moe_intermediate_size == theirs.moe_intermediate_size
        sparse = [
            layer not in theirs.mlp_only_layers and (layer + 1) % theirs.decoder_sparse_step == 0
            for layer in range(theirs.num_hidden_layers)
        ]
        assert list(ours.sparse_layers) == sparse


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hidden_act": "relu"}, UnsupportedModelError, "'hidden_act': 'relu'"),
    ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantization_config"),
    ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, UnsupportedModelError, "'spiral'"),
    (
        {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        UnsupportedModelError,
        "'partial_rotary_factor': 0.5",
    ),
    ({"num_key_value_heads": 3}, InvalidConfigError, "not a multiple"),
    ({"hidden_size": 66}, InvalidConfigError, "no 'head_dim'"),
    ({"num_experts_per_tok": 200}, InvalidConfigError, "'num_experts_per_tok': 200"),
    ({"mlp_only_layers": [True]}, InvalidConfigError, "mlp_only_layers"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_configurations_that_are_wrong(case: int) -> None:
    changes, error, match = WRONG[case]
    with pytest.raises(error, match=match):
        MixtureConfig.qwen3_moe({**RAW, **changes})


def test_the_block_of_gpt_oss_needs_enough_experts() -> None:
    with pytest.raises(InvalidConfigError, match="'num_experts_per_tok': 4"):
        GptOssMoE.from_hf({"num_local_experts": 2}, dtype=torch.float32)
    assert isinstance(GptOssMoE(2, 1, 8, 4), nn.Module)
