"""The built-in adapters where their libraries are installed, but no GPU is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opweave.ir.schema import ADAPTERS

PACKAGES = {
    "flag_gems": "flag_gems",
    "flash_attn": "flash_attn",
    "flashinfer": "flashinfer",
    "liger": "liger_kernel",
    "quack": "quack",
    "sgl_kernel": "sgl_kernel",
}
NORMS = ("flag_gems", "flashinfer", "liger", "quack", "sgl_kernel")


@pytest.fixture
def libraries(tmp_path: Path) -> dict[str, str]:
    """Return an environment with packages that cannot be imported, as most need a GPU for that."""
    for package in PACKAGES.values():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError('imported')")
    return {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}


def run(environment: dict[str, str], code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_adapter_is_listed() -> None:
    assert {*PACKAGES, "vllm_c"} == {*ADAPTERS}


def test_explain_names_the_reason_and_imports_nothing(libraries: dict[str, str]) -> None:
    code = f"""
import sys, torch
from opweave import ir
with ir.priority({{"rms_norm": {[*NORMS]}, "causal_attention": ["flash_attn"]}}):
    print(ir.explain(ir.ops.rms_norm, torch.ones(3, 64), torch.ones(64), 1e-6))
    print(ir.explain(ir.ops.causal_attention, *torch.ones(3, 1, 2, 4, 64)))
    ir.ops.rms_norm(torch.ones(3, 64), torch.ones(64), 1e-6)
print({{*{[*PACKAGES.values()]}}} & {{*sys.modules}})
"""
    *lines, imported = run(libraries, code).splitlines()
    reasons = {line.split()[1]: line for line in lines if "on cpu" in line}
    for provider in NORMS:
        assert "x: on cpu (supports cuda)" in reasons[provider]
    assert "query: on cpu (supports cuda)" in reasons["flash_attn"]
    assert imported == "set()"


def test_commands_work(libraries: dict[str, str]) -> None:
    code = f"""
import sys
from opweave.cli import main
for command in (["ops", "rms_norm"], ["doctor"]):
    try:
        main(command)
    except SystemExit as exit:
        assert not exit.code, exit.code
print({{*{[*PACKAGES.values()]}}} & {{*sys.modules}})
"""
    *lines, imported = run(libraries, code).splitlines()
    text = "\n".join(lines)
    assert all(provider in text for provider in NORMS)
    assert imported == "set()"
