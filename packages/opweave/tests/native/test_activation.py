"""The activations compute their definition: every dtype, argument, path and instruction set."""

from __future__ import annotations

import random as stdlib_random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.ops.activation import swigluoai_and_mul
from opweave.kernels.opweave_c import activation

from .activation_cases import CASES, GATED, IDS, POINTWISE, Case, native_share
from .oracle import (
    CALL_PATHS,
    DTYPES,
    FLUSHING,
    assert_op_close,
    call_path,
    random,
    using_threads,
    with_extremes,
)

SHAPES = [(1, 64), (7, 769), (3, 5, 51), (33,), (0, 32), (4, 0), (3, 1), (2, 3, 2, 17), (1, 1)]
# torch warns of a standard deviation of no elements.
pytestmark = pytest.mark.filterwarnings("ignore:std")
PROVIDED = {**vars(activation), **vars(activation)}


def call(module: ModuleType, path_name: str, case: Case, x: Tensor) -> Tensor:
    out = torch.full((*x.shape[:-1], x.shape[-1] // case.factor), 7.0, dtype=x.dtype)
    call_path(module, path_name, case.name)(out, x, *case.native_after_x(x.dtype))
    return out


def native(case: Case, x: Tensor) -> Tensor:
    result: Tensor = case.op.impls["native"].impl_fn(x, *case.after_x(x.dtype))
    return result


def provided(case: Case, x: Tensor) -> Tensor:
    result: Tensor = PROVIDED[case.name](x, *case.after_x(x.dtype))
    return result


def accepts(case: Case, x: Tensor) -> bool:
    with ir.priority({case.name: ["opweave_c"]}):
        return case.op.dispatch(x, *case.after_x(x.dtype)).provider == "opweave_c"


def strides(t: Tensor) -> list[int]:
    """The strides that mean something."""
    pairs = zip(t.shape, t.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1] if t.numel() else []


def values(case: Case, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return 3 * random(*shape[:-1], shape[-1] * case.factor, dtype=dtype, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_values(module: ModuleType, isa: str, case: Case, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = values(case, *shape, dtype=dtype)
        got = call(module, "direct", case, x)
        assert torch.equal(got, call(module, "torch_ops", case, x))
        assert_op_close(case.op, got, case.wanted(x))
        assert_op_close(case.op, got, native(case, x), share=native_share(case))


@pytest.mark.parametrize("limit", [-0.5, 0.0, float("inf"), float("nan")])
def test_limits_of_swigluoai(module: ModuleType, isa: str, limit: float) -> None:
    for dtype in DTYPES:
        x, op = random(5, 86, dtype=dtype), swigluoai_and_mul
        got = op.impls["opweave_c"].impl_fn(x, 1.702, limit)
        assert_op_close(op, got, op.native(x, 1.702, limit), share=0.9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_many_rows(module: ModuleType, case: Case, dtype: torch.dtype) -> None:
    x = values(case, 67, 2999, dtype=dtype)
    got = provided(case, x)
    assert_op_close(case.op, got, case.wanted(x))
    assert_op_close(case.op, got, native(case, x), share=native_share(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", POINTWISE, ids=lambda case: case.name)
def test_every_16_bit_value(module: ModuleType, isa: str, case: Case, dtype: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = codes.view(dtype).view(256, 256)
    got, wanted = provided(case, x), native(case, x)
    if isa in FLUSHING and dtype == torch.bfloat16:  # flushes denormals
        normal = x.isnan() | (x.abs() >= 1e-30)
        got, wanted = got[normal], wanted[normal]
    assert_op_close(case.op, got, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", GATED, ids=IDS[: len(GATED)])
def test_every_16_bit_gate(module: ModuleType, isa: str, case: Case, dtype: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = codes.view(dtype).view(256, 256)
    ones = torch.ones_like(x)
    both = [x, ones] if case.name != "mul_and_silu" else [ones, x]
    interleaved = case.name == "swigluoai_and_mul"
    x = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    if case.name == "gelu_and_mul_sparse":  # statistics of numbers that are all finite and near
        x = x[(x.abs() <= 100).all(-1)]
    got, wanted = provided(case, x), native(case, x)
    if isa in FLUSHING and dtype == torch.bfloat16:
        normal = wanted.isnan() | (wanted.abs() >= 1e-30)
        got, wanted = got[normal], wanted[normal]
    assert_op_close(case.op, got, wanted, share=0 if case.name == "gelu_and_mul_sparse" else 0.9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_special_values(module: ModuleType, isa: str, case: Case, dtype: torch.dtype) -> None:
    inf, limit = float("inf"), torch.finfo(dtype)
    tiny = limit.tiny
    numbers = [float("nan"), inf, -inf, limit.max, -limit.max, tiny, -tiny, tiny / 4]
    numbers += [0.0, -0.0, 1e-3, 1.0, -1.0, 20.0, -20.0, 80.0, -80.0]
    special = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    if case.factor == 1:
        x = special.repeat(3).unsqueeze(-1)
    elif case.name == "gelu_and_mul_sparse":  # one kind in each row, among usual ones
        x = random(len(special), 42, dtype=dtype)
        x[:, 5] = special
        x[:, 30] = special.flip(0)
    else:
        x = torch.cartesian_prod(special, special)
    got, wanted = provided(case, x), native(case, x)
    if case.name == "gelu_and_mul_sparse":
        usual = ~(x.abs() > 1e3).any(-1)
        assert torch.equal(got[~usual].isnan(), wanted[~usual].isnan())
        got, wanted = got[usual], wanted[usual]
    assert_op_close(case.op, got, wanted, share=0)


def layouts(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    width = 20 * case.factor
    wide = values(case, 3, 4, 30, dtype=dtype)
    return {
        "contiguous": wide,
        "slice": wide[..., :width],
        "slice of a matrix": wide.view(12, -1)[:, 4 : 4 + width],
        "transposed": wide.transpose(0, 1),
        "transposed slice": wide.transpose(0, 1)[..., 5 : 5 + width],
        "steps": wide[:, ::2, :width],
        "expanded": wide[:1].expand(3, 4, -1),
        "expanded rows": wide[0, :1].expand(5, -1),
        "one row": wide[0, :1, :width],
        "rows of one": wide[0, :, :2],
        "permuted": wide.unsqueeze(0).permute(2, 0, 1, 3),
        "empty": wide[:0],
    }


@pytest.mark.parametrize("layout", layouts(CASES[0], torch.float32))
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_strides_are_those_of_native(module: ModuleType, case: Case, layout: str) -> None:
    for dtype in DTYPES:
        x = layouts(case, dtype)[layout]
        assert accepts(case, x)
        got, wanted = provided(case, x), native(case, x)
        assert_op_close(case.op, got, wanted)
        assert strides(got) == strides(wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_strided_out_is_written_alone(module: ModuleType, case: Case, dtype: torch.dtype) -> None:
    x = values(case, 6, 37, dtype=dtype)
    base = torch.full((6, 61), 9.0, dtype=dtype)
    untouched = base.clone()
    module_op = getattr(module, case.name)
    module_op(base[:, 11:48], x, *case.native_after_x(dtype))
    assert torch.equal(base[:, 11:48], provided(case, x))
    base[:, 11:48] = 9.0
    assert torch.equal(base, untouched)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_row_does_not_depend_on_the_batch(
    module: ModuleType, isa: str, case: Case, dtype: torch.dtype
) -> None:
    x = values(case, 301, 1021, dtype=dtype)
    with using_threads(2):
        whole = provided(case, x)
    for row in (0, 150, 300):
        alone = provided(case, x[row].clone())
        assert torch.equal(alone, whole[row])


def any_numbers(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Every number of 16 bits, in rows that begin anywhere."""
    codes = torch.randint(-(2**15), 2**15, (rows, width + 9), dtype=torch.int16)
    return codes.view(dtype)[:, 4 : 4 + width]


def bits(x: Tensor) -> Tensor:
    """Of two NaN, which one their product is depends on the compiler."""
    return x.contiguous().view(torch.int16).masked_fill(x.isnan(), 0x7FFF)


# More than 2^19 elements are looked up, and these rows leave a rest of seven.
LOOKED_UP = (600, 1023)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_row_does_not_depend_on_whether_results_are_looked_up(
    module: ModuleType, isa: str, case: Case, dtype: torch.dtype
) -> None:
    rows, width = LOOKED_UP
    x = any_numbers(rows, width * case.factor, dtype)
    with using_threads(1):
        whole = provided(case, x)
        pieces = torch.cat([provided(case, piece) for piece in x.split(rows // 3)])
    assert torch.equal(bits(whole), bits(pieces))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", POINTWISE, ids=lambda case: case.name)
def test_out_may_be_x_where_results_are_looked_up(
    module: ModuleType, isa: str, case: Case, dtype: torch.dtype
) -> None:
    x = any_numbers(*LOOKED_UP, dtype)
    with using_threads(1):
        wanted = provided(case, x)
        getattr(module, case.name)(x, x, *case.native_after_x(dtype))
    assert torch.equal(bits(x), bits(wanted))


@pytest.mark.parametrize("path_name", CALL_PATHS)
@pytest.mark.parametrize("case", POINTWISE, ids=lambda case: case.name)
def test_out_may_be_x(module: ModuleType, path_name: str, case: Case) -> None:
    x = values(case, 5, 77, dtype=torch.bfloat16)
    wanted = provided(case, x)
    call_path(module, path_name, case.name)(x, x, *case.native_after_x(x.dtype))
    assert torch.equal(x, wanted)


def test_fatrelu_and_mul_by_hand(module: ModuleType) -> None:
    nan, inf = float("nan"), float("inf")
    gate = torch.tensor([0.5, 0.25, -1.0, nan, inf, -inf, 0.2500001])
    got = activation.fatrelu_and_mul(torch.cat((gate, torch.full_like(gate, 2.0))), 0.25)
    torch.testing.assert_close(
        got, torch.tensor([1.0, 0.0, 0.0, nan, inf, 0.0, 0.5000002]), equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_deviation_whose_square_overflows(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    case = next(case for case in CASES if case.name == "gelu_and_mul_sparse")
    for size in (1e19, 1e25, 1e38):
        gate = random(4, 37, dtype=dtype)
        gate[:, 5] = size
        x = torch.cat((gate, torch.full_like(gate, 0.5)), -1)
        got = provided(case, x)
        assert_op_close(case.op, got, case.wanted(x))
        assert (got[:, 5] > size / 10).all()


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize("path_name", CALL_PATHS)
@pytest.mark.parametrize("case", GATED, ids=IDS[: len(GATED)])
def test_gated_refusals(module: ModuleType, path_name: str, case: Case) -> None:
    run = call_path(module, path_name, case.name)
    wide = ones(4, 16)
    refused = [
        (ones(4, 16), wide, "out must have the shape of x with half of its last dimension"),
        (ones(3, 8), wide, "out must have the shape of x with half of its last dimension"),
        (ones(8), wide, "out must have the shape of x with half of its last dimension"),
        (ones(4, 7), ones(4, 15), "the last dimension of x must be even"),
        (wide[:, :8], wide, "out is written and must not share memory with x"),
        (ones(4, 8, dtype=torch.float16), wide, "out must have the dtype of x, float32"),
        (ones(4, 8, dtype=torch.int32), ones(4, 16, dtype=torch.int32), "x must be float32 or"),
        (ones(8, 4).t(), wide, "out must be contiguous in its last dimension"),
        (ones(4, 8), ones(16, 4).t(), "x must be contiguous in its last dimension"),
        (ones(1, 8).expand(4, 8), wide, "out must not overlap itself"),
    ]
    for out, x, expected in refused:
        with pytest.raises(RuntimeError) as error:
            run(out, x, *case.native_arguments)
        assert str(error.value).startswith(f"{case.name}: ")
        assert expected in str(error.value)


@pytest.mark.parametrize("path_name", CALL_PATHS)
@pytest.mark.parametrize("case", POINTWISE, ids=lambda case: case.name)
def test_pointwise_refusals(module: ModuleType, path_name: str, case: Case) -> None:
    run = call_path(module, path_name, case.name)
    buffer = ones(40)
    refused = [
        (ones(4, 8), ones(4, 16), "out must have the shape of x, [4, 16]"),
        (buffer[1:33].view(4, 8), buffer[:32].view(4, 8), "must not share memory with x"),
        (ones(4, 8, dtype=torch.float16), ones(4, 8), "out must have the dtype of x, float32"),
        (torch.tensor(1.0), torch.tensor(1.0), "x must have at least one dimension"),
    ]
    for out, x, expected in refused:
        with pytest.raises(RuntimeError) as error:
            run(out, x, *case.native_arguments)
        assert expected in str(error.value)


def test_xielu_refusals(module: ModuleType) -> None:
    out, x, one = ones(4, 8), ones(4, 8), ones(1)
    refused: list[tuple[tuple[Any, ...], str]] = [
        ((out, x, ones(2), one, 0.5, 0.0), "alpha_p must have one element, found float32 [2]"),
        ((out, x, one, ones(0), 0.5, 0.0), "alpha_n must have one element"),
        ((out, x, one.half(), one, 0.5, 0.0), "alpha_p must have the dtype of x"),
        ((out, x, out[0, :1], one, 0.5, 0.0), "must not share memory with alpha_p"),
    ]
    for arguments, expected in refused:
        with pytest.raises(RuntimeError) as error:
            module.xielu(*arguments)
        assert expected in str(error.value)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_selection(module: ModuleType, case: Case) -> None:
    assert accepts(case, ones(2, 8))
    assert accepts(case, ones(8, dtype=torch.bfloat16))
    assert not accepts(case, ones(2, 8, dtype=torch.float64))
    assert not accepts(case, ones(8, 4).t())
    assert not accepts(case, ones(*[1] * 8, 2))
    assert not accepts(case, torch.ones(2, 8, device="meta"))
    if case.factor == 1:
        assert not accepts(case, torch.tensor(1.0))
    if case.factor == 2:
        with ir.priority({case.name: ["opweave_c"]}), pytest.raises(ValueError, match="even"):
            case.op(ones(2, 7), *case.arguments)


def test_arguments_that_native_refuses(module: ModuleType) -> None:
    for name, more in (("gelu_and_mul", ()), ("gelu_and_mul_sparse", (1.0,))):
        op = getattr(ir.ops, name)
        with (
            ir.priority({name: ["opweave_c"]}),
            pytest.raises(ValueError, match="not 'erf'"),
        ):
            op(ones(2, 8), *more, "erf")
    with ir.priority(xielu=["opweave_c"]), pytest.raises(ValueError, match="one element"):
        ir.ops.xielu(ones(2, 8), ones(2), ones(1))
    x = random(3, 8, dtype=torch.bfloat16)
    with ir.priority(xielu=["opweave_c"]):  # numbers of another dtype are cast, by native
        got = ir.ops.xielu(x, ones(1), ones(1))
    assert got.dtype == torch.bfloat16


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_opcheck(module: ModuleType, case: Case) -> None:
    x = values(case, 3, 8, dtype=torch.float32)
    op = getattr(torch.ops.opweave_c, case.name).default
    torch.library.opcheck(op, (torch.empty(3, 8), x, *case.native_arguments))


def fuzz(module: ModuleType, isas: tuple[str, ...], count: int, seed: int) -> None:
    draw = stdlib_random.Random(seed)
    for number in range(count):
        case, dtype = draw.choice(CASES), draw.choice(DTYPES)
        leading = [draw.randrange(5) for _ in range(draw.randrange(4))]
        order = draw.sample(range(len(leading)), len(leading))
        width = draw.choice([1, 2, 3, 15, 16, 17, draw.randrange(1, 200)])
        pad = draw.randrange(3)
        module._select_isa(draw.choice(isas))
        shape = (*(leading[d] for d in order), width * case.factor + pad)
        usual = random(*shape, dtype=dtype, seed=seed + number) * draw.choice([0.01, 1.0, 10.0])
        # torch's GELU of larger numbers is infinite, that of infinity may be NaN, and its small
        # results lack the digits that an extreme factor would show.
        whole = with_extremes(usual, draw, largest=torch.finfo(dtype).max / 4)
        if "gelu_and_mul" in case.name:
            whole[..., pad + width :] = usual[..., pad + width :]
        inverse = [order.index(d) for d in range(len(leading))]
        x = whole.permute(*inverse, len(leading))[..., pad:]
        if not accepts(case, x):
            continue
        got, wanted = provided(case, x), native(case, x)
        defined = torch.where(wanted.isnan(), case.wanted(x), wanted)
        assert_op_close(case.op, got, defined, share=0)
        assert strides(got) == strides(wanted)


def test_fuzz(module: ModuleType, isas: tuple[str, ...]) -> None:
    fuzz(module, isas, 600, seed=1)


@pytest.mark.slow
def test_fuzz_long(module: ModuleType, isa: str) -> None:
    fuzz(module, (isa,), 10_000, seed=1_000_000)
