"""``opweave explain``: which kernels a model runs and why, op by op or compiled."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from cyclopts import Parameter
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from opweave import ir
from opweave.cli import output
from opweave.cli.companions import model_runner
from opweave.cli.options import Flag, ImportOption, RunOptions, check_utf8, import_modules
from opweave.cli.output import STDOUT, CliError, PlainTable, out
from opweave.ir import Selection
from opweave.ir.errors import OpweaveError
from opweave.ir.op import least_bytes
from opweave.ir.scope import Scope, current_scope, entered

if TYPE_CHECKING:
    from opweave.compile.report import MatchReport, NodeReport, Report


# Kernel selections of an eager run, as a table and as data.


def selections(record: ir.Record) -> list[dict[str, Any]]:
    """Return every distinct selection as plain data."""
    return [{**explanation.to_dict(), "calls": calls} for explanation, calls in record.outcomes()]


def selection_table(record: ir.Record) -> Table:
    """Return a table with a row per distinct selection."""
    table = PlainTable("op", "ran", "calls", "because of", "the others")
    for explanation, calls in record.outcomes():
        verdicts = explanation.verdicts
        chosen = next(v for v in verdicts if v.outcome == "chosen")
        others = [f"{v.provider}: {v.reason}" for v in verdicts if v.outcome != "chosen"]
        table.add_row(
            explanation.op,
            f"[green]{escape(chosen.provider)}[/]",
            str(calls),
            escape(chosen.origin),
            escape("\n".join(others) or "-"),
        )
    return table


# Reports of compilations as tables.


def print_reports(reports: Sequence[Report], seconds: float) -> None:
    """Print the report of each graph, and the total time."""
    for number, report in enumerate(reports, start=1):
        if len(reports) > 1:
            out.print(f"[bold]graph {number}[/]")
        print_report(report)
    graphs = f"{len(reports)} graph" + "s" * (len(reports) != 1)
    out.print(f"compiled {graphs} in {seconds:.1f} s", highlight=False)


def print_report(report: Report) -> None:
    """Print the calls by outcome, the fusions, the passes and a summary."""
    if not report.complete:
        out.print(
            "The code came from Inductor's cache, without a report. Recompile with "
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1."
        )
        return
    _print_calls(report)
    _print_matches("recognition", "recognized", report.recognitions)
    _print_matches("fusion", "formed", report.fusions)
    _print_passes(report)
    out.print(_summary(report), markup=False)
    for remark in report.remarks:
        out.print(f"[yellow]{escape(remark)}[/]")


def _print_calls(report: Report) -> None:
    table = PlainTable("op", "runs", "calls", "passed over", "fused, memory")
    for node, calls in report.outcomes():
        passed_over = [f"{r.provider}: {r.reason} [{r.origin}]" for r in node.rejected]
        table.add_row(
            node.op,
            f"[green]{escape(node.chosen)}[/]",
            str(calls),
            escape("\n".join(passed_over) or "-"),
            escape("\n".join(_what_became(node)) or "-"),
        )
    out.print(table, "")


def _what_became(node: NodeReport) -> list[str]:
    lines = [f"fused from {', '.join(node.fused_from)}"] if node.fused_from else []
    for reuse in node.reuse:
        reason = f": {reuse.reason}" if reuse.reason else ""
        lines.append(f"{reuse.verb} {reuse.activation}{reason}")
    return [*lines, node.stage] if node.stage.startswith("kept") else lines


def _print_matches(kind: str, formed: str, matches: Sequence[MatchReport]) -> None:
    """Print the ops that a pass *formed*, and the near misses, if there are any."""
    from opweave.compile.report import alike

    if not matches:
        return
    table = PlainTable("op", kind, "times", "why", "for example")
    for group in alike(matches):
        first, times = group[0], str(len(group))
        is_formed = first.outcome != "rejected"
        outcome = f"[green]{formed}[/]" if is_formed else "[red]near miss[/]"
        why = f"from {first.reason}" if is_formed else first.reason
        table.add_row(first.op, outcome, times, escape(why), escape(first.source))
    out.print(table, "")


def _print_passes(report: Report) -> None:
    table = PlainTable("pass", "stage", "ms", "graph")
    table.columns[2].justify = "right"
    for record in report.passes:
        changed = "changed" if record.changed else "-"
        table.add_row(record.title, record.stage, f"{record.seconds * 1e3:.1f}", changed)
    out.print(table, "")


def _summary(report: Report) -> str:
    providers = ", ".join(f"{name} {calls}" for name, calls in report.providers.items())
    reused = sum(reuse.reused for reuse in report.reuses)
    misses = len(report.near_misses)
    collectives = [f"{calls} {name}" for name, calls in report.collectives.items()]
    parts = [
        f"{len(report.nodes)} calls of ops: {providers}" if providers else "no calls of ops",
        f"{report.copies} copies made, {reused} avoided",
        f"{len(report.fused)} fusions, {misses} near {'miss' if misses == 1 else 'misses'}",
        *collectives,
        f"{report.traces} traces",
        f"{report.seconds * 1e3:.0f} ms in passes",
    ]
    if report.from_cache:
        parts.append("all by an earlier compilation: this one came from the cache")
    return "; ".join(parts)


# Times the kernels of a model on their actual arguments.


@dataclass
class Timing:
    """The time of one kernel for one signature.

    Attributes:
        op, provider, shapes: the call and the shapes of its tensor arguments.
        calls: number of calls by the model.
        microseconds: time per call, median of 5 rounds, repeated with the same arguments.
        bytes: size of arguments and results, or None if a table is read in part.
        gb_per_second: bytes over time.
        limit_share: this bandwidth over that of a large copy on the same machine; above 1 if the
        arguments fit into a cache.
    """

    op: str
    provider: str
    shapes: str
    calls: int
    microseconds: float
    bytes: int | None
    gb_per_second: float | None
    limit_share: float | None


@dataclass
class Profile:
    """Records the arguments of each distinct call, and times the calls afterwards."""

    _calls: dict[Any, tuple[Selection, tuple[Any, ...]]] = field(default_factory=dict)
    _counts: Counter[Any] = field(default_factory=Counter)

    def add(self, selection: Selection, values: tuple[Any, ...]) -> None:
        """Count a call; the first of its kind is copied, because kernels may write to arguments."""
        key = (selection.op.name, selection.provider, _shapes(values))
        self._counts[key] += 1
        if key not in self._calls:
            copies = (v.detach().clone() if isinstance(v, Tensor) else v for v in values)
            self._calls[key] = selection, tuple(copies)

    def timings(self, progress: Callable[[int, int], object]) -> Iterator[Timing]:
        """Time every distinct call; *progress* gets the number of finished and of all calls."""
        from opweave.tuning.timing import Effort, compare, copy_speed

        limit, effort = copy_speed(), Effort(rounds=5, seconds=0.02)
        for done, (key, (selection, values)) in enumerate(self._calls.items()):
            progress(done, len(self._calls))
            call = partial(selection.impl.impl_fn, *values)
            with torch.inference_mode():
                results = call()
            seconds = compare({"call": call}, effort)["call"].microseconds / 1e6
            moved = least_bytes(selection.op, values, [results])
            speed = moved / seconds if moved else None
            op, provider, shapes = key
            yield Timing(
                op,
                provider,
                shapes,
                calls=self._counts[key],
                microseconds=seconds * 1e6,
                bytes=moved,
                gb_per_second=speed / 1e9 if speed else None,
                limit_share=speed / limit if speed else None,
            )


def timing_table(timings: list[Timing]) -> Table:
    """Return a table, sorted by total time, slowest first."""
    table = PlainTable("op", "ran", "shapes", "calls", "µs", "total µs", "GB/s", "of limit")
    for column in table.columns[3:]:
        column.justify = "right"
    for t in sorted(timings, key=lambda t: -t.microseconds * t.calls):
        table.add_row(
            t.op,
            f"[green]{t.provider}[/]",
            t.shapes.replace("[", r"\["),
            str(t.calls),
            f"{t.microseconds:.1f}",
            f"{t.microseconds * t.calls:.0f}",
            "-" if t.gb_per_second is None else f"{t.gb_per_second:.1f}",
            "-" if t.limit_share is None else f"{t.limit_share:.0%}",
        )
    return table


def _shapes(values: tuple[Any, ...]) -> str:
    shown = [f"{list(v.shape)}".replace(" ", "") for v in values if isinstance(v, Tensor)]
    return " ".join(shown)


# The command.


_OPTIONS = RunOptions()
PROMPT = "The quick brown fox jumps over the lazy dog"


def explain(
    model: Path,
    /,
    *,
    compile: Flag = False,
    profile: Flag = False,
    html: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    json: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    prompt: str = PROMPT,
    dtype: str = "auto",
    options: RunOptions = _OPTIONS,
    import_: ImportOption = None,
) -> None:
    """Show which kernels a model runs, and why others were rejected.

    Parameters
    ----------
    model
        A checkpoint's directory, a GGUF file, or the id of a repository on the Hugging Face hub.
    compile
        Compile the model and show the decisions of every pass; otherwise run it op by op.
    profile
        Also time each kernel on its actual arguments: µs, GB/s, and the fraction of the bandwidth
        of a large copy.
    html
        Write the compilation report to this file as HTML; "-" is standard output.
    json
        Write the results to this file as JSON; "-" is standard output.
    prompt
        The text to run the model on.
    dtype
        auto (the checkpoint's), float32, bfloat16 or float16.
    """
    check_utf8(prompt)
    import_modules(import_)
    if profile and compile:
        raise CliError("--profile times kernels op by op. Leave out --compile.")
    if html is not None and not compile:
        raise CliError("--html needs --compile.")
    if html == json == STDOUT:
        raise CliError("--html and --json cannot both go to standard output.")
    output.check_writable("--html", html)
    output.check_writable("--json", json)
    options.apply()
    if compile:
        _compiled(model, prompt, dtype, json, html)
    else:
        _eager(model, prompt, dtype, json, profiles=profile)


def _eager(model: Path, prompt: str, dtype: str, json: str | None, *, profiles: bool) -> None:
    runner = model_runner("explain")
    with output.progress_bar("loading") as loading:
        generate = runner.generator(model, dtype=dtype, progress=loading)
    # The first token is computed from the whole prompt, the second from one more token.
    with ir.record() as record, output.progress_bar("running") as running:
        generate(prompt, 2, running)
    timings: list[Timing] = []
    if profiles:
        profile = Profile()
        recording = entered(Scope(current_scope(), recorder=profile.add))
        with recording, output.progress_bar("running") as running:
            generate(prompt, 2, running)
        with output.progress_bar("timing") as timing:
            timings = list(profile.timings(timing))
    if json != STDOUT:
        out.print(selection_table(record))
        if timings:
            out.print()
            out.print(timing_table(timings))
    if json is not None:
        data = {"model": str(model), "selections": selections(record)}
        if profiles:
            data["timings"] = [asdict(timing) for timing in timings]
        output.write_json("--json", json, data)


def _compiled(model: Path, prompt: str, dtype: str, json: str | None, html: str | None) -> None:
    from opweave.compile.html import render

    runner = model_runner("explain")
    with output.progress_bar("loading") as loading:
        loaded, tokens, weights = runner.module(model, prompt, dtype=dtype, progress=loading)
    start = time.perf_counter()
    with output.progress_bar("compiling", counts=False):
        reports, inside = _compile(loaded, tokens)
    seconds = time.perf_counter() - start
    if STDOUT not in (html, json):
        print_reports(reports, seconds)
        if inside.selected_impls:
            out.print("\n[bold]ops inside calls that are not compiled, such as attention[/]")
            out.print(selection_table(inside))
    if html is not None:
        title = f"{model.resolve().name}, {str(weights).removeprefix('torch.')}"
        output.write("--html", html, render(reports, title, output.facts()))
    if json is not None:
        data = {
            "model": str(model),
            "seconds": seconds,
            "reports": [report.to_dict() for report in reports],
            "inside_opaque_calls": selections(inside),
        }
        output.write_json("--json", json, data)


def _compile(model: torch.nn.Module, tokens: list[int]) -> tuple[list[Report], ir.Record]:
    """Compile the forward for a dynamic number of tokens, and run it.

    Return the report of each graph, and the record of ops inside opaque calls such as attention.
    """
    from opweave.compile import CompiledGraph, backend, report
    from opweave.compile.compat import BackendCompilerFailed
    from opweave.config import current_compilation_config
    from opweave.torch_compat import maybe_mark_dynamic

    reports: list[Report] = []
    options = current_compilation_config().backend_options

    def collecting(*arguments: Any) -> Any:
        compiled = backend(*arguments, options=options)
        if isinstance(compiled, CompiledGraph):
            reports.append(report())
        return compiled

    if len(tokens) == 1:
        tokens = tokens * 2  # torch specializes on a size of 1
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    for tensor in (ids, positions):
        maybe_mark_dynamic(tensor, 0)  # a kernel may want one size
    try:
        with torch.inference_mode(), ir.record() as inside:
            torch.compile(model, backend=collecting)(ids, positions)
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, OpweaveError):  # about the user's input
            raise error.inner_exception from error
        raise
    return reports, inside
