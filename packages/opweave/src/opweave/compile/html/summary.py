"""The overview sections: figures, pipeline, decisions, fusions, memory."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from opweave.compile.html.elements import Html, breakable, element, join
from opweave.compile.html.sections import (
    Place,
    code,
    count,
    items,
    provider,
    row,
    seconds,
    small,
    split_source,
    swatch,
    table,
)  # fmt: skip
from opweave.compile.report import FusionReport, NodeReport, PassReport, Refusal, Report

_STAGES = {
    "dynamo": "the graph from Dynamo, before AOTAutograd",
    "joint": "after AOTAutograd, before Inductor’s passes",
    "post grad": "after Inductor’s passes, before it generates code",
}
_LOWERED = {
    "lower functional": "inlined before Inductor’s passes",
    "lower in place": "inlined after Inductor’s passes; may reuse memory",
}
_VERBS = {"reuses": "good", "copies": "bad", "leaves": None}  # CSS classes


def summary(report: Report) -> Html:
    """Show the key figures."""
    if not report.complete:
        return element(
            "p",
            "The compiled code came from Inductor’s cache, but the report of its first compilation "
            "is missing. To see the decisions, compile again: clear the cache, or set ",
            code("TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"),
            ".",
            class_="warning",
        )
    if not report.nodes:
        return element("p", "This graph does not call any opweave op.")
    ops = {node.op for node in report.nodes}
    reused = sum(reuse.reused for reuse in report.reuses)
    missed = len(report.near_misses)
    figures = [
        ("Calls of ops", len(report.nodes), f"of {count(len(ops), 'op')}"),
        ("Fusions", len(report.fused), count(missed, "near miss", "near misses")),
        ("Copies made", report.copies, f"{reused} avoided by reuse"),
        ("Traces", report.traces, "one for each implementation and signature"),
        ("Time in passes", seconds(report.seconds), _origin(report)),
    ]
    figures += [(f"{kind} calls", n, "collectives") for kind, n in report.collectives.items()]
    tiles = [_tile(*figure) for figure in figures]
    return join([_selected(report), element("dl", *tiles, class_="tiles")])


def _tile(title: str, value: object, note: str) -> Html:
    return element("div", element("dt", title), element("dd", value), element("dd", small(note)))


def _origin(report: Report) -> str:
    if report.from_cache:
        return "by the first compilation; this one came from the cache"
    return "compiled now, not from the cache"


def _selected(report: Report) -> Html:
    providers = report.providers
    total = sum(providers.values())
    bar = [
        element("span", swatch(chosen, list(providers)), style=f"flex-grow:{calls}")
        for chosen, calls in providers.items()
    ]
    legend = [
        element("li", provider(chosen, list(providers)), " ", _share(calls, total))
        for chosen, calls in providers.items()
    ]
    return element(
        "div",
        element("div", *bar, class_="bar", aria_hidden="true"),
        element("ul", *legend, class_="legend", aria_label="Calls by provider"),
        class_="selected",
    )


def _share(calls: int, total: int) -> Html:
    return join([count(calls, "call"), small(f" {calls / total:.0%}")])


def pipeline(place: Place, report: Report) -> Html | None:
    """Show the passes by stage, with their durations."""
    if not report.passes:
        return None
    longest = max(record.seconds for record in report.passes) or 1.0
    numbered = list(enumerate(report.passes))
    stages = [
        _stage(place, stage, list(records), longest)
        for stage, records in groupby(numbered, key=lambda item: item[1].stage)
    ]
    return element("ol", *stages, class_="stages")


def _stage(place: Place, title: str, records: list[tuple[int, PassReport]], longest: float) -> Html:
    total = sum(record.seconds for _, record in records)
    passes = [_pass(place, index, record, longest) for index, record in records]
    return element(
        "li",
        place.heading(3, title, small(" ", seconds(total))),
        element("p", _STAGES.get(title, ""), class_="small"),
        element("ol", *passes, class_="passes"),
    )


def _pass(place: Place, index: int, record: PassReport, longest: float) -> Html:
    link: object = record.title
    if record.changed:
        link = element("a", record.title, href=f"#{place.id(f'pass-{index}')}")
    share = f"width:{max(record.seconds / longest * 100, 0.5):.1f}%"
    return element(
        "li",
        element("span", link, None if record.changed else small(" no change"), class_="name"),
        element("span", seconds(record.seconds), class_="time"),
        element("span", element("span", style=share), class_="gauge", aria_hidden="true"),
    )


def decisions(report: Report) -> Html | None:
    """Show one row per distinct outcome."""
    if not report.nodes:
        return None
    colors = list(report.providers)
    rows = [
        row(
            breakable(node.op),
            provider(node.chosen, colors),
            calls,
            passed_over(node.rejected) or "–",
            what_became(node) or "–",
        )
        for node, calls in report.outcomes()
    ]
    columns = ("op", "runs", "calls", "passed over", "fused, memory")
    return table("Selected kernels, one row per outcome", columns, rows, "decisions")


def how_lowered(node: NodeReport) -> str:
    """Return how the call reaches Inductor."""
    if node.stage.startswith("kept"):
        return "called through torch.ops"
    return _LOWERED.get(node.stage, node.stage)


def passed_over(refusals: Iterable[Refusal]) -> Html | None:
    """List the rejected providers and the reasons."""
    return items(
        join([element("b", r.provider), " ", r.reason, small(f" {r.origin}")]) for r in refusals
    )


def what_became(node: NodeReport) -> Html | None:
    """List the nodes that the call was fused from, and the memory decisions."""
    found: list[object] = []
    if node.fused_from:
        found.append(join(["fused from ", join(map(code, node.fused_from), ", ")]))
    for reuse in node.reuse:
        reason = small(f" {reuse.reason}") if reuse.reason else None
        found.append(join([element("b", reuse.verb), " ", code(reuse.activation), reason]))
    if node.stage.startswith("kept"):
        found.append(node.stage)
    return items(found)


def fusions(place: Place, report: Report) -> Html | None:
    """Show the fusions and near misses."""
    if not report.fusions:
        return None
    sources = {node.node: node.source for node in report.nodes}
    groups: dict[tuple[str, str, str], list[FusionReport]] = {}
    for fusion in report.fusions:
        reason = "" if fusion.outcome == "fused" else fusion.reason
        groups.setdefault((fusion.outcome, fusion.composite, reason), []).append(fusion)
    rows = [_fusion(found, sources) for _, found in sorted(groups.items(), key=lambda g: g[0][0])]
    columns = ("composite", "outcome", "times", "why", "where")
    return table("Fusions formed and near misses", columns, rows, "fusions")


def _fusion(found: list[FusionReport], sources: dict[str, str]) -> Html:
    first = found[0]
    formed = first.outcome == "fused"
    where = [join([code(f.node), small(f" {_line(sources.get(f.node, ''))}")]) for f in found]
    return row(
        breakable(first.composite),
        element("b", "formed" if formed else "near miss", class_="good" if formed else "bad"),
        len(found),
        join(["from ", code(first.reason)]) if formed else first.reason,
        items(where),
    )


def _line(source: str) -> str:
    return split_source(source)[0].rpartition("/")[2]


def memory(report: Report) -> Html | None:
    """Show the memory decisions for the activations of in-place kernels."""
    groups: dict[tuple[str, str, str, str], int] = {}
    for node in report.nodes:
        for reuse in node.reuse:
            key = (reuse.verb, node.op, reuse.activation, reuse.reason)
            groups[key] = groups.get(key, 0) + 1
    if not groups:
        return None
    rows = [
        row(
            join([breakable(op), " ", code(activation)]),
            element("b", verb, class_=_VERBS[verb]),
            times,
            reason or "nothing reads it afterwards",
        )
        for (verb, op, activation, reason), times in sorted(groups.items())
    ]
    columns = ("activation", "the kernel", "times", "why")
    return table("Copies made and avoided", columns, rows, "memory")
