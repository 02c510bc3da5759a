"""``conv_nd`` and ``patch_matmul``: torch's convolutions in every option, each image by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ir.workloads import check
from opweave import ir

conv_nd, patch_matmul = ir.ops.conv_nd, ir.ops.patch_matmul
MODULES: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
opcheck: Any = torch.library.opcheck
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
each_provider = pytest.mark.parametrize("provider", ["native", "batch_invariant"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def options(dims: int) -> Iterator[dict[str, Any]]:
    """Arguments of a module for 4 channels to 6."""
    yield {"kernel_size": 1}
    yield {"kernel_size": (3, 2, 1)[:dims], "stride": (1, 2, 2)[:dims], "bias": False}
    yield {"kernel_size": 3, "padding": 1, "dilation": (2, 1, 1)[:dims], "groups": 2}
    for mode in ("zeros", "reflect", "replicate", "circular"):
        yield {"kernel_size": (3, 2, 3)[:dims], "padding": (2, 1, 0)[:dims], "padding_mode": mode}


def arguments(module: Any) -> tuple[Any, ...]:
    pads = [pad for pad in module.padding for _ in range(2)]
    return (
        module.weight,
        module.bias,
        module.stride,
        pads,
        module.dilation,
        module.groups,
        module.padding_mode,
    )


@each_provider
@each_dtype
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_conv_nd_is_torchs(dims: int, dtype: torch.dtype, provider: str) -> None:
    call, size = conv_nd.using(f"{provider}!"), (7, 5, 6)[:dims]
    for option in options(dims):
        module = MODULES[dims](4, 6, **option).to(dtype).requires_grad_(False)
        x = torch.randn(3, 4, *size).to(dtype)
        values = arguments(module)
        for each in (x, x[0], x.transpose(-1, -2).contiguous().transpose(-1, -2)):
            found, expected = call(each, *values), module(each)
            check(conv_nd, found, expected, option)
        if option.get("padding_mode") not in ("reflect", "replicate", "circular"):
            check(conv_nd, call(x[:0], *values), module(x[:0]), option)
        if dims == 2:
            inner = x.contiguous(memory_format=torch.channels_last)
            found = call(inner, *values)
            check(conv_nd, found, module(inner), option)
            assert found.stride() == conv_nd.native(inner, *values).stride()


def convolved(x: Tensor, weight: Tensor, stride: int, pads: list[int], dilation: int) -> Tensor:
    """Two dimensions, one output at a time, float64."""
    x = nn.functional.pad(x, [pads[2], pads[3], pads[0], pads[1]])
    spans = [dilation * (k - 1) + 1 for k in weight.shape[2:]]
    sizes = [(n - span) // stride + 1 for n, span in zip(x.shape[2:], spans, strict=True)]
    out = torch.zeros(x.shape[0], weight.shape[0], *sizes, dtype=torch.float64)
    for b, o, i, j in itertools.product(*map(range, out.shape)):
        seen = x[b, :, i * stride :, j * stride :][:, : spans[0] : dilation, : spans[1] : dilation]
        out[b, o, i, j] = (seen.double() * weight[o].double()).sum()
    return out


@pytest.mark.parametrize("pads", [[1, 1, 1, 1], [0, 2, 1, 0]], ids=str)
def test_conv_nd_is_the_sum_that_it_says(pads: list[int]) -> None:
    x, weight = torch.randn(2, 3, 6, 7), torch.randn(4, 3, 2, 3)
    expected = convolved(x, weight, 2, pads, 2)
    for provider in conv_nd.supported_providers():
        found = conv_nd.using(provider)(x, weight, None, [2, 2], pads, [2, 2])
        check(conv_nd, found, expected.float())


@each_provider
@each_dtype
@pytest.mark.parametrize("kernel", [(2,), (3, 2), (2, 3, 1)], ids=str)
def test_patch_matmul_is_the_convolution(
    kernel: tuple[int, ...], dtype: torch.dtype, provider: str
) -> None:
    call, dims = patch_matmul.using(f"{provider}!"), len(kernel)
    for size, bias in itertools.product([kernel, (7, 5, 4)[:dims]], [True, False]):
        module = MODULES[dims](3, 5, kernel, kernel, bias=bias).to(dtype).requires_grad_(False)
        for batch in (0, 1, 4):
            x = torch.randn(batch, 3, *size).to(dtype)
            found = call(x, module.weight, module.bias)
            check(patch_matmul, found, module(x))
            assert found.stride() == patch_matmul.native(x, module.weight, module.bias).stride()
        strided = torch.randn(2, *size, 3).to(dtype).movedim(-1, 1)
        check(patch_matmul, call(strided, module.weight, module.bias), module(strided))


@pytest.mark.parametrize("provider", ["native", "batch_invariant"])
@pytest.mark.parametrize("op", [conv_nd, patch_matmul], ids=lambda op: op.name)
def test_gradients_and_the_torch_op(op: ir.IrOp, provider: str) -> None:
    values = op.generate_inputs(num_tokens=2, hidden_size=4, dtype=torch.float64)
    leaves = tuple(
        v.requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values
    )
    assert torch.autograd.gradcheck(op.using(f"{provider}!"), leaves, fast_mode=True)
    opcheck(op.torch_op, op.generate_inputs(), test_utils="test_faketensor")


def test_patches_of_a_dynamic_number_of_images_compile_once() -> None:
    x, weight, bias = patch_matmul.generate_inputs()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: patch_matmul(x, weight, bias) + 1, backend="aot_eager")
    torch._dynamo.mark_dynamic(x, 0)
    for count in (8, 3, 5):
        found = compiled(x[:count])
        check(patch_matmul, found, patch_matmul(x[:count], weight, bias) + 1)


IMAGE, KERNEL, TWO = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 2, 2), [1, 1]


@pytest.mark.parametrize(
    ("op", "values", "message"),
    [
        (conv_nd, (IMAGE, torch.randn(4, 3), None, [], [], []), r"1 to 3 of the kernel\); found 2"),
        (conv_nd, (IMAGE, KERNEL, None, [1], [0] * 4, TWO), r"stride=\[1\]"),
        (conv_nd, (IMAGE, KERNEL, None, TWO, TWO, TWO), r"padding=\[1, 1\]"),
        (conv_nd, (IMAGE, KERNEL, None, TWO, [0] * 4, [1] * 3), r"dilation=\[1, 1, 1\]"),
        (conv_nd, (IMAGE, KERNEL, None, TWO, [0] * 4, TWO, 1, "mirror"), "reflect.*'mirror'"),
        (patch_matmul, (IMAGE[0], KERNEL), "dimensions"),
        (patch_matmul, (IMAGE[:, :2], KERNEL), "channels"),
        (patch_matmul, (IMAGE[:, :, :1], KERNEL), "smaller than a patch"),
    ],
)
def test_mistakes(op: ir.IrOp, values: tuple[Any, ...], message: str) -> None:
    for provider in op.supported_providers():
        with pytest.raises(ValueError, match=message):
            op.using(provider)(*values)


# ``masked_embedding``: summed over ranks it is the lookup in the whole table.

masked = ir.ops.masked_embedding
ID_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", ID_DTYPES, ids=str)
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(50,), (2, 3), (0,), ()], ids=str)
def test_each_id_by_itself(shape: tuple[int, ...], index: torch.dtype, dtype: torch.dtype) -> None:
    weight = torch.randn(24, 5).to(dtype)
    weight.view(torch.uint8)[23] = 0x7F  # NaN: of no id
    ids = torch.randint(-3, 40, shape, dtype=index)
    found = masked(ids, weight, 8, 22, 32, 36, 16)
    assert (found.shape, found.dtype) == ((*shape, 5), dtype)
    for i, row in zip(ids.flatten().tolist(), found.reshape(-1, 5), strict=True):
        place = i - 8 if 8 <= i < 22 else i - 16 if 32 <= i < 36 else None
        expected = torch.zeros(5) if place is None else weight[place].float()
        assert torch.equal(row.float(), expected), i


def test_one_range_is_enough_and_strides_do_not_matter() -> None:
    weight = torch.randn(5, 16).t()[:, 1:4]
    found = masked(torch.tensor([[3], [9], [10]]), weight, 3, 10)
    assert torch.equal(found[:, 0], torch.stack([weight[0], weight[6], torch.zeros(3)]))


def test_gradient_and_the_torch_op() -> None:
    ids, weight, *ranges = masked.generate_inputs(hidden_size=3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda w: masked(ids, w, *ranges), weight.requires_grad_())
    opcheck(masked.torch_op, masked.generate_inputs(), test_utils="test_faketensor")


def test_a_range_that_does_not_fit() -> None:
    with pytest.raises(IndexError, match="index"):
        masked(torch.tensor([9]), torch.randn(4, 2), 0, 10)
