"""Every kind of argument and result, the same through both call paths."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import native
from opweave.cli.new import create
from opweave.native import NativeBuildError, NativeModule
from opweave.native.toolchain import levels
from support.warm_python import warm_python

from .conftest import ISAS
from .kit_module import CALL_PATHS, NAME, SOURCE, call_path
from .oracle import using_threads

LONG = list(range(-50, 200))
BIG = 2**63 - 1

# x, i, f, b, list, oi, of, ob, ol
CALLS: list[tuple[Any, ...]] = [
    (None, 0, 0.0, False, [], None, None, None, None),
    (torch.ones(2, 3), -7, 1.5, True, [1, 2, 3], 5, 2.5, True, [7]),
    (torch.ones(0), 2**40, -0.0, True, (4,), 0, 0.0, False, []),
    (torch.nn.Parameter(torch.ones(3)), 1, 3, False, LONG, -1, 4, None, tuple(LONG)),
    (torch.tensor(1.0), 1, float("inf"), False, torch.Size([2, 3]), None, 1e300, True, None),
]


def expected(x: Tensor | None, i: int, f: float, b: bool, values: Any, *rest: Any) -> list[float]:
    oi, of, ob, ol = rest
    optional = [-1000 if value is None else value for value in (oi, of, ob)]
    count = -1000 if x is None else x.numel()
    tail = -1000 if ol is None else sum(ol) + len(ol)
    return [float(v) for v in (count, i, f, b, len(values), sum(values), *optional, tail)]


@pytest.mark.parametrize("name", CALL_PATHS)
@pytest.mark.parametrize("arguments", CALLS, ids=range(len(CALLS)))
def test_arguments(kit: NativeModule, name: str, arguments: tuple[Any, ...]) -> None:
    out = torch.zeros(10, dtype=torch.float64)
    assert call_path(kit, name, "write_all")(out, *arguments) is None
    assert out.tolist() == expected(*arguments)


@pytest.mark.parametrize("name", CALL_PATHS)
def test_results(kit: NativeModule, name: str) -> None:
    x = torch.ones(2, 3)
    for value in (0, -1, BIG, -BIG - 1):
        assert call_path(kit, name, "give_int")(x, value) == value
    for number in (0.0, -1.0, 1e-300, float("inf")):
        assert call_path(kit, name, "give_float")(x, number) == number
    for flag in (True, False):
        assert call_path(kit, name, "give_bool")(x, flag) is flag
    result = call_path(kit, name, "give_several")(x, [1, 2], None)
    assert result == (6, 3.5, False)
    assert [type(part) for part in result] == [int, float, bool]
    assert call_path(kit, name, "give_several")(x, (), 2) == (6, 2.0, True)


WRONG: list[tuple[str, tuple[Any, ...], str]] = [
    ("give_int", (1.5,), "i must be an int, found float"),
    ("give_int", (None,), "i must be an int, found NoneType"),
    ("give_float", ("1",), "f must be a float or an int, found str"),
    ("give_bool", ("yes",), "b must be a bool, found str"),
    ("give_several", ("12", None), "list must be a list or tuple of ints, found str"),
    ("give_several", (None, None), "list must be a list or tuple of ints, found NoneType"),
    ("give_several", ([1, "2"], None), "list[1] must be an int, found str"),
    ("give_several", ([1.5], None), "list[0] must be an int, found float"),
    ("give_several", ([1], "x"), "f must be a float or an int, or None, found str"),
    ("fail", ([1], 1.5), "kind must be an int, or None, found float"),
]


@pytest.mark.parametrize(("op", "arguments", "message"), WRONG, ids=[w[2] for w in WRONG])
def test_wrong_types(kit: NativeModule, op: str, arguments: tuple[Any, ...], message: str) -> None:
    x = torch.ones(3)
    with pytest.raises(TypeError) as error:
        call_path(kit, "direct", op)(x, *arguments)
    assert str(error.value) == f"{op}: {message}"
    for name in ("torch_ops", "module"):
        with pytest.raises((TypeError, RuntimeError)):
            call_path(kit, name, op)(x, *arguments)


def test_too_big_for_an_int(kit: NativeModule) -> None:
    with pytest.raises(TypeError, match=r"^give_int: i must be an int of 64 bits$"):
        call_path(kit, "direct", "give_int")(torch.ones(3), BIG + 1)
    for name in ("torch_ops", "module"):
        with pytest.raises((OverflowError, RuntimeError)):
            call_path(kit, name, "give_int")(torch.ones(3), BIG + 1)


@pytest.mark.parametrize("name", CALL_PATHS)
def test_what_a_function_throws(kit: NativeModule, name: str) -> None:
    fail, x = call_path(kit, name, "fail"), torch.ones(3)
    assert fail(x, [0], None) is None
    with pytest.raises(RuntimeError, match="fail: list must not be empty"):
        fail(x, [], None)
    with pytest.raises(RuntimeError, match="fail: std::bad_alloc"):
        fail(x, [0], 1)
    with pytest.raises(RuntimeError, match="fail: its function threw something other than a std"):
        fail(x, [0], 2)
    with pytest.raises(RuntimeError, match=r"fail: d\?j\? vu"):
        fail(x, [0], 3)
    with pytest.raises(RuntimeError, match=r"fail: .é{1000}"):
        fail(x, [0], 4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CALL_PATHS)
def test_what_a_loop_throws(kit: NativeModule, name: str, threads: int) -> None:
    fail_in_loop, x = call_path(kit, name, "fail_in_loop"), torch.ones(64)
    with using_threads(threads):
        assert fail_in_loop(x, 64) is None
        for first in (0, 1, 40, 63):
            with pytest.raises(RuntimeError, match=r"^fail_in_loop: a row is bad"):
                fail_in_loop(x, first)


@pytest.mark.parametrize("name", CALL_PATHS)
def test_tensors_side_by_side(kit: NativeModule, name: str) -> None:
    check_disjoint, both = call_path(kit, name, "check_disjoint"), torch.ones(5, 6)
    for left, right in ((both[:, :3], both[:, 3:]), (both[:, 0], both[:, 1]), (both[0], both[1])):
        check_disjoint(left, right)
        check_disjoint(right, left)
    for left, right in ((both[:, :3], both[:, 2:5]), (both[:3, 0], both[2:, 0])):
        with pytest.raises(RuntimeError, match="left is written and must not share memory with r"):
            check_disjoint(left, right)


@pytest.mark.parametrize("name", CALL_PATHS)
def test_a_dtype_whose_size_is_unknown(kit: NativeModule, name: str) -> None:
    both = torch.ones(5, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="left must have a dtype that native kernels take, foun"):
        call_path(kit, name, "check_disjoint")(both[1:], both[:4])


SCHEMAS = SOURCE.read_text(encoding="utf-8").partition("kBadSchemas[] = {")[2].partition("};")[0]
BAD = [line.strip().strip(",").strip('"') for line in SCHEMAS.strip().splitlines()]


@pytest.mark.parametrize(("i", "schema"), list(enumerate(BAD)), ids=BAD)
def test_bad_schemas(kit: NativeModule, i: int, schema: str) -> None:
    with pytest.raises(RuntimeError) as error:
        kit.try_schema(torch.ones(1), i)
    assert str(error.value).startswith(f"try_schema: schema '{schema}': ")


def test_unknown_op(kit: NativeModule) -> None:
    with pytest.raises(AttributeError, match=r"has no op 'give_itn'\. Did you mean 'give_int'\?"):
        _ = kit.give_itn


def test_in_a_graph(kit: NativeModule) -> None:
    def step(x: Tensor) -> Tensor:
        out = x.new_zeros(10)
        kit.write_all(out, x * 2, 3, 0.5, True, [1, 2], None, 1.5, None, [3])
        return out + 1

    x = torch.ones(4, dtype=torch.float64)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), step(x))
    torch.library.opcheck(
        getattr(torch.ops, NAME).write_all.default,
        (x.new_zeros(10), x, 3, 0.5, True, [1, 2], None, 1.5, None, [3]),
    )


@torch.enable_grad()
@pytest.mark.parametrize("is_compiled", [False, True])
def test_no_derivative_is_lost(kit: NativeModule, is_compiled: bool) -> None:
    def step(x: Tensor) -> Tensor:
        out = x.new_zeros(10)
        kit.write_all(out, x * 2, 3, 0.5, True, [1, 2], None, 1.5, None, [3])
        return out + x.sum()

    call = torch.compile(step, backend="aot_eager") if is_compiled else step
    x = torch.ones(4, dtype=torch.float64)
    assert torch.equal(call(x), step(x))
    with pytest.raises(RuntimeError, match=r"^write_all: .* requires grad, but the op is not diff"):
        call(x.requires_grad_())
    assert kit.give_int(x, 3) == 3  # nothing of which there is a derivative


@torch.enable_grad()
@pytest.mark.parametrize("is_compiled", [False, True])
def test_integers_have_no_derivative(kit: NativeModule, is_compiled: bool) -> None:
    def step(x: Tensor) -> Tensor:
        out = torch.zeros(1, dtype=torch.int64)
        kit.count(out, x)
        return x * out

    call = torch.compile(step, fullgraph=True, backend="aot_eager") if is_compiled else step
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(call(x).sum(), x)
    assert gradient.tolist() == [3, 3, 3]


def test_a_number_breaks_the_graph(kit: NativeModule) -> None:
    def step(x: Tensor) -> Tensor:
        number: int = kit.give_int(x, 3)
        return (x + 1) * number

    x = torch.ones(4)
    assert torch.equal(torch.compile(step, backend="aot_eager")(x), step(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"[Dd]ata.dependent"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(x)


def resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() // 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", CALL_PATHS)
def test_nothing_is_leaked(kit: NativeModule, name: str) -> None:
    """One leaked list or cell of an optional argument in each call would be 320 kB or more."""
    x, out = torch.ones(3), torch.zeros(10, dtype=torch.float64)
    write, several, fail = (
        call_path(kit, name, op) for op in ("write_all", "give_several", "fail")
    )

    def call(times: int) -> None:
        for _ in range(times):
            write(out, x, 1, 0.5, True, LONG[:40], 3, 2.5, True, [1] * 20)
            several(x, [5] * 40, 1.5)
            with suppress(RuntimeError):
                fail(x, [], 3)

    call(3000)
    before = resident_kib()
    call(10_000)
    assert resident_kib() - before < 250


# SIMD sources: compiled once per instruction set, of which the best one runs.

LEVELS = [level for level in levels() if level in ISAS]
RUN = """
import sys, torch
from opweave import native
module = native.load("kit_simd", [sys.argv[1] + "/module.cpp"],
                     simd_sources=[sys.argv[1] + "/softcap.cpp"])
for size in (0, 1, 5, 63, 64, 65, 1000):
    x = 40 * torch.randn(size)
    x[1:3] = torch.tensor([float("inf"), float("nan")])[: len(x[1:3])]
    out = torch.full((size + 1,), 7.0)
    module.softcap(out[:size], x, 30.0)
    torch.testing.assert_close(out[:size], 30 * torch.tanh(x / 30), equal_nan=True)
    assert out[-1] == 7
"""
SHARED = """
template <class T> __attribute__((noinline)) T twice(T v) { return v + v; }
void OPWEAVE_SIMD(softcap)(float* out, const float* x, float cap, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) out[i] = twice(x[i]) + cap;
}
"""


@pytest.fixture(scope="module")
def csrc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ sources of a new package."""
    folder = tmp_path_factory.mktemp("project")
    create("demo", folder, kernel="cpp")
    return folder / "demo" / "csrc"


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_is_right(native_cache: Path, csrc: Path, level: str) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OPWEAVE_ISA": level}
    done = warm_python().run("-c", RUN, str(csrc), env=environment)
    assert done.returncode == 0, done.stderr


def test_levels_share_no_function(native_cache: Path, csrc: Path, tmp_path: Path) -> None:
    source = tmp_path / "shared.cpp"
    source.write_text(f'#include "{csrc}/softcap.h"\n{SHARED}', encoding="utf-8")
    with pytest.raises(NativeBuildError, match=r"shared.cpp has the function float twice<float>"):
        native.load("kit_shared", [csrc / "module.cpp"], simd_sources=[source])
    text = source.read_text(encoding="utf-8")
    text = text.replace("template", "namespace {\ntemplate").replace("void OPW", "}\nvoid OPW")
    source.write_text(text, encoding="utf-8")
    assert native.load("kit_shared", [csrc / "module.cpp"], simd_sources=[source])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kernel.cu", "kernel.cu is CUDA, but SIMD sources are for the CPU's vectors"),
        ("absent.cpp", "absent.cpp does not exist"),
        ("kernel.py", "kernel.py is not a source file"),
    ],
)
def test_bad_simd_sources(csrc: Path, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "kernel.cu").touch()
    (tmp_path / "kernel.py").touch()
    with pytest.raises(NativeBuildError, match=message):
        native.load("kit_bad", [csrc / "module.cpp"], simd_sources=[tmp_path / name])
    with pytest.raises(TypeError, match="simd_sources must be a list of paths"):
        native.load("kit_bad", [csrc / "module.cpp"], simd_sources=str(tmp_path / name))
