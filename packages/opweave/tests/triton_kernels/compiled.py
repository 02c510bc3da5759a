"""Compile every kernel for GPUs that are not there, and read the compilers' reports.

The launches are those of the provider's implementations on the inputs of the benchmarks, for the
number of processors and the shared memory of each GPU. This needs Triton without its interpreter.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from support import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from kernel_cells.cases import CASES
from kernel_cells.shape import Shape
from opweave import ir
from opweave.kernels.triton import launch

RECORD = Path(__file__).with_name("compiled.json")
_ROWS = {"": Shape(16, 4096, torch.bfloat16)}
_WEIGHTS = {  # numbers of tokens, for the smallest and the largest tile
    "decode": Shape(16, 2048, torch.bfloat16),
    "prompt": Shape(1024, 4096, torch.bfloat16),
    "prompt, float32": Shape(1024, 4096, torch.float32),
}
_ATTENTION = {  # tokens and keys, such that every GPU takes the form of the kernel in the name
    "prompt": Shape(1024, 4096, torch.bfloat16, 1024),
    "prompt, float32": Shape(1024, 4096, torch.float32, 1024),
    "decode": Shape(64, 16384, torch.bfloat16, 128),
    "decode, split": Shape(1, 4096, torch.bfloat16, 2048),
}


class Gpu(NamedTuple):
    """A GPU that kernels are compiled for.

    Attributes:
        backend: of Triton.
        arch: its architecture, as Triton names it.
        lanes: of a warp.
        shared_memory: the most bytes that a program can have.
        processors: the number of multiprocessors or compute units.
        has_float8: whether Triton supports float8_e4m3fn on it.
    """

    backend: str
    arch: int | str
    lanes: int
    shared_memory: int
    processors: int
    has_float8: bool


GPUS = {
    "sm_80": Gpu("cuda", 80, 32, 166_912, 108, False),  # A100
    "sm_90": Gpu("cuda", 90, 32, 232_448, 132, True),  # H100
    "sm_100": Gpu("cuda", 100, 32, 232_448, 148, True),  # B200
    "gfx942": Gpu("hip", "gfx942", 64, 65_536, 304, False),  # MI300X
}


class Usage(NamedTuple):
    """Resources of a compiled kernel.

    Attributes:
        registers: 32-bit registers of a thread; on AMD GPUs, vector registers.
        spills: bytes that a thread writes to memory for lack of registers; on AMD GPUs, the number
            of registers, vector and scalar ones.
        shared: bytes of shared memory of a program.
    """

    registers: int
    spills: int
    shared: int


Table = dict[str, dict[str, Usage]]
"""Usage by the name of a launch, and by GPU."""


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    Attributes:
        name: the op, the variant and the kernel.
        kernel: the name of the kernel.
    """

    name: str
    kernel: str
    function: Any
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]


def launches(gpu: Gpu) -> list[Launch]:
    """Return a launch of every kernel for every op that *gpu* runs with it."""
    registry = ir.current_registry()
    registry.ensure_ready()
    found: list[Launch] = []
    for name, op in sorted(registry.ops.items()):
        if "triton" not in op.impls:
            continue
        for case in CASES[name]:
            shapes = _ATTENTION if case.attends else _WEIGHTS if case.streams else _ROWS
            for label, shape in shapes.items():
                title = ", ".join(filter(None, (name, case.variant, label)))
                found += launches_of(gpu, op, case.inputs(shape), title)
    return found


def launches_of(gpu: Gpu, op: ir.IrOp, values: Sequence[Any], title: str) -> list[Launch]:
    """Return the launches of one call of *op*."""
    found: list[Launch] = []
    with _recording(gpu, title, found):
        op.impls["triton"].plain_fn(*values)
    return found


@contextmanager
def _recording(gpu: Gpu, title: str, found: list[Launch]) -> Iterator[None]:
    def record(
        kernel: launch.Kernel,
        grid: tuple[int, ...],
        index: int,
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
    ) -> None:
        is_float8 = any(isinstance(a, Tensor) and a.dtype is torch.float8_e4m3fn for a in arguments)
        if gpu.has_float8 or not is_float8:
            name = kernel.function.fn.__name__
            found.append(
                Launch(f"{title}: {name}", name, kernel.function, tuple(arguments), constants)
            )

    with (
        patch.object(launch, "_launch", record),
        patch.object(launch, "_current_device", lambda: -1),  # that of CPU tensors
        patch.object(launch, "shared_memory", lambda where: gpu.shared_memory),
        patch.object(launch, "processors", lambda where: gpu.processors),
    ):
        yield


def usage(call: Launch, gpu: Gpu) -> Usage:
    """Compile the kernel of *call* for *gpu*, as Triton does for a launch there."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget(gpu.backend, gpu.arch, gpu.lanes)
    backend = make_backend(target)
    bind = create_function_from_signature(call.function.signature, call.function.params, backend)
    bound, specialization, rest = bind(*call.arguments, **call.constants)
    options, signature, constants, attributes = call.function._pack_args(
        backend, dict(call.constants), bound, specialization, rest
    )
    source = ASTSource(call.function, signature, constants, attributes)
    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # the log is of the compiler, not of the cache
        compiled = triton.compile(source, target=target, options=options.__dict__)
    read = _of_amdgcn if gpu.backend == "hip" else _of_ptxas
    text = compiled.asm["amdgcn"] if gpu.backend == "hip" else log.getvalue()
    return Usage(*read(text), compiled.metadata.shared)


def _of_ptxas(log: str) -> tuple[int, int]:
    return _number(r"Used (\d+) registers", log), _number(r"(\d+) bytes spill stores", log)


def _of_amdgcn(assembly: str) -> tuple[int, int]:
    spilled = sum(_number(rf"\.{kind}_spill_count:\s+(\d+)", assembly) for kind in ("vgpr", "sgpr"))
    return _number(r"\.vgpr_count:\s+(\d+)", assembly), spilled


def _number(pattern: str, text: str) -> int:
    [found] = re.findall(pattern, text)
    return int(found)


def read_record() -> Table:
    """Return the usage that the repository has."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))
    return {
        name: {gpu: Usage(**values) for gpu, values in row.items()} for name, row in rows.items()
    }


def write_record(table: Table) -> None:
    lines = [
        f"  {json.dumps(name)}: " + json.dumps({gpu: used._asdict() for gpu, used in row.items()})
        for name, row in sorted(table.items())
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def problems(name: str, gpu: str, found: Usage, record: Table) -> list[str]:
    """Return why a kernel takes more than it did."""
    where = f"{name} for {gpu}"
    most = GPUS[gpu].shared_memory
    reasons = []
    if found.shared > most:
        reasons.append(f"{where}: {found.shared} bytes of shared memory of {most}")
    before = record.get(name, {}).get(gpu)
    if before is None:
        reasons.append(f"{where}: not in {RECORD.name}")
        return reasons
    if found.spills > before.spills:
        reasons.append(f"{where}: {found.spills} spills instead of {before.spills}")
    if found.registers > before.registers * 1.1 + 4:
        reasons.append(f"{where}: {found.registers} registers instead of {before.registers}")
    return reasons
