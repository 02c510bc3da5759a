"""Compile time with opweave, and the speed of the result.

    python benchmarks/compile.py             tables
    python benchmarks/compile.py --json      one object, see below
    python benchmarks/compile.py --layers 2 8 32 80

The model is the Llama of opweave, small enough that compiling takes seconds, with random weights.
"Plain" is ``torch.compile`` of the same model whose ops are their native functions, which Dynamo
traces through, as if they had been written out. Everything that is compared is measured in turns in
one process, without caches, and a figure is the median over rounds.

``compile.time``: seconds to compile with every op native; `ratio` = plain / ours.
``compile.passes``: milliseconds of that in our passes.
``compile.differing_lines``: lines of generated code that differ from plain's, comments left out;
    the model takes ids and positions as one tensor, so that both graphs have the same inputs.
``compile.traces``, ``compile.patterns``: how many implementations and patterns were traced.
``compile.allocated``: bytes that one call allocates, with and without donation.
``compile.peak``: how many of them it holds at once.
``compile.latency``: microseconds per call; baselines are plain, eager, and transformers compiled.
"""

from __future__ import annotations

import difflib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import opweave.compile
from harness import (
    Parser,
    describe_machine,
    interleaved,
    microseconds,
    out,
    print_json,
    progress,
    run,
)
from harness import significant as rounded
from opweave import ir
from opweave.ir.testing import written_out
from opweave_engine.models.llama import LlamaConfig, LlamaForCausalLM

Row = dict[str, Any]
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
PASSES_ONLY = {"codegen": False}


def model(layers: int) -> nn.Module:
    """Return the model with random weights."""
    config = LlamaConfig.from_hf(
        {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, **SIZES}
    )
    torch.manual_seed(0)
    made = LlamaForCausalLM(config, dtype=torch.float32)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.02)
    return made.eval()


def inputs(tokens: int) -> tuple[Tensor, Tensor]:
    """Return token ids and positions whose number may vary, as a server marks them.

    (``dynamic=True`` would turn numbers that modules hold into inputs, too.)
    """
    given = torch.randint(SIZES["vocab_size"], (tokens,)), torch.arange(tokens)
    for tensor in given if tokens > 1 else ():
        torch._dynamo.mark_dynamic(tensor, 0)
    return given


def all_native() -> dict[str, str]:
    return dict.fromkeys(ir.current_registry().ops, "native")


def compile_plain(module: nn.Module, given: Sequence[Tensor]) -> Callable[..., Any]:
    with written_out():
        compiled = torch.compile(module)
        compiled(*given)
    return compiled


def compile_native(module: nn.Module, given: Sequence[Tensor]) -> Callable[..., Any]:
    compiled = torch.compile(module, backend=opweave.compile.backend)
    with ir.priority(all_native()):
        compiled(*given)
    return compiled


def compile_ours(module: nn.Module, given: Sequence[Tensor]) -> Callable[..., Any]:
    compiled = torch.compile(module, backend=opweave.compile.backend)
    compiled(*given)
    return compiled


def seconds(compile_: Callable[..., Any], module: nn.Module, given: Sequence[Tensor]) -> float:
    torch.compiler.reset()
    start = time.perf_counter()
    compile_(module, given)
    return time.perf_counter() - start


def compile_rows(layers: int, rounds: int, *, quiet: bool) -> list[Row]:
    """Measure compiling a model of so many layers."""
    module, given = model(layers), inputs(16)
    case, passes = f"llama, {layers} layers, all native", []

    def ours() -> float:
        took = seconds(compile_native, module, given)
        passes.append(opweave.compile.report().seconds * 1e3)
        return took

    with progress(quiet=quiet) as bar:
        times = interleaved(
            {"ours": ours, "plain": lambda: seconds(compile_plain, module, given)},
            bar.track(range(rounds), description=f"compiling {layers} layers"),
        )
    report = opweave.compile.report()
    mine, plain = (statistics.median(times[name]) for name in ("ours", "plain"))
    return [
        {
            "name": "compile.time",
            "case": case,
            "value": rounded(mine),
            "unit": "s",
            "baseline": rounded(plain),
            "ratio": rounded(plain / mine),
        },
        {
            "name": "compile.passes",
            "case": case,
            "value": rounded(statistics.median(passes)),
            "unit": "ms",
        },
        {"name": "compile.traces", "case": case, "value": report.traces, "unit": "traces"},
    ]


class OneInput(nn.Module):
    """A model of token ids and positions, given as the rows of one tensor.

    As two inputs, each has a size of its own until something adds them. Dynamo passes the size of
    the positions on where it meets it first in a native function; inside an op it does not.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, both: Tensor) -> Tensor:
        hidden: Tensor = self.model(both[0], both[1])
        return hidden


def identity_row(layers: int) -> Row:
    """Count the lines of generated code that differ from plain's, for graphs of the same inputs."""
    module, given = OneInput(model(layers)), (torch.stack(inputs(16)),)
    torch._dynamo.mark_dynamic(given[0], 1)
    code = []
    for compile_ in (compile_plain, compile_native):
        torch.compiler.reset()
        _, texts = run_and_get_code(compile_, module, given)
        lines = (line.rstrip() for text in texts for line in text.splitlines())
        code.append([line for line in lines if line and not line.lstrip().startswith("#")])
    difference = difflib.unified_diff(*code, lineterm="", n=0)
    differing = [line for line in difference if line[:3] not in ("---", "+++", "@@ ")]
    return {
        "name": "compile.differing_lines",
        "case": f"llama, {layers} layers, all native",
        "value": len(differing),
        "unit": f"lines of {len(code[0])}",
    }


def patterns_row() -> Row:
    table = opweave.compile.fusion_table()
    return {
        "name": "compile.patterns",
        "case": f"{len({row.composite for row in table})} composites",
        "value": len(table),
        "unit": "patterns",
    }


def allocated_rows(layers: int, tokens: int) -> list[Row]:
    """Measure how many bytes a call allocates where in-place kernels may reuse memory or not."""
    module, given = model(layers), inputs(tokens)
    found: dict[bool, Memory] = {}
    for inplace in (True, False):
        torch.compiler.reset()
        options = {**PASSES_ONLY, "inplace": inplace}
        compiled = torch.compile(module, backend=opweave.compile.backend, options=options)
        compiled(*given)
        found[inplace] = memory_of(compiled, given)
    case = f"llama, {layers} layers, {tokens} tokens, run op by op"
    return [
        {
            "name": f"compile.{what}",
            "case": f"{case}, {'donating' if inplace else 'copying'}",
            "value": getattr(found[inplace], what),
            "unit": "bytes",
            "baseline": getattr(found[False], what),
            "ratio": rounded(getattr(found[False], what) / getattr(found[inplace], what)),
        }
        for what in Memory._fields
        for inplace in (True, False)
    ]


class Memory(NamedTuple):
    """Bytes that a call allocates, freed or not, and how many it holds at once at the most."""

    allocated: int
    peak: int


def memory_of(function: Callable[..., Any], given: Sequence[Tensor]) -> Memory:
    """Return what a call takes from the allocator."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function(*given)
    events = profile.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())]
    return Memory(sum(size for size in sizes if size > 0), max(itertools.accumulate(sizes)))


def latency_rows(layers: int, tokens: int, rounds: int, *, quiet: bool) -> list[Row]:
    """Measure a call of the compiled model."""
    module, given = model(layers), inputs(tokens)
    torch.compiler.reset()
    contenders: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "ours": (compile_ours(module, given), given),
        "plain": (compile_plain(model(layers), given), given),
        "eager": (module, given),
        "transformers": (
            torch.compile(transformers_model(layers), dynamic=True),
            (given[0][None],),
        ),
    }
    for function, arguments in contenders.values():
        for _ in range(3):
            function(*arguments)
    calls = max(1, 64 // tokens)
    with progress(quiet=quiet) as bar:
        times = interleaved(
            {
                name: (lambda f=function, a=arguments: microseconds(f, [a] * calls))
                for name, (function, arguments) in contenders.items()
            },
            bar.track(range(rounds), description=f"calling with {tokens} tokens"),
        )
    ours = statistics.median(times["ours"])
    return [
        {
            "name": "compile.latency",
            "case": f"llama, {layers} layers, {tokens} tokens, against {name}",
            "value": rounded(ours),
            "unit": "us",
            "baseline": rounded(statistics.median(times[name])),
            "ratio": rounded(
                statistics.median(b / a for a, b in zip(times["ours"], times[name], strict=True))
            ),
        }
        for name in ("plain", "eager", "transformers")
    ]


def transformers_model(layers: int) -> nn.Module:
    from transformers import LlamaConfig as HfConfig
    from transformers import LlamaModel as HfLlama  # to the last hidden state, as ours

    config = HfConfig(num_hidden_layers=layers, use_cache=False, **SIZES)
    made: nn.Module = HfLlama(config).eval()
    return made


def measure(layers: list[int], rounds: int, *, quiet: bool) -> list[Row]:
    ir.current_registry().ensure_ready()
    found = [identity_row(min(layers)), patterns_row()]
    for count in layers:
        found += compile_rows(count, rounds, quiet=quiet)
    found += allocated_rows(min(layers), 256)
    for tokens in (1, 16, 256):
        found += latency_rows(min(layers), tokens, 25, quiet=quiet)
    return found


def main() -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8], help="of the models")
    parser.add_argument("--rounds", type=int, default=3, help="compilations of each kind")
    options = parser.parse_args()
    if options.rounds < 1 or min(options.layers) < 1:
        parser.error("--rounds and --layers must be at least 1")
    torch.set_num_threads(1)
    torch._inductor.config.force_disable_caches = True
    with torch.inference_mode():
        found = measure(options.layers, options.rounds, quiet=options.json)
    if options.json:
        print_json(describe_machine(), found)
        return 0
    table = Table("name", "case", "value", "unit", "baseline", "ratio")
    for row in found:
        fields = ("name", "case", "value", "unit", "baseline", "ratio")
        table.add_row(*(str(row.get(field, "")) for field in fields))
    out.print(table)
    return 0


if __name__ == "__main__":
    run(main)
