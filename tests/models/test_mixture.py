"""Mixtral, Qwen3-MoE and the block of gpt-oss give transformers' logits, on any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from opweave import ir
from opweave.engine.checkpoint import Checkpoint, TensorFile
from opweave.engine.checkpoint_model import load_checkpoint
from opweave.layers.parallel import TensorParallel, tensor_parallel
from opweave.models import (
    ForwardContext,
    GptOssMoE,
    InvalidConfigError,
    MixtralForCausalLM,
    MixtureConfig,
    Qwen3MoeForCausalLM,
    UnsupportedModelError,
    WeightsError,
    forward_context,
)

TOKENS = 17
SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {"num_local_experts": 6}
QWEN: dict[str, Any] = {"num_experts": 6, "moe_intermediate_size": 40, "head_dim": 24}
KINDS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "mixtral": ("mixtral", MixtralForCausalLM, MIXTRAL),
    "mixtral_window": (
        "mixtral",
        MixtralForCausalLM,
        {**MIXTRAL, "sliding_window": 5, "tie_word_embeddings": True, "head_dim": 32},
    ),
    "one_layer": ("mixtral", MixtralForCausalLM, {**MIXTRAL, "num_hidden_layers": 1}),
    "qwen3_moe": ("qwen3_moe", Qwen3MoeForCausalLM, {**QWEN, "norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "qwen3_moe",
        Qwen3MoeForCausalLM,
        {**QWEN, "mlp_only_layers": [0], "attention_bias": True, "use_sliding_window": True,
         "sliding_window": 5, "tie_word_embeddings": True},
    ),
}  # fmt: skip
Built = tuple[Path, Any]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


def randomised(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.data.copy_(1 + 0.3 * noise if "norm" in name else 0.12 * noise)
    return model.eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """Return a function that gives the directory of a kind, and transformers' model in it."""
    built: dict[str, Built] = {}

    def get(kind: str) -> Built:
        if kind not in built:
            model_type, _, differences = KINDS[kind]
            config = AutoConfig.for_model(model_type, **{**SIZES, **differences})
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            path = tmp_path_factory.mktemp(kind)
            randomised(model.float()).save_pretrained(path)
            built[kind] = path, model
        return built[kind]

    return get


def tensors(path: Path) -> list[tuple[str, Tensor]]:
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(f)) for f in Checkpoint(path).tensor_files()]
        return [(name, file.tensor(name)) for file in files for name in file.shapes()]


def load(kind: str, path: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = load_checkpoint(path, dtype=dtype)
    assert type(model) is KINDS[kind][1]
    return model


def ids() -> Tensor:
    return torch.randint(3, SIZES["vocab_size"], (TOKENS,))


def whole(model: Any, given: Tensor) -> Tensor:
    logits: Tensor = model.compute_logits(model(given, torch.arange(len(given))))
    return logits


def expected(reference: Any, given: Tensor) -> Tensor:
    logits: Tensor = reference(given[None]).logits[0]
    return logits


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-4)


class GrowingCache:
    """A cache of one sequence that is a list of what was appended."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            old_key, old_value = self.layers[layer]
            key, value = torch.cat((old_key, key)), torch.cat((old_value, value))
        self.layers[layer] = key.clone(), value.clone()
        return self.layers[layer]


def in_steps(model: Any, given: Tensor, prefill: int) -> Tensor:
    """Prefill some tokens, then one token at a time."""
    cache, logits = GrowingCache(), []
    for start, end in [(0, prefill), *((i, i + 1) for i in range(prefill, len(given)))]:
        starts = torch.tensor([0, end - start], dtype=torch.int32)
        ends = torch.tensor([0, end], dtype=torch.int32)
        with forward_context(ForwardContext(starts, ends, cache)):
            hidden = model(given[start:end], torch.arange(start, end))
        logits.append(model.compute_logits(hidden))
    return torch.cat(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, checkpoint: Callable[[str], Built]) -> None:
    path, reference = checkpoint(kind)
    model, given = load(kind, path), ids()
    logits = expected(reference, given)
    assert logits.std() > 0.3  # a comparison of zeros would prove nothing
    assert_near(whole(model, given), logits)
    assert_near(in_steps(model, given, prefill=6), logits)


@pytest.mark.parametrize("provider", ir.ops.fused_experts.supported_providers())
def test_every_provider_gives_the_same_logits(
    provider: str, checkpoint: Callable[[str], Built]
) -> None:
    path, reference = checkpoint("qwen3_moe")
    model, given = load("qwen3_moe", path), ids()
    with ir.priority(fused_experts=[f"{provider}!"]):
        assert_near(whole(model, given), expected(reference, given))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_bfloat16(kind: str, checkpoint: Callable[[str], Built]) -> None:
    """Within 2 % of the logits' deviation on average: that of roundings in another order.

    Experts are given: where two score the same to within a rounding, one other expert would be
    another function altogether.
    """
    path, _ = checkpoint(kind)
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


def test_the_model_compiles_in_one_graph(checkpoint: Callable[[str], Built]) -> None:
    path, reference = checkpoint("one_layer")
    model, given = load("one_layer", path), ids()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="opweave", fullgraph=True, dynamic=True)
    for count in (TOKENS, 9):
        part = given[:count]
        hidden = compiled(part, torch.arange(count))
        assert_near(model.compute_logits(hidden), expected(reference, part))


# Several ranks, each a thread


class Meeting:
    """Collectives of ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=60)
        self.slots: list[Any] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.slots[rank] = x
        self.barrier.wait()
        everything = [t.clone() for t in self.slots]
        self.barrier.wait()
        return everything

    def parallel(self, rank: int) -> TensorParallel:
        return TensorParallel(
            rank,
            self.size,
            all_reduce=lambda x: torch.stack(self.exchange(rank, x)).sum(0),
            all_gather=lambda x, dim=-1: torch.cat(self.exchange(rank, x), dim),
        )

    def run(self, function: Callable[[], Tensor]) -> list[Tensor]:
        """Return what *function* returns on every rank."""
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                with torch.inference_mode(), tensor_parallel(self.parallel(rank)):
                    results[rank] = function()
            except BaseException as error:
                results[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe_mixed"])
def test_two_ranks_give_the_same_logits(kind: str, checkpoint: Callable[[str], Built]) -> None:
    path, reference = checkpoint(kind)
    given = ids()
    for found in Meeting(2).run(lambda: whole(load(kind, path), given)):
        assert_near(found, expected(reference, given))


# gpt-oss


def gpt_oss(ranks: int) -> tuple[list[Tensor], Tensor]:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(**{**SIZES, "num_local_experts": 6, "swiglu_limit": 0.5})
    block = randomised(GptOssMLP(config))
    hidden = torch.randn(TOKENS, SIZES["hidden_size"])

    def ours() -> Tensor:
        model = GptOssMoE.from_hf(config.to_dict(), dtype=torch.float32)
        model.load_weights(block.state_dict().items())
        result: Tensor = model(hidden)
        return result

    return Meeting(ranks).run(ours), block(hidden[None])[0][0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_block_of_gpt_oss(ranks: int) -> None:
    found, wanted = gpt_oss(ranks)
    assert wanted.std() > 0.1
    for result in found:
        torch.testing.assert_close(result, wanted, rtol=0.0, atol=1e-5)


# What checkpoints can get wrong


def test_loading_is_strict(checkpoint: Callable[[str], Built]) -> None:
    path, _ = checkpoint("mixtral")
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


RAW: dict[str, Any] = {k: v for k, v in SIZES.items() if not k.endswith("token_id")}


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
    ({"hidden_act": "gelu"}, UnsupportedModelError, "'hidden_act': 'gelu'"),
    ({"quantization_config": {}}, UnsupportedModelError, "quantization_config"),
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
