"""Reports of compilations as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.markup import escape

from opweave.cli.output import out
from opweave.cli.tables import PlainTable
from opweave.compile import Report
from opweave.compile.report import NodeReport


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
    _print_recognitions(report)
    _print_fusions(report)
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
        lines.append(
            f"{reuse.verb} {reuse.activation}" + (f": {reuse.reason}" if reuse.reason else "")
        )
    if node.stage.startswith("kept"):
        lines.append(node.stage)
    return lines


def _print_recognitions(report: Report) -> None:
    if not report.recognitions:
        return
    table = PlainTable("op", "recognition", "times", "why", "for example")
    groups: dict[tuple[str, bool, str], list[str]] = {}
    for each in report.recognitions:
        is_found = each.outcome == "recognized"
        key = each.op, is_found, "" if is_found else each.reason
        groups.setdefault(key, []).append(each.source)
    for (op, is_found, reason), sources in groups.items():
        outcome = "[green]recognized[/]" if is_found else "[red]near miss[/]"
        table.add_row(op, outcome, str(len(sources)), escape(reason or "-"), escape(sources[0]))
    out.print(table, "")


def _print_fusions(report: Report) -> None:
    if not report.fusions:
        return
    table = PlainTable("composite", "fusion", "times", "why")
    fused = Counter(fusion.composite for fusion in report.fused)
    missed = Counter((fusion.composite, fusion.reason) for fusion in report.near_misses)
    for composite, times in fused.items():
        first = next(f for f in report.fused if f.composite == composite)
        table.add_row(composite, "[green]formed[/]", str(times), escape(f"from {first.reason}"))
    for (composite, reason), times in missed.items():
        table.add_row(composite, "[red]near miss[/]", str(times), escape(reason))
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
