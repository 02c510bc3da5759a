"""Kernels alone: cells of benchmarks/gpu.py, prompt attention, and the host time of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import gpu  # benchmarks/gpu.py
from gpu_queue.job import Row
from gpu_queue.measuring import alone
from harness import copy_speed, device_time, host_time, significant
from kernel_cells.cell import Cell
from kernel_cells.contenders import torch_baseline
from kernel_cells.shape import Shape

_ROUNDS = 3


def cells(
    op: str,
    shapes: Sequence[tuple[int, int]],
    device: str,
    provider: str = "triton",
    hidden: int = gpu.HIDDEN,
    backend: str = "inductor",
    copied: int = 2**30,
) -> Iterator[Row]:
    """Yield cells of ``benchmarks/gpu.py``: *shapes* are tokens, and keys that each sees."""
    chosen = [
        Cell(op, index, Shape(tokens, hidden, torch.bfloat16, context), 1)
        for index in range(len(gpu.CASES[op]))
        for tokens, context in shapes
    ]
    with torch.inference_mode():
        for cell in chosen:
            inputs = gpu.on_device(cell.inputs(), device)
            gpu.baselines(cell, inputs, backend)
            cell.op.using(f"{provider}!")(*inputs)
        with alone():
            speed = copy_speed(device, copied)
            for cell in chosen:
                for found in gpu.measured(
                    cell, speed, device=device, provider=provider, backend=backend
                ):
                    yield from _rows(cell, found, provider)


def _case(cell: Cell) -> str:
    return str(cell).removesuffix(", 1 thread")


def _rows(cell: Cell, found: dict[str, Any], provider: str) -> Iterator[Row]:
    for contender, value in found["us"].items():
        yield {
            "name": f"kernel.{cell.name}",
            "case": _case(cell),
            "contender": contender,
            "value": value,
            "unit": "us",
            "host_us": found["host_us"][contender],
            **({"limit_share": found["share"]} if contender == provider else {}),
        }


def host(
    ops: Sequence[str],
    device: str,
    provider: str = "triton",
    hidden: int = gpu.HIDDEN,
    tokens: int = 16,
) -> Iterator[Row]:
    """Yield what calls of pointwise ops cost the host, ours and of plain torch."""
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for op in ops:
        cell = Cell(op, 0, Shape(tokens, hidden, torch.bfloat16), 1)
        arguments, case = gpu.on_device(cell.inputs(), device), f"{op}, {_case(cell)}"
        calls[case, provider] = partial(cell.op.using(f"{provider}!"), *arguments)
        calls[case, "eager"] = partial(torch_baseline(cell), *arguments)
    with torch.inference_mode():
        for call in calls.values():
            call()
        with alone():
            found = {
                name: min(host_time(call, device) for _ in range(_ROUNDS))
                for name, call in calls.items()
            }
    for (case, contender), value in found.items():
        yield {
            "name": "host",
            "case": case,
            "contender": contender,
            "value": significant(value),
            "unit": "us",
        }


def prompt_attention(
    tokens: int, device: str, provider: str = "triton", hidden: int = gpu.HIDDEN
) -> Iterator[Row]:
    """Yield the time of attention over one prompt, ours and torch's over gathered keys."""
    cell = Cell("paged_attention", 0, Shape(tokens, hidden, torch.bfloat16, tokens), 1)
    arguments = gpu.on_device(cell.inputs(), device)
    query, keys, values = arguments[0], *map(_gathered, arguments[1:3])
    eager, selected = torch_baseline(cell), cell.op
    calls: dict[str, Callable[[], Any]] = {
        provider: lambda: cell.op.using(f"{provider}!")(*arguments),
        "opweave": lambda: selected(*arguments),
        "aten": lambda: selected.using("aten!")(*arguments),
        "sdpa": lambda: scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, is_causal=True, enable_gqa=True
        ),
        "gather and sdpa": lambda: eager(*arguments),
    }
    with torch.inference_mode():
        for call in calls.values():
            call()
        with alone():
            found = {
                name: min(device_time(call, device) for _ in range(_ROUNDS))
                for name, call in calls.items()
            }
    for contender, value in found.items():
        yield {
            "name": "prompt_attention",
            "case": f"{tokens} tokens, {query.shape[1]} heads of {query.shape[2]}, bfloat16",
            "contender": contender,
            "value": significant(value),
            "unit": "us",
        }


def _gathered(cache: Tensor) -> Tensor:
    """Return the keys of a cache of blocks, (blocks, heads, size, width), as one sequence."""
    return cache.transpose(0, 1).flatten(1, 2)[None].contiguous()
