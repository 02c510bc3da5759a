"""Trial load of a new module in another process, where a crash does no harm."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from opweave.native import registration, toolchain
from opweave.native.errors import NativeBuildError
from opweave.native.extension import Extension

# Imports torch, which takes seconds, only if the module is linked against it.
_LOAD = """
import importlib.util, json, sys
from importlib.machinery import ExtensionFileLoader
name, path, folders = sys.argv[1:]
def load():
    loader = ExtensionFileLoader(name, path)
    return importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
try:
    try:
        raw = load()
    except ImportError:
        sys.path[:] = json.loads(folders)
        import torch
        raw = load()
    found = {op: getattr(raw, op).__doc__ for op in dir(raw) if op[0] != "_"}
    answer = {"schemas": found}
except ImportError as error:
    answer = {"error": str(error)}
print("\\nopweave: " + json.dumps(answer), flush=True)
"""
_ANSWER = "opweave: "  # the module may print other lines when it loads or Python exits

# Symbols of the C++ library, which a C compiler does not link.
_CXX_SYMBOLS = ("__cxxabiv1", "__cxa_", "__gxx_", "symbol: _ZSt", "symbol: _ZNSt", "symbol: _Zn")


def check(extension: Extension, path: Path) -> None:
    """Check that the module at *path* loads and that torch accepts the schemas of its ops.

    Raises:
        NativeBuildError: one of these fails.
    """
    command = (sys.executable, "-I", "-S", "-c", _LOAD, extension.module, str(path))
    answer = _answer(toolchain.run((*command, json.dumps(sys.path))))
    why = answer.get("error", "").removeprefix(f"{path}: ")
    if any(symbol in why for symbol in _CXX_SYMBOLS):
        compiler = toolchain.cxx().command[0]
        why += f"; {compiler} does not link the C++ library: name a C++ compiler, such as CXX=g++"
    why = why or registration.refusal(answer.get("schemas", {}), extension.namespace)
    if why:
        raise NativeBuildError(f"{extension.label} is built but does not load: {why}.")


def _answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if not lines:  # it crashed
        last = done.stderr.strip().splitlines()[-1:]
        return {"error": last[0] if last else f"Python ended with {done.returncode}"}
    answer: dict[str, Any] = json.loads(lines[0].removeprefix(_ANSWER))
    if "error" not in answer and done.returncode != 0:
        code = done.returncode
        end = signal.Signals(-code).name if code < 0 else f"code {code}"
        answer["error"] = f"when Python exits, it ends with {end}"
    return answer
