"""Overhead of an op call over a direct call of its kernel.

    python benchmarks/dispatch.py            a table
    python benchmarks/dispatch.py --json     one object, see below

Every case calls the same kernel, ``torch.empty_like`` behind a function of three arguments, on a
float32 tensor of shape (1, 8), without gradients, on one thread. Cases are interleaved: each round
measures all of them in a new order, and a figure is the median over rounds of (case - direct call
in that round). The figures are microseconds. `ratio` is the cost of the torch op (Library.define +
impl) over ours, in the same round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

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
from opweave import ir
from opweave.ir import rules
from opweave.ir.priority import PriorityEntry, SizeRange

Call = Callable[..., Any]
CALLS_PER_ROUND = 2000
LIMITS = {"dispatch.one_predicate": 0.25, "dispatch.two_rejections": 0.45}


def kernel(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return torch.empty_like(x)


def inplace_kernel(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return torch.empty_like(x)


def declare_op(providers: list[tuple[str, ir.rules.Rule | None]], name: str) -> ir.IrOp:
    @ir.register_op(name=name, allow_inplace=True)
    def native(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        return torch.empty_like(x)

    for provider, rule in providers:
        native.register_impl(provider, supports_args=rule)(kernel)
    native.set_default([provider for provider, _ in providers])
    return native


def custom_op() -> Call:
    @torch.library.custom_op("opweave_bench::custom", mutates_args=())
    def custom(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        return torch.empty_like(x)

    return custom


def define_and_impl() -> Call:
    library = torch.library.Library("opweave_bench", "FRAGMENT")
    library.define("plain(Tensor x, Tensor? weight, float epsilon) -> Tensor")
    library.impl("plain", kernel, "CompositeExplicitAutograd")
    LIBRARIES.append(library)
    return torch.ops.opweave_bench.plain.default


LIBRARIES: list[torch.library.Library] = []


class Module(nn.Module):
    def forward(self, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        return torch.empty_like(x)


def cases() -> dict[str, tuple[Call, Callable[[], Any]]]:
    """Return each case: what to call, and the context to call it in."""
    f32, bf16 = rules.dtype("x", torch.float32), rules.dtype("x", torch.bfloat16)
    f16 = rules.dtype("x", torch.float16)
    plain = declare_op([("only", None)], "bench_plain")
    one = declare_op([("a", f32)], "bench_one")
    two = declare_op([("b", bf16), ("c", f16), ("a", f32)], "bench_two")
    function = declare_op([], "bench_function")
    function.register_impl("a", supports_args=lambda x, weight, epsilon: x.dtype is torch.float32)(
        kernel
    )
    function.set_default(["a"])

    tuned = declare_op([], "bench_tuned")
    tuned.register_impl("a", supports_args=f32)(kernel)
    entries = (PriorityEntry("a", False, "tuned"),)
    ranges = [SizeRange(0, ()), SizeRange(1, entries), SizeRange(None, ())]  # two comparisons
    tuned.registry.settings.set_tuned({"bench_tuned": ranges})

    def scope() -> Any:
        return ir.priority({"bench_one": ["a"]})

    return {
        "direct": (kernel, nullcontext),
        "dispatch.one_implementation": (plain, nullcontext),
        "dispatch.one_predicate": (one, nullcontext),
        "dispatch.one_function_predicate": (function, nullcontext),
        "dispatch.one_predicate_tuned": (tuned, nullcontext),
        "dispatch.two_rejections": (two, nullcontext),
        "dispatch.scope": (one, scope),
        "dispatch.using": (one.using("a"), nullcontext),
        "dispatch.maybe_inplace": (one.maybe_inplace, nullcontext),
        "dispatch.our_torch_op": (one.torch_op, nullcontext),
        "compare.torch_define_impl": (define_and_impl(), nullcontext),
        "compare.torch_custom_op": (custom_op(), nullcontext),
        "compare.nn_module": (Module(), nullcontext),
    }


def time_calls(call: Call, context: Callable[[], Any], batch: list[tuple[Any, ...]]) -> float:
    with context():
        return microseconds(call, batch)


def measure(rounds: int, *, quiet: bool) -> dict[str, list[float]]:
    """Return, for each case, the time over the direct call in each round."""
    batch = [(torch.randn(1, 8), torch.randn(8), 1e-6)] * CALLS_PER_ROUND
    ir.current_registry().ensure_ready()
    with ir.isolated_registry(), torch.inference_mode(), progress(quiet=quiet) as bar:
        measures = {
            name: partial(time_calls, call, context, batch)
            for name, (call, context) in cases().items()
        }
        for warm_up in measures.values():
            warm_up()
        times = interleaved(measures, bar.track(range(rounds), description="measuring"))
    direct = times["direct"]
    return {
        name: values if name == "direct" else [t - d for t, d in zip(values, direct, strict=True)]
        for name, values in times.items()
    }


def rows(over: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the rows of the result."""
    torch_op = over["compare.torch_define_impl"]
    result = []
    for name, values in over.items():
        row: dict[str, Any] = {
            "name": name,
            "case": "float32[1, 8], 3 arguments",
            "value": round(statistics.median(values), 4),
            "unit": "us" if name == "direct" else "us over the direct call",
            "lower_quartile": round(statistics.quantiles(values, n=4)[0], 4),
        }
        if name.startswith("dispatch."):
            row["baseline"] = "torch.library define + impl"
            ratios = [theirs / ours for theirs, ours in zip(torch_op, values, strict=True)]
            row["ratio"] = round(statistics.median(ratios), 2)
        if name in LIMITS:
            row["budget"] = LIMITS[name]
        result.append(row)
    return result


def main() -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=101)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    torch.set_num_threads(1)
    result = rows(measure(options.rounds, quiet=options.json))
    if options.json:
        print_json(describe_machine(), result)
        return 0
    table = Table("case", "us over the direct call", "lower quartile", "budget", "vs torch op")
    for row in sorted(result, key=lambda r: r["value"]):
        budget = row.get("budget", "")
        table.add_row(row["name"], f"{row['value']:.3f}", f"{row['lower_quartile']:.3f}",
                      str(budget), f"{row['ratio']:.1f} x" if "ratio" in row else "")  # fmt: skip
    out.print(table)
    return 0


if __name__ == "__main__":
    run(main)
