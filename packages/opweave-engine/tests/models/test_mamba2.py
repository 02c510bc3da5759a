"""Mamba-2 gives transformers' logits: at once, in steps, compiled, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.running import GrowingCache, assert_near, expected, on_ranks, step_context, whole
from models.tiny_checkpoints import BOS, EOS, PAD, VOCABULARY, random_ids
from opweave import ir
from opweave.layers import SequenceStates, StateCache, sequence_states
from opweave_engine import load_model
from opweave_engine.models import (
    InvalidConfigError,
    Mamba2Config,
    Mamba2ForCausalLM,
    UnsupportedModelError,
    WeightsError,
    forward_context,
)

Checkpoints = Callable[[str], tuple[Path, Any]]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 16,
    "n_groups": 2, "chunk_size": 4, "num_hidden_layers": 2, "bos_token_id": BOS,
    "eos_token_id": EOS, "pad_token_id": PAD,
}  # fmt: skip
TOKENS = 17


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.inference_mode():
        yield


def load(path: Path, dtype: str = "auto") -> Mamba2ForCausalLM:
    model = load_model(path, dtype=dtype)
    assert isinstance(model, Mamba2ForCausalLM)
    return model


def in_steps(model: Any, ids: Tensor, sizes: list[int]) -> Tensor:
    cache, logits, known = StateCache(2), [], 0
    for part in ids.split(sizes):
        with sequence_states(SequenceStates.of([len(part)], [known], [1], cache)):
            logits.append(model.compute_logits(model(part, torch.arange(len(part)) + known)))
        known += len(part)
    return torch.cat(logits)


@pytest.mark.parametrize("kind", ["mamba2", "mamba2_one_group", "mamba2_tied", "mamba2_limits"])
def test_logits_are_those_of_transformers(kind: str, layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint(kind)
    model, ids = load(path), torch.tensor(random_ids(1, TOKENS))
    logits = expected(reference, ids)
    assert logits.std() > 0.3  # a comparison of zeros would prove nothing
    assert_near(whole(model, ids), logits)
    assert_near(in_steps(model, ids, [6, *[1] * 11]), logits)
    assert_near(in_steps(model, ids, [6, 11]), logits)


@pytest.mark.parametrize("kind", ["mamba2", "mamba2_one_group"])
def test_greedy_decoding_is_that_of_transformers(kind: str, layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint(kind)
    model, ids = load(path), torch.tensor(random_ids(2, 5))
    wanted = reference.generate(
        ids[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=PAD
    )[0]
    cache, found = StateCache(1), ids.tolist()
    new, known = ids, 0
    while len(found) < len(wanted):
        with sequence_states(SequenceStates.of([len(new)], [known], [0], cache)):
            hidden = model(new, torch.arange(known, known + len(new)))
        known += len(new)
        new = model.compute_logits(hidden[-1:]).argmax(-1)
        found.append(int(new))
    assert found == wanted.tolist()


def test_packed_sequences_in_a_forward_context(layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint("mamba2")
    model, cache = load(path), StateCache(4)
    texts = [torch.tensor(random_ids(3 + i, n)) for i, n in enumerate((6, 5, 7))]
    wanted = [expected(reference, ids) for ids in texts]
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
            found = model.compute_logits(model(torch.cat(parts), torch.zeros(len(parts)).long()))
        for i, part in zip(order, found.split([news[i] for i in order]), strict=True):
            logits[i].append(part)
            done[i] += news[i]
    for mine, theirs in zip(logits, wanted, strict=True):
        assert_near(torch.cat(mine), theirs)


@pytest.mark.parametrize("kind", ["mamba2", "mamba2_one_group"])
def test_two_ranks_give_the_same_logits(kind: str, layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint(kind)
    ids = torch.tensor(random_ids(4, TOKENS))
    logits = expected(reference, ids)
    for found in on_ranks(2, lambda: load(path), lambda model: in_steps(model, ids, [9, 7, 1])):
        assert_near(found, logits)


@pytest.mark.parametrize("kind", ["mamba2", "mamba2_tied"])
def test_bfloat16_is_near_transformers(kind: str, layer_checkpoint: Checkpoints) -> None:
    path, _ = layer_checkpoint(kind)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model, ids = load(path, "bfloat16"), torch.tensor(random_ids(5, TOKENS))
    logits, found = expected(theirs, ids), whole(model, ids)
    assert found.dtype == torch.bfloat16
    error = (found.float() - logits.float()).abs().mean() / logits.float().std()
    assert error < 0.02


def test_compiled_is_the_same_and_one_graph(layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint("mamba2_one_layer")
    model, ids = load(path), torch.tensor(random_ids(6, TOKENS))
    whole(model, ids)  # the first use of an op makes graphs from before it invalid
    compiled: Any = torch.compile(model, backend="opweave", fullgraph=True, dynamic=True)
    logits = expected(reference, ids)
    positions = torch.arange(TOKENS)
    assert_near(model.compute_logits(compiled(ids, positions)), logits)
    # The same graph serves with states.
    cache, known, found = StateCache(1), 0, []
    for part in ids.split([8, 9]):
        with sequence_states(SequenceStates.of([len(part)], [known], [0], cache)):
            found.append(model.compute_logits(compiled(part, positions[: len(part)] + known)))
        known += len(part)
    assert_near(torch.cat(found), logits)


def test_the_ops_that_run(layer_checkpoint: Checkpoints) -> None:
    model, ids = load(layer_checkpoint("mamba2")[0]), torch.tensor(random_ids(7, 5))
    with ir.record() as log:
        in_steps(model, ids, [4, 1])
    mixing = {"causal_conv1d", "causal_conv1d_update", "ssd_chunk_scan", "selective_state_update"}
    assert mixing <= log.selected_impls.keys()
    assert [*model.mixers] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    assert model.mixers["backbone.layers.0.mixer"].state_shapes == {
        "conv": (64 + 2 * 32, 3),
        "ssm": (8, 8, 16),
    }


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_act": "gelu"}, UnsupportedModelError, "'hidden_act': 'gelu'"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantization_config"),
        ({"num_heads": 7}, InvalidConfigError, "make 56 channels; 'hidden_size' 32 times"),
        ({"n_groups": 3}, InvalidConfigError, "not a multiple of 'n_groups': 3"),
        ({"time_step_limit": [1]}, InvalidConfigError, "'time_step_limit': .*two numbers"),
        ({"time_step_limit": [0, {"x": 1}]}, InvalidConfigError, "'time_step_limit'"),
        ({"state_size": "many"}, InvalidConfigError, "'state_size': 'many'"),
    ],
)
def test_configurations_that_cannot_be(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Mamba2Config.from_hf({**SIZES, **changes})


def test_tensors_must_fit(layer_checkpoint: Checkpoints) -> None:
    model = load(layer_checkpoint("mamba2")[0])
    weights = {name: place.parameter.data for name, place in model.places().items()}
    weights["backbone.layers.0.mixer.conv1d.weight"] = torch.randn(3, 1, 4)
    weights["backbone.layers.9.norm.weight"] = weights.pop("backbone.layers.1.norm.weight")
    with pytest.raises(WeightsError, match=r"1 missing: backbone\.layers\.1\.norm") as caught:
        model.load_weights(weights.items())
    for part in (r"1 unexpected: backbone.layers.9", "conv1d.weight: CausalConv1d"):
        assert part in str(caught.value)
