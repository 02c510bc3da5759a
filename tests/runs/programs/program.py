"""One random program, and the settings that it is compiled and called with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from runs.programs.kernels import PROVIDERS, Library

ROWS, WIDTH = 4, 8
STEPS = (
    # views
    "{new} = {a}[1:]",
    "{new} = {a}[:, ::2]",
    "{new} = {a}[:, : {a}.shape[1] // 2]",
    "{new} = {a}.select(0, 0).unsqueeze(0)",
    "{new} = {a}.t()",
    "{new} = {a}.permute(1, 0).contiguous()",
    "{new} = {a}.unfold(0, 2, 1)[0].t()",
    "{new} = {a}.as_strided((2, 4), (8, 1))",
    "{new}, {new2} = {a}.chunk(2, -1)",
    "{new} = {a}.reshape(-1).view(-1, 4)",
    "{new} = {a}[:1].expand(4, -1)",
    "{new} = ({a} * 2).view(torch.int16).view({a}.dtype)",
    "{new} = {a}.detach()",
    # new tensors
    "{new} = {a}.sin()",
    "{new} = {a} + {b}",
    "{new} = {a}.clone()",
    "{new} = torch.cat([{a}, {b}])",
    "{new} = {a}.tanh() * {a}.mean(-1, keepdim=True)",
    "{new} = torch.zeros_like({a}).add_({b})",
    "{new} = torch.empty_like({a}).copy_({a})",
    "{new} = {a}.index_put((torch.tensor([0]),), {b}[:1])",
    "{new} = {a}.select_scatter({b}[0], 0, 0)",
    "{new} = {a}.scatter(0, torch.zeros_like({a}, dtype=torch.int64), {b})",
    # writes
    "{a}.mul_(0.5)",
    "{a}.tanh_()",
    "{a}.add_({b})",
    "{a}.copy_({b})",
    "{a}.zero_()",
    "{a}.clamp_(-0.5, 0.5)",
    "{a}[:1].copy_({b}[:1])",
    "{a}.view(-1)[::2].fill_(0.25)",
    "{a}.t().mul_(2)",
    "{a}.index_put_((torch.tensor([0]),), {b}[:1])",
    "{a}.index_add_(0, torch.tensor([0]), {b}[:1])",
    "{a}.scatter_(0, torch.zeros_like({a}, dtype=torch.int64), {b})",
    # declared ops
    "{new} = ops.norm({a}, None, 1e-5)",
    "{new} = ops.norm({a} * 1, w[: {a}.shape[1]], 1e-5)",
    "{new}, {new2} = ops.add_norm({a}, {b}.expand_as({a}), None, 1e-5)",
    "{new}, {new2} = ops.add_norm.maybe_inplace({a} * 2, {b}.expand_as({a}) + 1, None, 1e-5)",
    "{new} = ops.add_norm({a}, {b}.expand_as({a}), None, 1e-5)[1]",
    "{new} = ops.halves({a}, shift=0.25)",
    "{new} = ops.halves.maybe_inplace({a}.cos())",
    "{new} = ops.halves.maybe_inplace(ops.halves({a}))",
    # opweave's own
    "{new} = own.rms_norm({a}, w[: {a}.shape[1]], 1e-5)",
    "{new}, {new2} = own.fused_add_rms_norm({a}, {b}.expand_as({a}), w[: {a}.shape[1]], 1e-5)",
    (
        "{new}, {new2} = own.fused_add_rms_norm.maybe_inplace("
        "{a} + 1, {b}.expand_as({a}) * 2, None, 1e-5)"
    ),
    "{new} = own.silu_and_mul({a})",
    "{new} = own.gelu_and_mul({a} + {b}, 'tanh')",
    "{new} = own.linear({a}, w[: {a}.shape[1]].unsqueeze(0).expand(4, -1) * 1)",
)
# Ops written in plain PyTorch, and programs that are nearly that.
WIDE = "wide = {a}.to(torch.promote_types({a}.dtype, torch.float32))"
RSQRT = "torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)"
WEIGHT = "w[: {a}.shape[1]]"
HALF = "{a}.shape[-1] // 2"
SPELLINGS = (
    f"{{new}} = functional.linear({{a}}, {WEIGHT}.unsqueeze(0))",
    f"{{new}} = {{a}} @ {WEIGHT}.unsqueeze(0).t()",
    f"{{new}} = functional.linear({{a}}, {WEIGHT}.unsqueeze(0), {{b}}[0, :1])",
    f"{{new}} = functional.rms_norm({{a}}, {{a}}.shape[-1:], {WEIGHT}, 1e-5)",
    f"{WIDE}; {{new}} = {WEIGHT} * (wide * {RSQRT}).to({{a}}.dtype)",
    f"{WIDE}; {{new}} = (wide * {RSQRT} * (1.0 + {WEIGHT})).to({{a}}.dtype)",
    f"{WIDE}; {{new}} = (wide * {RSQRT}).to({{a}}.dtype)",
    f"{{new}} = functional.layer_norm({{a}}, {{a}}.shape[-1:], {WEIGHT}, {{b}}[0], 1e-5)",
    "{new} = functional.layer_norm({a}, {a}.shape[-1:])",
    "h1, h2 = {a}.chunk(2, -1); {new} = functional.silu(h1) * h2",
    "h1, h2 = {a}.chunk(2, -1); {new} = h1 * functional.silu(h2)",
    f"{{new}} = functional.silu({{a}}[:, : {HALF}]) * {{a}}[:, {HALF} :]",
    "h1, h2 = {a}.chunk(2, -1); {new} = functional.gelu(h1) * h2",
    "h1, h2 = {a}.chunk(2, -1); {new} = functional.gelu(h1, approximate='tanh') * h2",
    # near misses, and inner values that are used again
    f"{WIDE}; {{new2}} = {RSQRT}; {{new}} = {WEIGHT} * (wide * {{new2}}).to({{a}}.dtype)",
    f"{WIDE}; {{new}} = {WEIGHT} * (wide * {RSQRT}).to(torch.float16).to({{a}}.dtype)",
    f"{WIDE}; {{new}} = {WEIGHT} * ({{b}}[:1] * {RSQRT}).to({{a}}.dtype)",
    f"{{new}} = {WEIGHT} * ({{a}} * torch.rsqrt({{a}}.pow(2).mean(-2, keepdim=True) + 1e-5))",
    "h1, {new2} = {a}.chunk(2, -1); {new} = functional.silu({new2}) * {new2}",
    "h1, h2 = {a}.chunk(2, -1); {new2} = functional.silu(h1); {new} = {new2} * h2",
    "h1, h2 = {a}.chunk(2, -1); {new} = functional.silu(h1).mul_(h2)",
    "h1, h2 = {a}.chunk(2, -1); {new} = functional.silu(h1); h2.mul_(2); {new} = {new} * h2",
    f"{{new}} = functional.silu({{a}}[:, : {HALF}]) * {{b}}[:, {HALF} :]",
    "h1, h2 = {a}.chunk(2, -1); {new} = functional.sigmoid(h1) * h2",
    f"{{new}} = functional.linear({{a}}, ({WEIGHT} * 2).unsqueeze(0))",
)
ALIASES = ("apart", "same", "overlapping", "views")
MODES = ("no_grad", "no_grad", "inference_mode", "inference_inputs", "grad")


@dataclass(frozen=True)
class Settings:
    """How programs are compiled and called."""

    provider: str
    mode: str
    dynamic: bool | None
    codegen: bool
    inplace: bool
    fusion: bool

    @property
    def options(self) -> dict[str, bool]:
        return {"codegen": self.codegen, "inplace": self.inplace, "fusion": self.fusion}


@dataclass(frozen=True)
class Program:
    """A list of Python statements over two inputs that may share memory, and a weight."""

    steps: tuple[str, ...]
    results: tuple[str, ...]
    aliases: str
    dtype: str
    seed: int

    @property
    def source(self) -> str:
        """The program as a Python function."""
        lines = [*self.steps, f"return ({', '.join(self.results)},)"]
        return "def program(a, b, w):\n" + "".join(f"    {line}\n" for line in lines)

    def function(self, library: Library, *, plain: bool = False) -> Callable[..., Any]:
        """Return the program as a function; if *plain*, one that calls torch alone."""
        names: dict[str, Any] = {
            "torch": torch,
            "functional": functional,
            **library.names(plain=plain),
        }
        exec(self.source, names)
        return names["program"]


def draw_settings(rng: random.Random, codegen: bool | None) -> Settings:
    """Draw settings; with *codegen*, Inductor generates code."""
    return Settings(
        provider=rng.choice(PROVIDERS),
        mode=rng.choice(MODES),
        dynamic=rng.choice((True, False, None)),
        codegen=rng.random() < 0.5 if codegen is None else codegen,
        inplace=rng.random() < 0.8,
        fusion=rng.random() < 0.8,
    )


def draw(rng: random.Random, runs: Callable[[Program], bool], spellings: float = 0.0) -> Program:
    """Draw a program of up to eight steps, each of which *runs* in eager mode.

    Args:
        rng: draws it.
        runs: whether a program runs.
        spellings: the share of steps that spell an op in plain PyTorch.
    """
    program = Program(
        steps=(),
        results=("a", "b"),
        aliases=rng.choice(ALIASES),
        dtype=rng.choice(("float32", "float32", "bfloat16", "float16")),
        seed=rng.randrange(1 << 30),
    )
    names = ["a", "b"]
    for number in range(rng.randrange(3, 9)):
        template = rng.choice(SPELLINGS if rng.random() < spellings else STEPS)
        new = {"new": f"x{number}", "new2": f"y{number}"}
        step = template.format(a=rng.choice(names), b=rng.choice(names), **new)
        made = [name for key, name in new.items() if f"{{{key}}}" in template]
        longer = replace(program, steps=(*program.steps, step), results=(*names, *made))
        if runs(longer):
            program, names = longer, [*names, *made]
    chosen = rng.sample(names, k=min(len(names), rng.randrange(1, 4)))
    return replace(program, results=tuple(chosen))


def without_one_step(program: Program) -> list[Program]:
    """Return the programs that lack one step, the last one first."""
    steps = program.steps
    return [
        replace(program, steps=steps[:position] + steps[position + 1 :])
        for position in reversed(range(len(steps)))
    ]
