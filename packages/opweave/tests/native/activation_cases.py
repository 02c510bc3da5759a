"""Every activation: how to call it, and its definition in float64, rounded where the op rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opweave import ir
from opweave.ir import IrOp

Round = Callable[[Tensor], Tensor]
Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """An op with one set of arguments after x, and what the native op takes for them."""

    name: str
    arguments: Arguments
    native_arguments: Arguments
    oracle: Callable[[Tensor, Round], Tensor]
    factor: int = 2  # the width of x over that of the result

    @property
    def op(self) -> IrOp:
        found: IrOp = getattr(ir.ops, self.name)
        return found

    def after_x(self, dtype: torch.dtype) -> Arguments:
        return tuple(a.to(dtype) if isinstance(a, Tensor) else a for a in self.arguments)

    def native_after_x(self, dtype: torch.dtype) -> Arguments:
        return tuple(a.to(dtype) if isinstance(a, Tensor) else a for a in self.native_arguments)

    def wanted(self, x: Tensor) -> Tensor:
        """The definition, computed in float64."""

        def rounded(value: Tensor) -> Tensor:
            return value if x.dtype == torch.float32 else value.to(x.dtype).double()

        return self.oracle(x.double(), rounded).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * torch.special.erfc(-x / math.sqrt(2))


def gelu_tanh(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def first_half(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Round], Tensor]:
    def oracle(x: Tensor, r: Round) -> Tensor:
        a, b = x.chunk(2, -1)
        return r(activation(a)) * b

    return oracle


def second_half(x: Tensor, r: Round) -> Tensor:
    a, b = x.chunk(2, -1)
    return a * r(silu(b))


def sparse(k: float, activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Round], Tensor]:
    def oracle(x: Tensor, r: Round) -> Tensor:
        a, b = x.chunk(2, -1)
        mean = a.mean(-1, keepdim=True)
        std = (a - mean).square().mean(-1, keepdim=True).sqrt()
        above = r(a - r(r(mean) + r(r(std) * k)))
        return r(activation(torch.where(above < 0, 0.0, above))) * b

    return oracle


def fatrelu(threshold: float) -> Callable[[Tensor], Tensor]:
    return lambda a: torch.where(a <= threshold, 0.0, a)


def swigluoai(alpha: float, limit: float) -> Callable[[Tensor, Round], Tensor]:
    def oracle(x: Tensor, r: Round) -> Tensor:
        bound = r(torch.tensor(limit, dtype=torch.float64)).item()
        gate = x[..., 0::2].clamp(max=bound)
        up = x[..., 1::2].clamp(-bound, bound)
        return r(up + 1) * r(gate * r(torch.sigmoid(r(gate * alpha))))

    return oracle


def gelu_new(x: Tensor, r: Round) -> Tensor:
    inner = r(x + r(0.044715 * r(r(x * x) * x)))
    return r(0.5 * x) * r(1 + r(torch.tanh(r(math.sqrt(2 / math.pi) * inner))))


def gelu_fast(x: Tensor, r: Round) -> Tensor:
    inner = r(r(x * 0.7978845608) * r(1 + r(r(0.044715 * x) * x)))
    return r(0.5 * x) * r(1 + r(torch.tanh(inner)))


def quick_gelu(x: Tensor, r: Round) -> Tensor:
    return x * r(torch.sigmoid(r(1.702 * x)))


def relu2(x: Tensor, r: Round) -> Tensor:
    return torch.where(x < 0, 0.0, x).square()


def xielu(
    alpha_p: Tensor, alpha_n: Tensor, beta: float, eps: float
) -> Callable[[Tensor, Round], Tensor]:
    def oracle(x: Tensor, r: Round) -> Tensor:
        numbers = (r(a.double().reshape(())) for a in (alpha_p, alpha_n))
        positive, negative = (r(torch.log1p(torch.exp(a))) for a in numbers)
        negative = r(beta + negative)
        bound = r(torch.tensor(eps, dtype=torch.float64)).item()
        below = r(r(torch.expm1(x.clamp(max=bound))) - x)
        linear = r(beta * x)
        return torch.where(x > 0, r(r(positive * x) * x), r(below * negative)) + linear

    return oracle


LEARNED = (torch.tensor([0.203]), torch.tensor([[-1.05]]))

CASES = [
    Case("silu_and_mul", (), (), first_half(silu)),
    Case("mul_and_silu", (), (), second_half),
    Case("gelu_and_mul", (), (False,), first_half(gelu)),
    Case("gelu_and_mul", ("tanh",), (True,), first_half(gelu_tanh)),
    Case("gelu_and_mul_sparse", (1.64485,), (1.64485, False), sparse(1.64485, gelu)),
    Case("gelu_and_mul_sparse", (0.3, "tanh"), (0.3, True), sparse(0.3, gelu_tanh)),
    Case("fatrelu_and_mul", (), (0.0,), first_half(fatrelu(0.0))),
    Case("fatrelu_and_mul", (0.5,), (0.5,), first_half(fatrelu(0.5))),
    Case("swigluoai_and_mul", (), (1.702, 7.0), swigluoai(1.702, 7.0)),
    Case("swigluoai_and_mul", (1.1, 0.9), (1.1, 0.9), swigluoai(1.1, 0.9)),
    Case("gelu_new", (), (), gelu_new, factor=1),
    Case("gelu_fast", (), (), gelu_fast, factor=1),
    Case("quick_gelu", (), (), quick_gelu, factor=1),
    Case("relu2", (), (), relu2, factor=1),
    Case("xielu", LEARNED, (*LEARNED, 0.5, -1e-6), xielu(*LEARNED, 0.5, -1e-6), factor=1),
    Case(
        "xielu",
        (*LEARNED, 0.25, -0.01),
        (*LEARNED, 0.25, -0.01),
        xielu(*LEARNED, 0.25, -0.01),
        factor=1,
    ),
]
IDS = [f"{case.name}-{i}" for i, case in enumerate(CASES)]
GATED = [case for case in CASES if case.factor == 2]
POINTWISE = [case for case in CASES if case.factor == 1]


def native_share(case: Case) -> float:
    """The share of equal elements between the kernel and native.

    torch's GELU loses the digits of small results, from gates below -3, where the kernel has them.
    """
    return 0.9 if case.name == "gelu_and_mul" else 0.99
