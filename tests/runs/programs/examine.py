"""Compare programs with eager, many in one graph, and look for the shortest that differs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from runs.programs.kernels import Library
from runs.programs.outcome import Outcome, call, difference, expect
from runs.programs.program import Program, Settings, draw, draw_settings, without_one_step


@dataclass(frozen=True)
class Finding:
    """Programs whose outcome differs from eager."""

    seed: int
    difference: str
    torch: str  # how plain torch fails on the same programs; empty where it does not
    settings: Settings
    programs: tuple[Program, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sources": [program.source for program in self.programs]}


def draw_batch(
    seed: int, size: int, library: Library, codegen: bool | None, spellings: float
) -> tuple[Settings, list[Program]]:
    """Draw the programs of one graph, and their settings."""
    rng = random.Random(seed)
    settings = draw_settings(rng, codegen)
    library.force("native")

    def runs(program: Program) -> bool:
        try:
            call([program], settings.mode, joined([program], library))
            call([program], settings.mode, joined([program], library), dtype=torch.float64)
        except Exception:  # does not fit: the shapes differ, or a view shares elements
            return False
        return True

    return settings, [draw(rng, runs, spellings) for _ in range(size)]


def joined(
    programs: Sequence[Program], library: Library, *, plain: bool = False
) -> Callable[..., Any]:
    """Return one function of the inputs of all programs; if *plain*, it calls torch alone."""
    functions = [program.function(library, plain=plain) for program in programs]

    def run(*values: Any) -> list[Any]:
        return [each(*values[3 * i : 3 * i + 3]) for i, each in enumerate(functions)]

    return run


def differences(
    programs: Sequence[Program],
    settings: Settings,
    library: Library,
    backend: str,
    *,
    plain: bool = False,
) -> str:
    """Return how *programs* in one graph differ from eager mode with native kernels.

    Args:
        programs: what to compare.
        settings: how they are compiled and called.
        library: the ops that they call.
        backend: of ``torch.compile``; "eager" calls them with the kernels of the settings.
        plain: compile native functions in place of the ops.
    """
    library.force("native")
    expected = [expect(each, settings.mode, joined([each], library)) for each in programs]
    function = joined(programs, library, plain=plain)
    if backend in ("opweave", "eager"):
        library.force(settings.provider)
    if backend != "eager":
        torch.compiler.reset()
        function = torch.compile(
            function,
            backend=backend,
            dynamic=settings.dynamic,
            options=settings.options if backend == "opweave" else None,
        )
    try:
        found: list[Outcome] = call(programs, settings.mode, function)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    finally:
        library.force("native")
    return next(filter(None, map(difference, expected, found)), "")


def examine(
    seed: int, library: Library, size: int = 1, codegen: bool | None = None, spellings: float = 0.0
) -> tuple[Settings, list[Finding]]:
    """Compare the programs of batch number *seed*; return their settings and what differs."""
    settings, programs = draw_batch(seed, size, library, codegen, spellings)
    return settings, [
        finding
        for backend in ("eager", "opweave")
        for finding in _search(seed, programs, settings, library, backend)
    ]


def _search(
    seed: int, programs: Sequence[Program], settings: Settings, library: Library, backend: str
) -> list[Finding]:
    """Return the programs that differ: halves of a batch, down to one program if it does alone."""
    found = differences(programs, settings, library, backend)
    if not found:
        return []
    if len(programs) > 1:
        middle = len(programs) // 2
        parts = [
            finding
            for half in (programs[:middle], programs[middle:])
            for finding in _search(seed, half, settings, library, backend)
        ]
        if parts:
            return parts
    by_torch = _by_torch(programs, settings, library) if backend == "opweave" else ""
    if not by_torch and len(programs) == 1:
        programs = [_shortest(programs[0], settings, library, backend)]
        by_torch = _by_torch(programs, settings, library) if backend == "opweave" else ""
    return [Finding(seed, found, by_torch, settings, tuple(programs))]


def _by_torch(programs: Sequence[Program], settings: Settings, library: Library) -> str:
    """Return how torch alone gets them wrong: without Inductor, or with it.

    For Inductor, ops are opaque, or native functions that it fuses.
    """
    tries = [("aot_eager", False)]
    if settings.codegen:
        tries += [("inductor", False), ("inductor", True)]
    for backend, plain in tries:
        if found := differences(programs, settings, library, backend, plain=plain):
            return f"{backend}{' without ops' * plain}: {found}"
    return ""


def _shortest(program: Program, settings: Settings, library: Library, backend: str) -> Program:
    """Drop steps as long as the program still differs."""
    for shorter in without_one_step(program):
        try:
            library.force("native")
            call([shorter], settings.mode, joined([shorter], library))
        except Exception:
            continue
        if differences([shorter], settings, library, backend):
            return _shortest(shorter, settings, library, backend)
    return program
