"""Kernels that write to an argument run before those that read it, in generated code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opweave import ir
from support import ROOT
from support.warm_python import warm_python

ROWS, WIDTH = 7, 64
PAGE = ROOT / "docs" / "design" / "inductor-mutation.md"
CORRECTED = "from opweave.compile import compat\ncompat.correct_mutations()\n"
Function = Callable[[Tensor], Tensor]


def error_of_reported_program(prefix: str, folder: Path) -> float:
    """Run the program of the report for torch in a new process, and return what it prints."""
    program = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    done = warm_python().run("-c", prefix + program, env=env)
    assert done.returncode == 0, done.stderr
    return float(re.findall(r"tensor\((.*)\)", done.stdout)[0])


def test_torch_corrected(tmp_path: Path) -> None:
    assert error_of_reported_program(CORRECTED, tmp_path) < 1e-5


@pytest.fixture(scope="module")
def own_kernels() -> Iterator[None]:
    """A user's kernels: one that fills a buffer, and one that works in place."""
    library = torch.library.Library("opweave_test_order", "DEF")
    library.define("double(Tensor(a!) out, Tensor x) -> ()")
    library.define("double_(Tensor(a!) x) -> ()")
    for name, run in {
        "double": lambda out, x: (out.copy_(x * 2), None)[1],
        "double_": lambda x: (x.mul_(2), None)[1],
    }.items():
        library.impl(name, run, "CPU")
        library.impl(name, lambda *_: None, "Meta")
    kernels = torch.ops.opweave_test_order

    with ir.isolated_registry():

        @ir.register_op(allow_inplace=True)
        def doubled(x: Tensor) -> Tensor:
            return x * 2

        @doubled.register_impl("fills")
        def _(x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            kernels.double(out, x)
            return out

        @doubled.register_impl("inplace", inplace=True)
        def _(x: Tensor) -> Tensor:
            kernels.double_(x)
            return x

        yield
        library._destroy()


def weights(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-127, 128, (rows, WIDTH), dtype=torch.int8, generator=generator)
    return weight, torch.full((rows, 1), 1 / 512)


def silu_and_mul(x: Tensor) -> Tensor:
    return ir.ops.silu_and_mul(torch.cat([x, x + 1], -1))


def linear_w8a16(x: Tensor) -> Tensor:
    return ir.ops.linear_w8a16(x, *W8)


def linear_invariant(x: Tensor) -> Tensor:
    return ir.ops.linear.using("opweave_c_invariant!")(x, W)


def rms_norm(x: Tensor) -> Tensor:
    return ir.ops.rms_norm(x, None, 1e-5)


W8 = weights(WIDTH)
W = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2)) / 8
KERNELS: list[Function] = [silu_and_mul, linear_w8a16, linear_invariant, rms_norm]


def between(kernels: Sequence[Function], x: Tensor, bias: Tensor) -> list[Tensor]:
    """Use each kernel between loops that Inductor fuses across their ranks."""
    results = []
    for kernel in kernels:
        y = kernel(kernel(x.cos()) * x) * x
        results += [kernel(x.sin()).cos() * x, y, x + bias, y + bias]
    return results


def check(kernels: Sequence[Function], *, dynamic: bool) -> None:
    x, bias = torch.randn(ROWS, WIDTH), torch.randn(WIDTH)
    run = torch.compile(partial(between, kernels), backend="opweave", dynamic=dynamic)
    for value, reference in zip(run(x, bias), between(kernels, x, bias), strict=True):
        torch.testing.assert_close(value, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_shipped_kernels() -> None:
    check(KERNELS, dynamic=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_of_a_user(own_kernels: None, dynamic: bool) -> None:
    check(
        [ir.ops.doubled.using(f"{provider}!") for provider in ("fills", "inplace")], dynamic=dynamic
    )
