"""The HTML page: facts, contents, and the sections of every graph."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from opweave.compile.html.calls import calls
from opweave.compile.html.changes import changes
from opweave.compile.html.elements import Html, breakable, element, join
from opweave.compile.html.sections import Place, count
from opweave.compile.html.summary import decisions, fusions, memory, pipeline, summary
from opweave.compile.report import Report

_HERE = Path(__file__).parent


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
    return (_HERE / name).read_text(encoding="utf-8")
