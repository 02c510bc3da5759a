"""Random programs: what compiled code returns and changes is compared with eager.

    python tests/runs/programs.py --programs 200 --seed 1 --json

A program is a list of Python statements over two inputs that may share memory: views, in-place
operators on any live tensor, ops of the IR, functional and donating, with kernels of every kind.
With ``--state FILE``, an interrupted run goes on where it stopped. A mismatch is printed as the
shortest program that still shows it; one that ``backend="aot_eager"`` shares, with every op native,
is torch's own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from compile.programs import Ops, declare
from opweave import ir

ROWS, WIDTH = 4, 8
STEPS = (
    "{new} = {a}[1:]",
    "{new} = {a}[:, : {a}.shape[1] // 2]",
    "{new} = {a}.select(0, 0).unsqueeze(0)",
    "{new} = {a}.t()",
    "{new} = {a}.permute(1, 0).contiguous()",
    "{new} = {a}.unfold(0, 2, 1)[0].t()",
    "{new} = {a}.as_strided((2, 4), (8, 1))",
    "{new}, {new2} = {a}.chunk(2, -1)",
    "{new} = {a}.reshape(-1).view(-1, 4)",
    "{new} = ({a} * 2).view(torch.int16).view({a}.dtype)",
    "{new} = {a}.sin()",
    "{new} = {a} + {b}",
    "{new} = {a}.tanh() * {a}.mean(-1, keepdim=True)",
    "{a}.mul_(0.5)",
    "{a}.tanh_()",
    "{a}.add_({b})",
    "{a}[:1].copy_({b}[:1])",
    "{new} = {a}.index_put((torch.tensor([0]),), {b}[:1])",
    "{new} = {a}.select_scatter({b}[0], 0, 0)",
    "{new} = {a}.scatter(0, torch.zeros_like({a}, dtype=torch.int64), {b})",
    "{new} = ops.norm({a}, None, 1e-5)",
    "{new} = ops.norm({a} * 1, w[: {a}.shape[1]], 1e-5)",
    "{new}, {new2} = ops.add_norm({a}, {b}, None, 1e-5)",
    "{new}, {new2} = ops.add_norm.maybe_inplace({a} * 2, {b} + 1, None, 1e-5)",
    "{new} = ops.add_norm({a}, {b}, None, 1e-5)[1]",
    "{new} = ops.halves({a}, shift=0.25)",
    "{new} = ops.halves.maybe_inplace({a}.cos())",
)
ALIASES = ("apart", "same", "overlapping", "views")
PROVIDERS = ("native", "functional", "inplace", "crossed", "opaque")


@dataclass(frozen=True)
class Program:
    """A program, and how it is compiled and called."""

    steps: tuple[str, ...]
    results: tuple[str, ...]
    aliases: str
    dtype: str
    provider: str
    mode: str
    dynamic: bool | None
    codegen: bool
    inplace: bool
    fusion: bool
    seed: int

    @property
    def source(self) -> str:
        """The program as a Python function."""
        lines = [*self.steps, f"return ({', '.join(self.results)},)"]
        return "def program(a, b, w):\n" + "".join(f"    {line}\n" for line in lines)

    def function(self, ops: Ops) -> Callable[..., tuple[Tensor, ...]]:
        """Return the program as a function."""
        names: dict[str, Any] = {"torch": torch, "ops": ops}
        exec(self.source, names)
        return names["program"]

    def inputs(self) -> list[Tensor]:
        """Return the inputs, in the memory that ``aliases`` names."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)
        base = torch.randn(3 * ROWS, WIDTH, generator=generator).to(dtype)
        a, b = {
            "apart": (base[:ROWS].clone(), base[ROWS : 2 * ROWS].clone()),
            "same": (base[:ROWS],) * 2,
            "overlapping": (base[:ROWS], base[1 : ROWS + 1]),
            "views": (base[:ROWS], base[ROWS : 2 * ROWS]),
        }[self.aliases]
        return [a, b, base[-1].clone()]


def draw(rng: random.Random, ops: Ops, codegen: bool | None) -> Program:
    """Draw a program every step of which runs in eager mode."""
    program = Program(
        steps=(),
        results=("a", "b"),
        aliases=rng.choice(ALIASES),
        dtype=rng.choice(("float32", "float32", "bfloat16")),
        provider=rng.choice(PROVIDERS),
        mode=rng.choice(("no_grad", "no_grad", "inference_mode")),
        dynamic=rng.choice((True, False, None)),
        codegen=rng.random() < 0.5 if codegen is None else codegen,
        inplace=rng.random() < 0.8,
        fusion=rng.random() < 0.8,
        seed=rng.randrange(1 << 30),
    )
    names = ["a", "b"]
    for number in range(rng.randrange(3, 9)):
        new, new2 = f"x{number}", f"y{number}"
        template = rng.choice(STEPS)
        step = template.format(a=rng.choice(names), b=rng.choice(names), new=new, new2=new2)
        made = [
            name for name in (new, new2) if f"{{{'new2' if name == new2 else 'new'}}}" in template
        ]
        longer = replace(program, steps=(*program.steps, step), results=(*names, *made))
        try:
            run(longer, ops, longer.function(ops))
        except Exception:  # does not fit: the shapes differ, or a view shares elements
            continue
        program, names = longer, [*names, *made]
    chosen = rng.sample(names, k=min(len(names), rng.randrange(1, 4)))
    return replace(program, results=tuple(chosen))


def run(program: Program, ops: Ops, function: Callable[..., Any]) -> list[Tensor]:
    """Return the results of *function*, and the inputs after the call."""
    inputs = program.inputs()
    with getattr(torch, program.mode)():
        return [value.clone() for value in (*function(*inputs), *inputs)]


def difference(program: Program, ops: Ops, backend: str) -> str:
    """Return how compiled code differs from eager, or nothing."""
    function = program.function(ops)
    force(ops, "native")
    expected = run(program, ops, function)
    if backend == "opweave":
        force(ops, program.provider)
    torch.compiler.reset()
    options: dict[str, Any] = {}
    if backend == "opweave":
        options = {"codegen": program.codegen, "inplace": program.inplace, "fusion": program.fusion}
    try:
        compiled = torch.compile(
            function, backend=backend, dynamic=program.dynamic, options=options or None
        )
        found = run(program, ops, compiled)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    for number, (value, wanted) in enumerate(zip(found, expected, strict=True)):
        tolerance = 1e-4 if program.dtype == "float32" else 6e-2
        try:
            torch.testing.assert_close(
                value, wanted, atol=tolerance, rtol=tolerance, equal_nan=True
            )
        except AssertionError as error:
            return f"value {number}: {' '.join(str(error).split())[:200]}"
    return ""


def force(ops: Ops, provider: str) -> None:
    """Let every op that has *provider* use it."""
    for op in (ops.norm, ops.add_norm, ops.halves):
        op.set_default([provider] if provider in op.impls else [])


def minimal(program: Program, ops: Ops) -> Program:
    """Return the shortest program that still differs, dropping one step at a time."""
    for position in reversed(range(len(program.steps))):
        shorter = replace(program, steps=program.steps[:position] + program.steps[position + 1 :])
        try:
            run(shorter, ops, shorter.function(ops))
        except Exception:
            continue
        if difference(shorter, ops, "opweave"):
            program = shorter
    return program


def examine(seed: int, ops: Ops, codegen: bool | None = None) -> dict[str, Any] | None:
    """Return what program number *seed* shows, or None where compiled code agrees with eager."""
    program = draw(random.Random(seed), ops, codegen)
    found = difference(program, ops, "opweave")
    if not found:
        return None
    by_torch = difference(program, ops, "aot_eager")
    if not by_torch:
        program = minimal(program, ops)
    return {
        "seed": seed,
        "difference": found,
        "torch": by_torch,
        "source": program.source,
        "program": asdict(program),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=100, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--state", type=Path, help="file that an interrupted run continues from")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    state = {"seed": given.seed, "findings": []}
    if given.state and given.state.exists():
        state = json.loads(given.state.read_text(encoding="utf-8"))
    torch._dynamo.config.recompile_limit = 64
    with ir.isolated_registry():
        ops = declare()
        for seed in range(state["seed"], given.seed + given.programs):
            if found := examine(seed, ops):
                state["findings"].append(found)
            state["seed"] = seed + 1
            if given.state:
                given.state.write_text(json.dumps(state), encoding="utf-8")
            print(f"\r{seed + 1 - given.seed} of {given.programs}", end="", file=sys.stderr)
    print(file=sys.stderr)
    own = [found for found in state["findings"] if not found["torch"]]
    if given.json:
        print(json.dumps({"programs": given.programs, "findings": state["findings"]}))
    else:
        for found in own:
            print(f"seed {found['seed']}: {found['difference']}\n{found['source']}")
        print(f"{given.programs} programs: {len(own)} mismatches")
    return 1 if own else 0


if __name__ == "__main__":
    raise SystemExit(main())
