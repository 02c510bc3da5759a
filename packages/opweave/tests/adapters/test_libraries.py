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


EXPLAIN = f"""
import sys, torch
torch.cuda.is_available = lambda: %s
from opweave import ir
with ir.priority({{"rms_norm": {[*NORMS]}, "causal_attention": ["flash_attn"]}}):
    print(ir.explain(ir.ops.rms_norm, torch.ones(3, 64), torch.ones(64), 1e-6))
    print(ir.explain(ir.ops.causal_attention, *torch.ones(3, 1, 2, 4, 64)))
    ir.ops.rms_norm(torch.ones(3, 64), torch.ones(64), 1e-6)
print({{*{[*PACKAGES.values()]}}} & {{*sys.modules}})
"""


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("has_packages", [False, True])
def test_explain_names_the_reason_and_imports_nothing(
    libraries: dict[str, str], tmp_path: Path, has_gpu: bool, has_packages: bool
) -> None:
    for package in ("triton", "cutlass"):
        if has_packages:
            (tmp_path / f"{package}.py").touch()
    *lines, imported = run(libraries, EXPLAIN % has_gpu).splitlines()
    reasons = {fields[1]: line for line in lines if len(fields := line.split()) > 1}
    without_package = {
        "liger": "Triton is not installed",
        "flag_gems": "Triton is not installed",
        "quack": "CUTLASS (nvidia-cutlass-dsl) is not installed",
    }
    for provider in (*NORMS, "flash_attn"):
        rule = f"{'query' if provider == 'flash_attn' else 'x'}: on cpu (supports cuda)"
        reason = rule if has_gpu else "torch finds no GPU"
        if not has_packages:
            reason = without_package.get(provider, reason)
        assert reason in reasons[provider]
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


# Arguments of FlashAttention, with functions that follow its documentation on the CPU.

# Masks are aligned to the last query and key, rows without keys are zero, and rows of no sequence
# are left as they are in memory.
LIBRARY = """
import math
import torch

def attend(q, k, v, softmax_scale, causal, window_size, softcap):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros_like(q)
    for i in range(len(q)):
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            last = i + len(k) - len(q)
            low = 0 if window_size[0] < 0 else max(last - window_size[0], 0)
            right = 0 if causal else window_size[1]
            high = len(k) if right < 0 else max(last + right + 1, 0)
            if low < high:
                scores = k[low:high, group] @ q[i, head] * scale
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                out[i, head] = torch.softmax(scores, 0) @ v[low:high, group]
    return out

def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    options = softmax_scale, causal, window_size, softcap
    return torch.stack([attend(*each, *options) for each in zip(q, k, v)])

def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, softcap=0.0
):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= cu_seqlens_k.diff().max()
    out = torch.full_like(q, math.nan)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(ends_q) - 1):
        a, b, c, d = ends_q[i], ends_q[i + 1], ends_k[i], ends_k[i + 1]
        out[a:b] = attend(q[a:b], k[c:d], v[c:d], softmax_scale, False, (-1, -1), softcap)
    return out
"""
CALLS = """
import inspect
import torch
from opweave import ir

def check(name, *arguments):
    op = getattr(ir.ops, name)
    kernel = inspect.unwrap(op.impls["flash_attn"].impl_fn)  # without the rule, which needs a GPU
    torch.testing.assert_close(kernel(*arguments), op.native(*arguments))

torch.manual_seed(0)
for queries, keys in ((3, 5), (5, 3), (1, 4), (2, 0), (0, 2)):
    q, k = torch.randn(2, queries, 4, 8), torch.randn(2, keys, 2, 8)
    v = torch.randn_like(k)
    check("bidirectional_attention", q, k, v)
    check("bidirectional_attention", q, k, v, 0.3)
    for window in (None, 1, 3):
        for soft_cap in (None, 2.0):
            check("causal_attention", q, k, v, 0.3, window, soft_cap)
for dtype in (torch.int32, torch.int64):
    for ends_q, ends_k, rows in ([0, 2, 5], [0, 3, 4], 5), ([0, 1, 4], [0, 0, 4], 7), ([0], [0], 1):
        q, k = torch.randn(rows, 4, 8), torch.randn(6, 2, 8)
        cu = [torch.tensor(ends, dtype=dtype) for ends in (ends_q, ends_k)]
        for soft_cap in (None, 2.0):
            check("varlen_attention", q, k, torch.randn_like(k), *cu, 0.3, False, None, soft_cap)
print("agreed")
"""


def test_calls_mean_what_the_ops_do(tmp_path: Path) -> None:
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "flash_attn_interface.py").write_text(LIBRARY)
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "agreed\n", done.stderr


VERSION = """
import torch
torch.cuda.is_available = lambda: True
from opweave import ir
for op in (ir.ops.mla_attention_decode, ir.ops.paged_attention):
    impl = op.impls["flashinfer"]
    print(impl.supported or impl.unsupported_reason)
"""


def test_latent_attention_needs_the_plans_of_a_recent_flashinfer(
    libraries: dict[str, str], tmp_path: Path
) -> None:
    reason = "FlashInfer lacks MLAPlanMetadata: install flashinfer-python 0.7.2"
    assert run(libraries, VERSION).splitlines() == [reason, "True"]
    folder = tmp_path / "flashinfer" / "mla" / "_batch_mla"
    folder.mkdir(parents=True)
    (folder / "_contracts.py").touch()
    assert run(libraries, VERSION).splitlines() == ["True", "True"]
