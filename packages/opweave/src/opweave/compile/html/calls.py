"""The table of every call of an op, and its filters."""

from __future__ import annotations

from collections.abc import Iterable

from opweave.compile.html.elements import Html, breakable, element, join
from opweave.compile.html.sections import (
    code,
    common_folder,
    count,
    items,
    provider,
    row,
    size,
    small,
    split_source,
    table,
)  # fmt: skip
from opweave.compile.html.summary import how_lowered, passed_over, what_became
from opweave.compile.report import NodeReport, Report


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
