"""Checkpoints of the models of layers are loaded strictly: what does not fit is listed."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.tiny_checkpoints import Checkpoints
from opweave.layers import TensorParallel, tensor_parallel
from opweave_engine import Checkpoint, CheckpointError, load_model
from opweave_engine.load.checkpoint import TensorFile
from opweave_engine.models import CheckpointModel, WeightsError, build_model

FILE = "model.safetensors"
KINDS = ("llama", "biases", "tied", "qwen2", "qwen3", "mixtral", "qwen3_moe_mixed", "deepseek",
         "deepseek_direct", "gemma3_untied", "mamba2", "bert")  # fmt: skip


def alone_of_two() -> AbstractContextManager[None]:
    """One of two ranks, without the other."""
    return tensor_parallel(TensorParallel(1, 2, lambda x: x, lambda x, dim=-1: x))


@pytest.fixture
def saved(checkpoint: Checkpoints) -> tuple[CheckpointModel, dict[str, Tensor]]:
    """Return an empty DeepSeek model, and the tensors of its checkpoint."""
    read = Checkpoint(checkpoint("deepseek")[0])
    model = build_model(read.config(), dtype=torch.float32)
    with TensorFile(read.tensor_files()[0]) as file:
        return model, {name: file.tensor(name) for name in file.shapes()}


Saved = tuple[CheckpointModel, dict[str, Tensor]]


def test_every_tensor_has_a_place(saved: Saved) -> None:
    model, tensors = saved
    assert model.places().keys() == tensors.keys()
    model.load_weights(tensors.items())


def test_a_tensor_that_comes_twice_is_named(saved: Saved) -> None:
    model, tensors = saved
    again = "model.norm.weight", torch.zeros_like(tensors["model.norm.weight"])
    with pytest.raises(WeightsError, match=r"model\. 1 given twice: model\.norm\.weight\.$"):
        model.load_weights([*tensors.items(), again])


def test_names_are_shown_in_one_line(saved: Saved) -> None:
    model, tensors = saved
    tensors |= {"a\nb\x1b[31m": torch.zeros(1), "x" * 1000: torch.zeros(1)}
    with pytest.raises(WeightsError, match=r"2 unexpected: 'a\\nb\\x1b\[31m', x{100}…\.$"):
        model.load_weights(tensors.items())


def test_layers_that_predict_further_tokens_are_passed_over(saved: Saved) -> None:
    model, tensors = saved
    further = {name.replace(".1.", ".2.", 1): t for name, t in tensors.items() if ".1." in name}
    assert any(name.startswith("model.layers.2.") for name in further)
    model.load_weights({**tensors, **further}.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, -1])
def test_half_a_tensor_fits_no_rank_of_two(
    kind: str, dim: int, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """A tensor of the size of a rank's shard is not a shard, but belongs to a smaller model."""
    path, _ = checkpoint(kind)
    shutil.copy(path / "config.json", tmp_path)
    tensors = load_file(path / FILE)
    halves = {n: t.narrow(dim, 0, t.shape[dim] // 2).clone() for n, t in tensors.items()}
    save_file(halves, tmp_path / FILE)
    smaller = sum(half.shape != tensors[name].shape for name, half in halves.items())
    message = f" {smaller} do not fit: "
    with alone_of_two(), pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_a_padded_vocabulary_does_not_fit(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """The table has as many rows as the model's, which are more than there are ids."""
    path, _ = checkpoint("llama")
    config = (path / "config.json").read_text().replace('"vocab_size": 320', '"vocab_size": 319')
    (tmp_path / "config.json").write_text(config)
    shutil.copy(path / FILE, tmp_path)
    with pytest.raises(CheckpointError, match=r"2 do not fit: .*\(320, 64\); it takes \(319, 64\)"):
        load_model(tmp_path)
