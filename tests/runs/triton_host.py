"""Measure what a call of a pointwise Triton kernel costs the host; needs no GPU.

    PYTHONPATH=build/triton python tests/runs/triton_host.py [--json]

The driver is a fake whose launcher does nothing, and tensors are on the CPU: times are those of
Python until a launcher is called, and without allocations of GPU memory. Minima of several rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / path) for path in ("packages/opweave/src", "packages/opweave/tests")]
os.environ.setdefault("OPWEAVE_PLATFORM", "cpu")
_CALLS, _ROUNDS = 500, 20


def measure() -> dict[str, dict[str, float]]:
    """Return microseconds by op: of a launch by Triton, of ours, and of calls of the op."""
    import torch

    from opweave import ir
    from opweave.kernels.triton import launch
    from opweave.kernels.triton import rows as activation
    from opweave.kernels.triton import rows as norm
    from triton_kernels.fake_driver import SilentLauncher, fake_driver

    ir.current_registry().ensure_ready()
    x = torch.randn(16, 8192).to(torch.bfloat16)
    out, weight = x[:, :4096].contiguous(), x[0, :4096].clone()
    act: Any = activation._activation_kernels.act_and_mul
    rms: Any = norm._norm_kernels.rms_norm
    launches: dict[str, tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any], Any]] = {
        "silu_and_mul": (
            act,
            (16, 4),
            (out, x, 8192, 4096),
            {"KIND": "silu", "SECOND": False, "BLOCK": 1024},
            (x,),
        ),
        "rms_norm": (
            rms,
            (16,),
            (out, None, None, out, None, weight, None, 4096, 0, 4096, 0, 4096, 1e-6),
            {"SCHEME": None, "BLOCK": 4096, "num_warps": 8},
            (out, weight, 1e-6),
        ),
    }
    found = {}
    with fake_driver(SilentLauncher), torch.inference_mode():
        for op, (kernel, grid, arguments, constants, inputs) in launches.items():
            impl: Any = ir.current_registry().op(op).impls["triton"]
            calls: dict[str, Callable[[], Any]] = {
                "launch by Triton": lambda: kernel.function[grid](*arguments, **constants),  # noqa: B023
                "launch": lambda: launch.launch(kernel, grid, *arguments, **constants),  # noqa: B023
                "torch op": lambda: impl.impl_fn(*inputs),  # noqa: B023
                "implementation": lambda: impl.plain_fn(*inputs),  # noqa: B023
                "its outputs": lambda: torch.empty_like(out),
            }
            for call in calls.values():
                call(), call()
            found[op] = {
                name: min(timeit.repeat(call, number=_CALLS, repeat=_ROUNDS)) / _CALLS * 1e6
                for name, call in calls.items()
            }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="triton_host.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1: Triton interprets kernels; unset it to compile them")
    found = measure()
    if options.json:
        rows = [
            {"name": f"host.{op}", "case": case, "value": value, "unit": "us"}
            for op, row in found.items()
            for case, value in row.items()
        ]
        print(json.dumps({"rows": rows}))
    else:
        for op, row in found.items():
            print(op, *(f"{case} {value:.1f} us" for case, value in row.items()), sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
