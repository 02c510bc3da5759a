"""SIMD sources: compiled once per instruction set, of which the best one runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from opweave import native
from opweave.cli.new import create
from opweave.native import NativeBuildError
from opweave.native.toolchain import levels
from support.warm_python import warm_python

from .conftest import ISAS

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
