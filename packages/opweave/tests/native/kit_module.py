"""The native module with every kind of argument, built by the kit, and small sources for others."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from opweave import native
from opweave.native import NativeModule

Function = Callable[..., Any]

NAME = "kit_every_kind"
SOURCE = Path(__file__).parent / "sources" / "every_kind.cpp"
CALL_PATHS = ("torch_ops", "direct", "module")


def load() -> NativeModule:
    return native.load(NAME, [SOURCE], extra_cflags=["-Wextra", "-Werror"])


def call_path(module: NativeModule, name: str, op: str) -> Function:
    """Return *op* through torch's dispatcher, through the direct call, or as a user gets it."""
    function: Function = getattr(module, op)
    if name == "torch_ops":
        function = getattr(getattr(torch.ops, NAME), op)
    elif name == "direct":
        function = function.direct  # type: ignore[attr-defined]
    return function


def add_source(folder: Path, value: str, *, schema: str = "add(Tensor(a!) x) -> ()") -> Path:
    """Write a source with an op that adds *value* to each element of a float tensor."""
    op = re.split(r"\W", schema)[0]
    path = folder / f"{op}.cpp"
    path.write_text(
        f"""
        #include <opweave/extension.h>
        static void {op}(const opweave::View& x) {{
          opweave::check_dtype(x, {{OPWEAVE_FLOAT32}});
          opweave::check_contiguous(x);
          auto* at = reinterpret_cast<float*>(x.data);
          for (int64_t i = 0; i < x.element_count(); ++i) at[i] += {value};
        }}
        OPWEAVE_EXTENSION_MODULE(m) {{ m.def("{schema}", {op}); }}
        """,
        encoding="utf-8",
    )
    return path


def empty_source(folder: Path, schema: str, parameters: str) -> Path:
    """Write a source with an op that has *parameters* and does nothing."""
    path = folder / "empty.cpp"
    result = "" if schema.endswith("()") else "return 0;"
    path.write_text(
        f"""
        #include <opweave/extension.h>
        using namespace opweave;
        static {"int64_t" if result else "void"} empty({parameters}) {{ {result} }}
        OPWEAVE_EXTENSION_MODULE(m) {{ m.def("{schema}", empty); }}
        """,
        encoding="utf-8",
    )
    return path


def logging_compiler(folder: Path) -> str:
    """Return a compiler that writes its arguments into a file, for `compiler_calls`."""
    path, real = folder / "compiler", os.environ.get("CXX", shutil.which("c++") or "g++")
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\nexec {real} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def compiler_calls() -> list[str]:
    """Return what the compiler was asked so far."""
    log = Path(os.environ["CXX"]).parent / "calls"
    return log.read_text(encoding="utf-8").splitlines()
