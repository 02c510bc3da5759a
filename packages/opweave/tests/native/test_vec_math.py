"""The errors of vec_math.h against float64, and rounding, over samples of all float32 numbers.

The functions are compiled here, once per instruction set that this CPU can run, with the flags that
matter to them in CMakeLists.txt.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support import ROOT

from .conftest import ISAS

SOURCES = ROOT / "packages" / "opweave" / "csrc"
SOURCE = Path(__file__).parent / "sources" / "vec_math.cpp"
FLAGS = ["-std=gnu++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
MARCH = {
    "base": ["-march=x86-64-v2"],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4"],
    "avx512bf16": ["-march=x86-64-v4", "-mavx512bf16"],
}

Function = Callable[[Tensor], Tensor]
COMPILED = [isa for isa in ISAS if isa in MARCH]
pytestmark = pytest.mark.skipif(
    not COMPILED or not SOURCES.is_dir(), reason="no x86-64 or no sources"
)

# The largest error in units in the last place, as vec_math.h states it, and the function.
BOUNDS: dict[str, tuple[float, Function]] = {
    "exp": (1.1, torch.exp),
    "exp_of_negative": (1.1, torch.exp),
    "expm1": (1.7, torch.expm1),
    "sigmoid": (2.7, torch.sigmoid),
    "tanh": (2.6, torch.tanh),
    "erf": (2.5, torch.special.erf),
}
# The arguments for which it does, where those are not all.
DOMAINS = {"expm1": (-math.inf, 88.7), "exp_of_negative": (-126 * math.log(2), 0)}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    found = {}
    for isa in COMPILED:
        path = tmp_path_factory.mktemp("vec_math") / f"{isa}.so"
        command = [compiler, *FLAGS, *MARCH[isa], f"-I{SOURCES}"]
        subprocess.run([*command, "-shared", "-fPIC", str(SOURCE), "-o", str(path)], check=True)
        found[isa] = ctypes.CDLL(str(path))
    return found


def run(library: ctypes.CDLL, name: str, x: Tensor, *numbers: float) -> Tensor:
    out = torch.empty_like(x)
    pointers = (ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(x.data_ptr()))
    floats = (ctypes.c_float(number) for number in numbers)
    getattr(library, f"vec_{name}")(*pointers, ctypes.c_int64(x.numel()), *floats)
    return out


def all_floats(first: int, step: int) -> Tensor:
    codes = torch.arange(-(2**31) + first, 2**31, step, dtype=torch.int64)
    return codes.to(torch.int32).view(torch.float32)


def units_off(got: Tensor, exact: Tensor) -> Tensor:
    """The error in units in the last place of *exact*, which is float64."""
    exponent = torch.frexp(exact).exponent.clamp(min=-125).to(torch.float64)
    return (got.double() - exact).abs() / torch.exp2(exponent - 24)


def check(library: ctypes.CDLL, name: str, x: Tensor) -> None:
    bound, function = BOUNDS[name]
    lowest, highest = DOMAINS.get(name, (-math.inf, math.inf))
    x = x[~(x < lowest) & ~(x > highest)]
    got, exact = run(library, name, x), function(x.double())
    assert torch.equal(got.isnan(), x.isnan())
    rounded = exact.float()
    infinite = rounded.isinf()
    top = torch.finfo(torch.float32).max
    assert (got[infinite].abs() >= top).all()
    compared = ~(x.isnan() | infinite | got.isinf())
    assert not (got.isinf() & (rounded.abs() < top * (1 - 1e-6))).any()
    worst = units_off(got[compared], exact[compared]).max().item()
    assert worst <= bound


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("isa_name", COMPILED)
def test_errors(libraries: dict[str, ctypes.CDLL], isa_name: str, name: str) -> None:
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45])
    usual = torch.linspace(-20, 20, 400_001)
    check(libraries[isa_name], name, torch.cat((special, usual, all_floats(0, 4093))))


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("isa_name", COMPILED)
def test_errors_on_many(libraries: dict[str, ctypes.CDLL], isa_name: str, name: str) -> None:
    for first in range(0, 4096 * 61, 8192 * 3):
        check(libraries[isa_name], name, all_floats(first, 499))


@pytest.mark.parametrize("isa_name", COMPILED)
def test_every_16_bit_value(libraries: dict[str, ctypes.CDLL], isa_name: str) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        for name in BOUNDS:
            check(libraries[isa_name], name, codes.view(dtype).float())


@pytest.mark.parametrize("isa_name", COMPILED)
def test_special_values(libraries: dict[str, ctypes.CDLL], isa_name: str) -> None:
    inf = float("inf")
    x = torch.tensor([-inf, -200.0, -0.0, 0.0, 200.0, inf])
    library = libraries[isa_name]
    assert run(library, "exp", x).tolist() == [0, 0, 1, 1, inf, inf]
    assert run(library, "exp_of_negative", x[:4]).tolist() == [0, 0, 1, 1]
    assert run(library, "expm1", x[:4]).tolist() == [-1, -1, 0, 0]
    assert run(library, "sigmoid", x).tolist() == [0, 0, 0.5, 0.5, 1, 1]
    for name in ("tanh", "erf"):
        got = run(library, name, x)
        assert got.tolist() == [-1, -1, 0, 0, 1, 1]
        assert got.signbit().tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize("isa_name", COMPILED)
def test_odd_functions(libraries: dict[str, ctypes.CDLL], isa_name: str) -> None:
    x = torch.cat((torch.linspace(0, 12, 100_001), all_floats(1, 10007).abs()))
    x = x[~x.isnan()]
    for name in ("tanh", "erf"):
        plus, minus = (run(libraries[isa_name], name, v) for v in (x, -x))
        assert torch.equal(plus, -minus)
        assert (plus.abs() <= 1).all()


def normal(x: Tensor) -> Tensor:
    return torch.special.erfc(-x / math.sqrt(2)) / 2


# The rough ones: the largest relative error, where it is promised, and the function.
ROUGH: dict[str, tuple[float, float, Function]] = {
    "rough_exp2": (2.0**-17, 32, torch.exp2),
    "rough_sigmoid": (2.0**-17, 22, torch.sigmoid),
    "rough_normal": (2.0**-16, 4, normal),
}


@pytest.mark.parametrize("name", ROUGH)
@pytest.mark.parametrize("isa_name", COMPILED)
def test_rough_errors(libraries: dict[str, ctypes.CDLL], isa_name: str, name: str) -> None:
    bound, limit, function = ROUGH[name]
    x = torch.cat((torch.linspace(-limit, limit, 1_000_001), all_floats(0, 4093)))
    x = x[x.abs() <= limit]
    exact = function(x.double())
    got = run(libraries[isa_name], name, x).double()
    assert ((got - exact).abs() / exact).max() <= bound


@pytest.mark.parametrize("isa_name", COMPILED)
def test_rough_tanh(libraries: dict[str, ctypes.CDLL], isa_name: str) -> None:
    x = torch.cat((torch.linspace(-20, 20, 1_000_001), all_floats(0, 4093)))
    x = x[~x.isnan()]
    got = run(libraries[isa_name], "rough_tanh", x).double()
    assert (got - torch.tanh(x.double())).abs().max() <= 2.0**-19


@pytest.mark.parametrize("isa_name", COMPILED)
def test_rough_ends(libraries: dict[str, ctypes.CDLL], isa_name: str) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([-inf, -3e38, -1000.0, 1000.0, 3e38, inf])
    library = libraries[isa_name]
    assert run(library, "rough_exp2", x).tolist() == [0, 0, 0, inf, inf, inf]
    assert run(library, "rough_sigmoid", x).tolist() == [0, 0, 0, 1, 1, 1]
    assert run(library, "rough_normal", x).tolist() == [0, 0, 0, 1, 1, 1]
    assert run(library, "rough_tanh", x).tolist() == [-1, -1, -1, 1, 1, 1]
    for name in (*ROUGH, "rough_tanh"):
        assert run(library, name, torch.tensor([nan, -nan])).isnan().all()


@pytest.mark.parametrize("numerator", [1.0, -1.7, 1e-3])
@pytest.mark.parametrize("isa_name", COMPILED)
def test_ratio(libraries: dict[str, ctypes.CDLL], isa_name: str, numerator: float) -> None:
    x = torch.cat((torch.linspace(1, 2, 1_000_001), torch.linspace(2, 2.0**24, 1_000_001)))
    got = run(libraries[isa_name], "ratio", x, numerator)
    exact = torch.tensor(numerator).double() / x.double()
    assert units_off(got, exact).max() <= 2
    assert run(libraries[isa_name], "ratio", torch.tensor([math.inf]), numerator).item() == 0


# Whether a way to round may be given a NaN that only float32 has.
ROUNDINGS = {"round": False, "round_any": True, "round_moderate": True, "round_inexact": False}
# The magnitudes for which one rounds as the others do, where those are not all.
MODERATE = {"round_moderate": (2.0**-126, 2.0**111)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("isa_name", COMPILED)
def test_rounding(
    libraries: dict[str, ctypes.CDLL], isa_name: str, name: str, dtype: torch.dtype
) -> None:
    halves = torch.arange(2**16, dtype=torch.int64)
    around_ties = torch.cat([(halves << 16) + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001)])
    x = around_ties.to(torch.int32).view(torch.float32)
    x = torch.cat((x, all_floats(0, 499), all_floats(0x8000, 0x10000), all_floats(0x1000, 0x2000)))
    nan = torch.tensor([0x7FFFFFFF if ROUNDINGS[name] else 0x7FFF0000], dtype=torch.int32)
    x = torch.cat((x[~x.isnan()], nan.view(torch.float32), torch.tensor([float("nan")])))
    least, most = MODERATE.get(name, (0.0, math.inf))
    x = x[(x == 0) | x.isnan() | (x.abs() >= least) & (x.abs() <= most)]
    if name == "round_inexact":
        x = x[(x.view(torch.int32) & 0xFFFF != 0x8000) | (x.abs() == math.inf)]
    got = run(libraries[isa_name], f"{name}_{str(dtype)[6:]}", x)
    torch.testing.assert_close(got, x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() | got.isnan(), x.signbit() | x.isnan())


@pytest.mark.parametrize("isa_name", COMPILED)
def test_what_is_denormal_is_rounded_to_more_digits(
    libraries: dict[str, ctypes.CDLL], isa_name: str
) -> None:
    x = torch.cat((all_floats(0, 4093), torch.arange(1, 2**23, 509).int().view(torch.float32)))
    x = x[x.abs() < 2.0**-126]
    got = run(libraries[isa_name], "round_moderate_bfloat16", x)
    off, usual = (got.double() - x.double()).abs(), (x.bfloat16().double() - x.double()).abs()
    assert (off <= 2.0**-134).all()
    assert usual.max() > off.max() / 2
