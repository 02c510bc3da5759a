"""The short convolution: every provider, against torch's own and a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from native.packed import by_sequence, layout, pack
from opweave import ir

CONV, UPDATE = ir.ops.causal_conv1d, ir.ops.causal_conv1d_update
PROVIDERS = CONV.supported_providers()
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
each_provider = pytest.mark.parametrize("provider", PROVIDERS)


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    with torch.no_grad():
        yield


def oracle(
    x: Tensor, before: Tensor, *, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """One sequence in float64: torch's convolution of the inputs before and the new ones."""
    if len(x) == 0:
        return x, before
    inputs = torch.cat((before.double(), x.double().T), -1)
    wide = None if bias is None else bias.double()
    y = functional.conv1d(inputs[None], weight.double()[:, None], wide, groups=len(weight))[0].T
    y = y if activation is None else y * torch.sigmoid(y)
    return y.to(x.dtype), inputs[:, inputs.shape[1] - before.shape[1] :].to(before.dtype)


def check(op: ir.IrOp, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for mine, exact in zip(found, wanted, strict=True):
        atol, rtol = op.get_tolerance(exact.dtype)
        torch.testing.assert_close(mine, exact, atol=atol, rtol=rtol)


def random(dtype: torch.dtype, tokens: int, dim: int, width: int) -> tuple[Tensor, ...]:
    sizes = [(tokens, dim), (dim, width), (dim,), (7, dim, width - 1)]
    x, weight, bias, state = (torch.randn(size).to(dtype) for size in sizes)
    return x, weight, bias, state


@each_provider
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("width", "activation"), [(4, "silu"), (3, None), (1, "swish"), (6, None)])
def test_packed_sequences(
    provider: str, dtype: torch.dtype, width: int, activation: str | None
) -> None:
    for lengths in ([5, 1, 9], [2, 0, 3], [4], [0], []):
        packing = layout(lengths, slots=7, after=2)
        x, weight, bias, state = random(dtype, packing.tokens, 10, width)
        for b in (bias, None):
            found = CONV.using(f"{provider}!")(x, weight, b, state, *packing.arguments, activation)
            one = partial(oracle, weight=weight, bias=b, activation=activation)
            check(CONV, found, by_sequence(packing, x, state, one))


@each_provider
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_update_is_a_sequence_of_one_token(provider: str, dtype: torch.dtype, width: int) -> None:
    for slots in ([3, 0, 6], [2, -1, 4], [-1], []):
        x, weight, bias, state = random(dtype, len(slots), 10, width)
        index = torch.tensor(slots, dtype=torch.int32)
        starts, known = pack([1] * len(slots)), torch.ones(len(slots), dtype=torch.bool)
        found = UPDATE.using(f"{provider}!")(x, weight, bias, state, index, "silu")
        # Bitwise: decoding goes on as prefill would have.
        alone = CONV.using(f"{provider}!")(x, weight, bias, state, starts, index, known, "silu")
        check(UPDATE, found, alone)
        assert torch.equal(found[1], alone[1])
        assert not found[0][[i for i, slot in enumerate(slots) if slot < 0]].any()


@each_provider
def test_decoding_and_split_prefill_equal_one_prefill(provider: str) -> None:
    conv, update = CONV.using(f"{provider}!"), UPDATE.using(f"{provider}!")
    x, weight, bias, state = random(torch.float32, 11, 10, 4)
    slot, no, yes = torch.tensor([5]), torch.tensor([False]), torch.tensor([True])
    whole = conv(x, weight, bias, state, pack([11]), slot, no, "silu")
    for cut in (1, 2, 7):
        first, middle = conv(x[:cut], weight, bias, state, pack([cut]), slot, no, "silu")
        rest, last = conv(x[cut:], weight, bias, middle, pack([11 - cut]), slot, yes, "silu")
        check(CONV, (torch.cat((first, rest)), last), whole)
        steps = []
        for token in x[cut:]:
            y, middle = update(token[None], weight, bias, middle, slot, "silu")
            steps.append(y)
        check(UPDATE, (torch.cat((first, *steps)), middle), whole)


@each_provider
@pytest.mark.parametrize("op", [CONV, UPDATE], ids=lambda op: op.name)
def test_errors_say_what_is_wrong(provider: str, op: ir.IrOp) -> None:
    good = dict(zip(op.schema.names, op.generate_inputs(num_tokens=6), strict=True))
    for name, value, message in [
        ("weight", torch.randn(5, 4), r"weight must be \(24, any\); found float32, \(5, 4\)"),
        ("weight", torch.randn(24, 0), "K of at least 1"),
        ("bias", torch.randn(3), r"bias must be \(24,\)"),
        ("x_state", torch.randn(4, 24, 5), r"x_state must be \(any, 24, 3\)"),
        ("slot_idx", torch.tensor([0.5]), "slot_idx must be int32 or int64"),
        ("activation", "gelu", "must be None or one of silu, swish; found 'gelu'"),
    ]:
        with pytest.raises(ValueError, match=f"{op.name}: .*{message}"):
            op.using(f"{provider}!")(**{**good, name: value})
    for slot in (-2, 10):
        outside = torch.full_like(good["slot_idx"], slot)
        with pytest.raises(IndexError):
            op.using(f"{provider}!")(**{**good, "slot_idx": outside})
