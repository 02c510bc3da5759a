"""The table of every call of an op, and its filters."""

from __future__ import annotations

from collections.abc import Iterable

from opweave.compile.html.elements import Html, breakable, element, join
from opweave.compile.html.sections import (
    code,
    common_folder,
    provider,
    row,
    small,
    split_source,
    table,
)  # fmt: skip
from opweave.compile.html.summary import passed_over, what_became
from opweave.compile.report import NodeReport, Report


def calls(report: Report) -> Html | None:
    """Show every call: who runs it, who does not and why, where it is in the source."""
    if not report.nodes:
        return None
    folder = common_folder(node.source for node in report.nodes)
    colours = list(report.providers)
    rows = [_call(node, folder, colours) for node in report.nodes]
    columns = ("op, node", "runs", "source", "passed over", "fused, memory")
    below = element("p", "Files are below ", code(folder), ".", class_="small") if folder else None
    found = table("Every call of an op", columns, rows, "calls")
    return element("div", _filters(report), below, found, class_="filtered")


def _filters(report: Report) -> Html:
    """Return the filters; the script shows them, since without it they would do nothing."""
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


def _call(node: NodeReport, folder: str, colours: list[str]) -> Html:
    details = element("details", element("summary", "arguments"), code(node.call))
    return row(
        join([breakable(node.op), element("span", code(node.node), class_="node"), details]),
        join([provider(node.chosen, colours), small(_stage(node))]),
        _source(node.source, folder),
        passed_over(node.rejected) or "–",
        what_became(node) or "–",
        data_op=node.op,
        data_provider=node.chosen,
    )


def _stage(node: NodeReport) -> str:
    return "kept as a call" if node.stage.startswith("kept") else node.stage


def _source(source: str, folder: str) -> Html:
    place, line = split_source(source)
    shown = place.removeprefix(folder).removeprefix("/") if folder else place
    return join([element("span", shown, class_="place"), code(line) if line else None])
