"""The ops of random programs: those declared here, and opweave's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opweave import ir
from opweave.ir import rules

PROVIDERS = ("native", "functional", "inplace", "crossed", "opaque", "both_forms", "library")
SAME = rules.same_dtype("x", "x_residual")  # as kernels that reuse memory need
_fresh = itertools.count()


@dataclass(frozen=True)
class Ops:
    """The ops of the programs, each with kernels of every kind."""

    norm: ir.IrOp
    add_norm: ir.IrOp
    halves: ir.IrOp


def declare() -> Ops:
    """Declare the ops in the current registry."""

    @ir.register_op
    def norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        return y if weight is None else y * weight

    @ir.register_op(allow_inplace=True, composite=True)
    def add_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        total = x + x_residual
        return norm(total, weight, epsilon), total

    @ir.register_op(allow_inplace=True)
    def halves(x: Tensor, factor: float = 0.5, *, shift: float = 0.0) -> Tensor:
        return x * factor + shift

    @norm.register_impl("functional")
    def _(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, epsilon)

    @norm.register_impl("opaque")
    def _(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        if type(x) is not Tensor:
            raise RuntimeError("a kernel that looks at pointers")
        return norm.native(x, weight, epsilon)

    @add_norm.register_impl("inplace", inplace=True, supports_args=SAME)
    def _(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        x_residual.add_(x)
        x.copy_(norm.native(x_residual, weight, epsilon))
        return x, x_residual

    @add_norm.register_impl("crossed", inplace=True, supports_args=SAME)
    def _(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        x.add_(x_residual)
        x_residual.copy_(norm.native(x, weight, epsilon))
        return x_residual, x

    @add_norm.register_impl("functional", inplace=True, supports_args=SAME)
    def _(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        scratch = torch.empty_like(x)  # writes to memory of its own, and to one activation
        torch.add(x, x_residual, out=scratch)
        x_residual.copy_(scratch)
        return norm.native(scratch, weight, epsilon), x_residual

    @halves.register_impl("inplace", inplace=True)
    def _(x: Tensor, factor: float = 0.5, *, shift: float = 0.0) -> Tensor:
        return x.mul_(factor).add_(shift)

    @halves.register_impl("functional")
    def _(x: Tensor, factor: float = 0.5, *, shift: float = 0.0) -> Tensor:
        return torch.empty_like(x).copy_(x).mul_(factor).add_(shift)

    return Ops(norm, add_norm, halves)


@dataclass(frozen=True)
class Library:
    """The ops that programs call, as ``ops`` and ``own``."""

    ops: Ops
    own: ir.IrOps
    namespace: torch.library.Library  # its operators exist as long as it does

    def names(self, *, plain: bool = False) -> dict[str, Any]:
        """Return what programs refer to; with *plain*, native functions in place of the ops."""
        found = {"ops": self.ops, "own": self.own}
        return {name: _Plain(ops) if plain else ops for name, ops in found.items()}

    def force(self, provider: str) -> None:
        """Let every declared op that has *provider* use it."""
        for op in (self.ops.norm, self.ops.add_norm, self.ops.halves):
            op.set_default([provider] if provider in op.impls else [])


class _Plain:
    """The native functions of ops, under the names of the ops."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return _PlainOp(getattr(self._ops, name).native)


class _PlainOp:
    def __init__(self, native: Callable[..., Any]) -> None:
        self.maybe_inplace = native

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.maybe_inplace(*args, **kwargs)


def open_library() -> Library:
    """Declare the ops in the current registry, with in-place kernels of every shape."""
    own = ir.ops
    ops = declare()
    namespace = torch.library.Library(f"random_programs_{next(_fresh)}", "DEF")
    _with_both_forms(ops)
    _of_a_library(ops, namespace)
    return Library(ops, own, namespace)


def _with_both_forms(ops: Ops) -> None:
    @ops.add_norm.register_impl("both_forms", inplace=True, functional=ops.add_norm.native)
    def _(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        torch.add(x, x_residual, out=x_residual)
        return x.copy_(ops.norm(x_residual, weight, epsilon)), x_residual

    def halves(x: Tensor, factor: float = 0.5, *, shift: float = 0.0) -> Tensor:
        return torch.add(torch.full_like(x, shift), x, alpha=factor)

    @ops.halves.register_impl("both_forms", inplace=True, functional=halves)
    def _(x: Tensor, factor: float = 0.5, *, shift: float = 0.0) -> Tensor:
        torch._foreach_mul_([x], factor)
        x[:] += shift
        return x


def _of_a_library(ops: Ops, namespace: torch.library.Library) -> None:
    """Kernels that are operators of a C++ library: opaque, and known by their schema alone."""
    namespace.define("add_norm(Tensor(a!) x, Tensor(b!) y, Tensor? weight, float epsilon) -> ()")
    namespace.define("halves(Tensor(a!) out, Tensor x, float factor, float shift) -> ()")
    called = getattr(torch.ops, namespace.ns)

    def add_norm_cpu(x: Tensor, y: Tensor, weight: Tensor | None, epsilon: float) -> None:
        y.add_(x)
        x.copy_(ops.norm.native(y, weight, epsilon))

    def halves_cpu(out: Tensor, x: Tensor, factor: float, shift: float) -> None:
        out.copy_(x * factor + shift)

    namespace.impl("add_norm", add_norm_cpu, "CPU")
    namespace.impl("halves", halves_cpu, "CPU")
    namespace.impl("add_norm", lambda x, y, weight, epsilon: None, "Meta")
    namespace.impl("halves", lambda out, x, factor, shift: None, "Meta")

    @ops.add_norm.register_impl("library", inplace=True)
    def _(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        called.add_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    @ops.halves.register_impl("library")
    def _(x: Tensor, factor: float = 0.5, *, shift: float = 0.0) -> Tensor:
        out = torch.empty_like(x)
        called.halves(out, x, factor, shift)
        return out
