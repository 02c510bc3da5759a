"""The section with the graphs before and after each pass that changed them."""

from __future__ import annotations

from opweave.compile.html.diff import diff
from opweave.compile.html.elements import Html, breakable, element
from opweave.compile.html.sections import Place, items, seconds, small
from opweave.compile.report import PassReport, Report

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
