"""BERT gives transformers' hidden states, packed or alone, eager and compiled, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from models.running import assert_near, compiled, each_codegen, on_ranks
from models.tiny_checkpoints import Checkpoints, random_ids
from opweave_engine import load_model
from opweave_engine.models import BertModel

LENGTHS = (5, 1, 8)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])
ENDS = torch.tensor([0, 5, 6, 14], dtype=torch.int32)


def load(path: Path, dtype: str = "auto") -> BertModel:
    model = load_model(path, dtype=dtype)
    assert isinstance(model, BertModel)
    return model


def texts(seed: int) -> tuple[Tensor, Tensor]:
    """Return the ids and kinds of packed sequences."""
    return torch.tensor(random_ids(seed, sum(LENGTHS))), (POSITIONS > 2).long()


def alone(reference: Any, ids: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states, and what is pooled of each sequence, one sequence at a time."""
    results = [
        reference(input_ids=i[None], token_type_ids=k[None])
        for i, k in zip(ids.split(LENGTHS), kinds.split(LENGTHS), strict=True)
    ]
    hidden = torch.cat([r.last_hidden_state[0] for r in results])
    return hidden, torch.cat([r.pooler_output for r in results])


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("kind", ["bert", "bert_gelu_new"])
def test_hidden_states_are_those_of_transformers(kind: str, checkpoint: Checkpoints) -> None:
    path, reference = checkpoint(kind)
    model, (ids, kinds) = load(path), texts(1)
    hidden, pooled = alone(reference, ids, kinds)
    found = model(ids, POSITIONS, kinds, ENDS)
    assert_near(found, hidden)
    assert_near(model.pool(found[ENDS[:-1]]), pooled)
    single = reference(input_ids=ids[None, :5]).last_hidden_state[0]
    assert_near(model(ids[:5], POSITIONS[:5]), single)


def test_two_ranks_give_the_same_hidden_states(checkpoint: Checkpoints) -> None:
    path, reference = checkpoint("bert")
    ids, kinds = texts(2)
    hidden, _ = alone(reference, ids, kinds)
    for found in on_ranks(2, lambda: load(path), lambda m: m(ids, POSITIONS, kinds, ENDS)):
        assert_near(found, hidden)


def test_bfloat16_is_near_transformers(checkpoint: Checkpoints) -> None:
    path, _ = checkpoint("bert")
    theirs = AutoModel.from_pretrained(path, dtype=torch.bfloat16)
    ids, kinds = texts(3)
    hidden, _ = alone(theirs, ids, kinds)
    found = load(path, "bfloat16")(ids, POSITIONS, kinds, ENDS)
    error = (found.float() - hidden.float()).abs().mean() / hidden.float().std()
    assert found.dtype == torch.bfloat16
    assert error < 0.02


@pytest.mark.slow  # the engine does not compile encoders
@each_codegen
def test_compiled_is_transformers_in_one_graph(codegen: bool, checkpoint: Checkpoints) -> None:
    path, reference = checkpoint("bert_one_layer")  # one says all that others would
    run, (ids, kinds) = compiled(load(path), codegen), texts(4)
    assert_near(run(ids, POSITIONS, kinds, ENDS), alone(reference, ids, kinds)[0])
