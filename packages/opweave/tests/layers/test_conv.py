"""Convolutions are ``nn.Conv2d`` and ``nn.Conv3d`` in every option."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opweave import ir
from opweave.layers import Conv2dLayer, Conv3dLayer, LayerArgumentError

from .switch import both_ways, built

PAIRS: dict[int, tuple[Any, Any]] = {2: (Conv2dLayer, nn.Conv2d), 3: (Conv3dLayer, nn.Conv3d)}
MODES = ["zeros", "reflect", "replicate", "circular"]
DTYPES = [torch.float32, torch.bfloat16]
each_dims = pytest.mark.parametrize("dims", [2, 3])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def compare(
    dims: int, custom_ops: str, x: Tensor, *args: Any, exact: bool = False, **options: Any
) -> Any:
    """Compare with torch's module for 4 channels to 6 or the channels given; return ours."""
    ours_class, theirs_class = PAIRS[dims]
    theirs = theirs_class(*args, **options).to(x.dtype).requires_grad_(False)
    ours = built(custom_ops, lambda: ours_class(*args, **options, params_dtype=x.dtype))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    atol, rtol = ir.ops.conv_nd.get_tolerance(x.dtype)
    scale = theirs.weight.abs().sum().item() / len(theirs.weight)  # of the terms of a sum
    found, expected = ours(x), theirs(x)
    torch.testing.assert_close(
        found, expected, atol=max(atol, 2 * scale * torch.finfo(x.dtype).eps), rtol=rtol
    )
    return ours


def options(dims: int) -> Iterator[dict[str, Any]]:
    for kernel, dilation in itertools.product((1, 2, 3, (3, 2, 4)[:dims]), (1, 2)):
        for padding in (0, 1, "same", "valid"):
            if kernel == 1 and padding == 1:
                continue
            yield {"kernel_size": kernel, "dilation": dilation, "padding": padding}
    yield {"kernel_size": 3, "stride": (2, 1, 3)[:dims], "padding": (1, 0, 2)[:dims]}
    yield {"kernel_size": 2, "stride": 2, "dilation": 2}
    yield {"kernel_size": 2, "stride": 2, "groups": 2}
    yield {"kernel_size": 2, "stride": 2, "padding": 1}
    yield {"kernel_size": 2, "stride": 2, "bias": False}
    yield {"kernel_size": 1, "padding": "same", "stride": 1}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@both_ways
@each_dims
def test_every_option(dims: int, custom_ops: str) -> None:
    x = torch.randn(2, 4, *(9, 8, 7)[:dims])
    for option, mode in zip(options(dims), itertools.cycle(MODES), strict=False):
        compare(dims, custom_ops, x, 4, 6, **option, padding_mode=mode)


@both_ways
@each_dtype
@each_dims
def test_inputs(dims: int, dtype: torch.dtype, custom_ops: str) -> None:
    size = (9, 8, 7)[:dims]
    x = torch.randn(2, 4, *size).to(dtype)
    options: list[dict[str, Any]] = [
        {"kernel_size": 2, "stride": 2},
        {"kernel_size": 3, "padding": 1},
    ]
    for option in options:
        inner = torch.randn(2, *size, 4).to(dtype).movedim(-1, 1)
        for each in (x, x[0], x[:0], x[:1], x.transpose(-1, -2), inner):
            compare(dims, custom_ops, each, 4, 6, **option)


@both_ways
@each_dims
@each_dtype
def test_patch_embeddings(dims: int, dtype: torch.dtype, custom_ops: str) -> None:
    """Those of vision encoders: one product, whole patches only."""
    cases: list[tuple[Any, tuple[int, ...]]] = [
        (14, (256, 3, 14, 14)),
        (14, (2, 3, 28, 28)),
        (14, (1, 3, 30, 43)),
    ]
    if dims == 3:
        cases = [
            ((2, 14, 14), (8, 3, 2, 14, 14)),
            ((1, 14, 14), (2, 3, 1, 28, 14)),
            ((2, 14, 14), (1, 3, 4, 28, 28)),
        ]
    for kernel, shape in cases:
        x = torch.randn(shape).to(dtype)
        layer = compare(dims, custom_ops, x, 3, 32, kernel, kernel)
        with ir.record() as calls:
            y = layer(x)
        assert layer.is_patches
        assert ("patch_matmul" in calls.selected_impls) == (custom_ops == "all")
        assert y.flatten(2).transpose(1, 2).is_contiguous()  # what follows needs no copy


def test_the_shortcut_is_taken_only_where_it_is_the_same() -> None:
    assert Conv2dLayer(4, 6, 2, 2).is_patches
    assert Conv2dLayer(4, 6, 2, 2, padding="valid").is_patches
    assert Conv2dLayer(4, 6, 1, padding="same").is_patches
    others: list[dict[str, Any]] = [{"stride": 1}, {"padding": 1}, {"dilation": 2}, {"groups": 2}]
    for option in others:
        assert not Conv2dLayer(4, 6, 2, **{"stride": 2, **option}).is_patches


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"kernel_size": 3, "padding": "some"}, "'some'.*'same', 'valid'"),
        ({"kernel_size": 3, "padding": "same", "stride": 2}, "'same'.*stride"),
        ({"kernel_size": 3, "padding_mode": "mirror"}, "'mirror'.*reflect"),
        ({"kernel_size": (3, 3, 3)}, r"kernel_size=\(3, 3, 3\).*2 of"),
        ({"kernel_size": 0}, "kernel_size=0.*at least 1"),
        ({"kernel_size": 3, "stride": (1, 0)}, "stride"),
        ({"kernel_size": 3, "padding": -1}, "padding=-1.*at least 0"),
        ({"kernel_size": 3, "dilation": ()}, "dilation"),
        ({"kernel_size": 3, "groups": 3}, "groups=3.*in_channels=4"),
        ({"kernel_size": 3, "groups": 0}, "groups=0"),
    ],
)
def test_mistakes(option: dict[str, Any], message: str) -> None:
    with pytest.raises(LayerArgumentError, match=message) as caught:
        Conv2dLayer(4, 6, **option)
    assert isinstance(caught.value, ValueError)


def test_inputs_that_do_not_fit_are_errors_as_torchs() -> None:
    layer = Conv2dLayer(3, 4, 2, 2)
    for shape in ((1, 2, 4, 4), (1, 3, 1, 4), (3,)):
        with pytest.raises(RuntimeError):
            layer(torch.randn(shape))
    assert repr(layer) == "Conv2dLayer(3, 4, kernel_size=(2, 2), stride=(2, 2), padding=(0, 0))"
