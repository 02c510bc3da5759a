"""Qwen2-VL's vision encoder is transformers': positions, hidden states, merged tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel,
)
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

from models.running import assert_near, compiled, each_codegen, on_ranks
from opweave_engine import load_model
from opweave_engine.models import ModelError, PatchGrid, Qwen2VisionTransformer

Checkpoints = Callable[[str], tuple[Path, Any]]
SIZES = [(1, 4, 6), (3, 2, 4), (1, 2, 2)]  # an image, a video, a small image
PATCHES = sum(t * h * w for t, h, w in SIZES)
GRID = PatchGrid.of(SIZES, 2)


def load(path: Path, dtype: str = "auto") -> Qwen2VisionTransformer:
    model = load_model(path, dtype=dtype)
    assert isinstance(model, Qwen2VisionTransformer)
    return model


def pixels(seed: int) -> Tensor:
    return torch.randn(PATCHES, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(seed))


def expected(reference: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    result = reference(images, torch.tensor(SIZES))
    return result.last_hidden_state, result.pooler_output


def run(model: Qwen2VisionTransformer, images: Tensor) -> tuple[Tensor, Tensor]:
    hidden = model(images, *GRID)
    return hidden, model.merge(hidden)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("merge", [1, 2, 4])
def test_patches_are_where_transformers_has_them(merge: int) -> None:
    sizes = [(t, h * merge, w * merge) for t, h, w in SIZES]
    grid, theirs = PatchGrid.of(sizes, merge), torch.tensor(sizes)
    assert torch.equal(grid.positions, get_vision_position_ids(theirs, merge))
    assert torch.equal(grid.cu_seqlens, get_vision_cu_seqlens(theirs))


def test_no_images_have_no_patches() -> None:
    grid = PatchGrid.of([], 2)
    assert (grid.positions.shape, grid.cu_seqlens.tolist()) == ((0, 2), [0])


def test_an_image_that_cannot_be_merged_is_named() -> None:
    with pytest.raises(ModelError, match="3 by 4 patches cannot be merged in squares of 2 by 2"):
        PatchGrid.of([(1, 3, 4)], 2)


def test_it_is_that_of_transformers(layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint("qwen2_vision")
    images = pixels(1)
    for found, wanted in zip(run(load(path), images), expected(reference, images), strict=True):
        assert_near(found, wanted)


def test_two_ranks_give_the_same(layer_checkpoint: Checkpoints) -> None:
    path, reference = layer_checkpoint("qwen2_vision")
    images = pixels(2)
    for results in on_ranks(2, lambda: load(path), lambda model: run(model, images)):
        for found, wanted in zip(results, expected(reference, images), strict=True):
            assert_near(found, wanted)


def test_bfloat16_is_near_transformers(layer_checkpoint: Checkpoints) -> None:
    path, _ = layer_checkpoint("qwen2_vision")
    theirs = Qwen2VisionTransformerPretrainedModel.from_pretrained(path, dtype=torch.bfloat16)
    images = pixels(3)
    found, wanted = run(load(path, "bfloat16"), images)[1], expected(theirs, images)[1]
    error = (found.float() - wanted.float()).abs().mean() / wanted.float().std()
    assert found.dtype == torch.bfloat16
    assert error < 0.02


@each_codegen
def test_compiled_is_transformers_in_one_graph(
    codegen: bool, layer_checkpoint: Checkpoints
) -> None:
    path, reference = layer_checkpoint("qwen2_vision_one_layer")  # one says all that others would
    model, images = load(path), pixels(4)
    hidden = compiled(model, codegen)(images, *GRID)
    for found, wanted in zip(
        (hidden, model.merge(hidden)), expected(reference, images), strict=True
    ):
        assert_near(found, wanted)
