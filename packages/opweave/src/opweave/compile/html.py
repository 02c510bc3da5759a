"""Render reports as one self-contained HTML page, with light and dark themes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from opweave.compile.html_elements import (
    Html,
    Place,
    breakable,
    code,
    common_folder,
    count,
    diff,
    element,
    items,
    join,
    provider,
    row,
    seconds,
    size,
    small,
    split_source,
    swatch,
    table,
)  # fmt: skip  # fmt: skip
from opweave.compile.report import FusionReport, NodeReport, PassReport, Refusal, Report

# The overview sections: figures, pipeline, decisions, fusions, memory.


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


# The table of every call of an op, and its filters.


def calls(report: Report) -> Html | None:
    """Show every call: the selected provider, the rejected ones, and the line of source code."""
    if not report.nodes:
        return None
    folder = common_folder(node.source for node in report.nodes)
    colors = list(report.providers)
    rows = [_calls(group, folder, colors) for group in report.layer_groups()]
    columns = ("op, module", "runs", "bytes", "source", "passed over", "fused, memory")
    root = element("p", "Files are in ", code(folder), ".", class_="small") if folder else None
    found = table("Every call of an op", columns, rows, "calls")
    return element("div", _filters(report), root, found, class_="filtered")


def _filters(report: Report) -> Html:
    """Return the filters, which are hidden until the script runs."""
    ops = sorted({node.op for node in report.nodes})
    return element(
        "form",
        _select("op", ops),
        _select("provider", report.providers),
        element("label", "Text ", element("input", type="search", name="text", autocomplete="off")),
        element("output", class_="small", aria_live="polite"),
        class_="filters",
        hidden=True,
    )


def _select(title: str, values: Iterable[str]) -> Html:
    options = [element("option", "all", value="")]
    options += [element("option", value, value=value) for value in values]
    return element("label", f"{title.capitalize()} ", element("select", *options, name=title))


def _calls(nodes: list[NodeReport], folder: str, colors: list[str]) -> Html:
    """Return one row for calls that differ only in the layer index."""
    first = nodes[0]
    several = len(nodes) > 1
    title = element(
        "summary", f"{count(len(nodes), 'call')}, arguments" if several else "arguments"
    )
    names = [join([code(n.node), small(f" {n.module}" if several else "")]) for n in nodes]
    return row(
        join(
            [
                breakable(first.op),
                element(
                    "span",
                    breakable(first.module_pattern if several else first.module),
                    class_="node",
                ),
                element("details", title, code(first.call), items(names)),
            ]
        ),
        join([provider(first.chosen, colors), small(how_lowered(first))]),
        size(first.bytes) if first.bytes else "–",
        _source(first.source, folder),
        passed_over(first.rejected) or "–",
        what_became(first) or "–",
        data_op=first.op,
        data_provider=first.chosen,
        data_calls=str(len(nodes)),
    )


def _source(source: str, folder: str) -> Html:
    place, line = split_source(source)
    shown = place.removeprefix(folder).removeprefix("/") if folder else place
    return join([element("span", shown, class_="place"), code(line) if line else None])


# The section with the graphs before and after each pass that changed them.


_SHOWN = 120  # passes with more changed lines are collapsed


def changes(place: Place, report: Report) -> Html | None:
    """Show a side-by-side diff for every pass that changed the graph."""
    found = [
        _change(place, index, record)
        for index, record in enumerate(report.passes)
        if record.changed
    ]
    if not found:
        return None
    about = (
        "The Python code of the graph before and after each pass, without the statements that free "
        "values, such as “; x = None”."
    )
    return element("div", element("p", about, class_="small"), *found)


def _change(place: Place, index: int, record: PassReport) -> Html:
    changed = diff(record.before, record.after)
    figures = element(
        "span",
        element("span", f"−{changed.removed}", class_="bad"),
        " ",
        element("span", f"+{changed.added}", class_="good"),
        " lines",
        class_="figures",
    )
    summary = element(
        "summary",
        place.heading(3, record.title),
        small(f"{record.stage}, {seconds(record.seconds)}"),
        figures,
    )
    titles = element("div", element("span", "before"), element("span", "after"), class_="titles")
    return element(
        "details",
        summary,
        _notes(record),
        titles,
        changed.table,
        class_="pass",
        id=place.id(f"pass-{index}"),
        open=changed.removed + changed.added <= _SHOWN,
    )


def _notes(record: PassReport) -> Html | None:
    notes = items(map(breakable, record.notes))
    if notes is None:
        return None
    title = element("summary", f"{len(record.notes)} notes" if len(record.notes) > 1 else "1 note")
    return element("details", title, notes, class_="notes", open=len(record.notes) <= 6)


# The HTML page: facts, contents, and the sections of every graph.


_TEMPLATES = Path(__file__).parent / "templates"


def render(reports: Sequence[Report], title: str, facts: Mapping[str, str] | None = None) -> str:
    """Return an HTML page that shows *reports*.

    The page loads no other files, and its content security policy admits only its own script.

    Args:
        reports: one per graph, in order of compilation.
        title: the title of the page.
        facts: names and values to show below the title: versions, the device, the command.
    """
    style, script = (_read(name) for name in ("style.css", "filter.js"))
    several = len(reports) > 1
    lead = f"opweave · {count(len(reports), 'graph')}" if reports else "Nothing was compiled."
    numbers = range(1, len(reports) + 1)
    graphs = [_graph(Place(i, several), report) for i, report in zip(numbers, reports, strict=True)]
    contents = _links("Graphs", [(f"graph-{i}-top", f"Graph {i}") for i in numbers])
    body = element(
        "body",
        element(
            "header",
            element("h1", title),
            element("p", lead, class_="lead"),
            _facts(facts),
            contents,
        ),
        element("main", *graphs),
        element("script", Html(script)),
    )
    return f"<!doctype html>\n{element('html', _head(title, style, script), body, lang='en')}\n"


def _facts(facts: Mapping[str, str] | None) -> Html | None:
    pairs = [
        element("div", element("dt", name), element("dd", breakable(value)))
        for name, value in (facts or {}).items()
    ]
    return element("dl", *pairs, class_="facts") if pairs else None


def _head(title: str, style: str, script: str) -> Html:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("style", Html(style)),
    )


def _graph(place: Place, report: Report) -> Html:
    parts = [
        ("summary", "Summary", summary(report)),
        ("pipeline", "Pipeline", pipeline(place, report)),
        ("decisions", "Selected kernels", decisions(report)),
        ("fusions", "Fusions", fusions(place, report)),
        ("memory", "Memory", memory(report)),
        ("calls", "Every call", calls(report)),
        ("changes", "Graphs", changes(place, report)),
    ]
    shown = [(name, heading, content) for name, heading, content in parts if content]
    label = f"Graph {place.number}" if place.several else "On this page"
    return element(
        "article",
        element("h2", f"Graph {place.number}", id=place.id("top")) if place.several else None,
        _links(label, [(place.id(name), heading) for name, heading, _ in shown]),
        join(place.section(name, heading, content) for name, heading, content in shown),
    )


def _links(label: str, targets: Sequence[tuple[str, str]]) -> Html | None:
    """Return a navigation bar, or None for fewer than two targets."""
    if len(targets) < 2:
        return None
    links = [element("li", element("a", shown, href=f"#{id_}")) for id_, shown in targets]
    return element("nav", element("ul", *links), aria_label=label)


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
