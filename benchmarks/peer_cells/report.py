"""The results as a line, as Markdown, and as a picture with a chart for each kind of load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from peer_cells.contenders import OPWEAVE

Row = dict[str, Any]
_INTRODUCTION = """\
# opweave and other engines

`{command}` on {processor} with {cores} cores, torch {torch}.
Tokens per second, medians of rounds in which the engines take turns; a ratio is the median of the
rounds' ratios, and above 1 opweave is faster. "Equal" is the share of the generated tokens before
the first difference of an answer: engines round differently, most of all in bfloat16. For scaling,
each engine is compared with itself on fewer threads.

| load | weights | threads | opweave | against | tokens/s | ratio | equal |
|---|---|---|---|---|---|---|---|
"""


def line(row: Row) -> str:
    """Return a row as text."""
    start = f"{row['case']}, {row['weights']}, {row['threads']} thread(s)"
    if "not_measured" in row:
        return f"{start}: {row['engine']} not measured: {row['not_measured']}"
    own = row["engine"] if row["name"] == "peers.scaling" else OPWEAVE
    equal = f", {row['equal_tokens']:.0%} of the tokens equal" if "equal_tokens" in row else ""
    return (
        f"{start}: {own} {row['value']:g}, {row['against']} {row['baseline']:g} tokens/s, "
        f"ratio {row['ratio']:g}{equal}"
    )


def markdown(rows: Sequence[Row], machine: dict[str, Any], command: str) -> str:
    """Return the page of results."""
    return _INTRODUCTION.format(command=command, **machine) + "".join(
        f"| {' | '.join(_cells(row))} |\n" for row in rows
    )


def _cells(row: Row) -> list[str]:
    start = [row["case"], row["weights"], str(row["threads"])]
    if "not_measured" in row:
        why = row["not_measured"].replace("|", "\\|")
        return [
            *start,
            f"{row.get('value', '')}",
            f"{row['engine']} not measured: {why}",
            "",
            "",
            "",
        ]
    equal = f"{row['equal_tokens']:.0%}" if "equal_tokens" in row else ""
    figures = (f"{row['baseline']:g}", f"{row['ratio']:g}")
    if row["name"] == "peers.scaling":
        start[0] = f"scaling: {row['case']}"
        own = f"{row['value']:g}" if row["engine"] == OPWEAVE else f"({row['value']:g})"
        return [*start, own, row["against"], *figures, equal]
    return [*start, f"{row['value']:g}", row["against"], *figures, equal]


# The picture


class Bar(NamedTuple):
    """The speed of an engine, in tokens/s; None if it was not measured."""

    engine: str
    speed: float | None


class Cluster(NamedTuple):
    """The bars of one case."""

    title: str
    bars: list[Bar]


_CHARTS = {"Decode, one request": "peers.decode", "32 requests at once": "peers.requests"}
_COLORS = {
    OPWEAVE: "#2171b5",
    "vLLM": "#fd8d3c",
    "OpenVINO": "#74c476",
    "transformers": "#9e9ac8",
    "llama.cpp": "#969696",
}
_COLUMN, _LEFT, _WIDTH, _BAR, _GAP, _TOP = 500, 104, 190, 20, 34, 66  # pixels
_FONT = 'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12"'


def clusters(rows: Sequence[Row], name: str) -> list[Cluster]:
    """Return the cases of the rows that have a *name*."""
    found: dict[str, Cluster] = {}
    for row in rows:
        if row["name"] != name:
            continue
        threads = "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"
        model = row["case"].partition(",")[0]
        title = f"{model[0].upper()}{model[1:]}, {row['weights']}, {threads}"
        own = Bar(OPWEAVE, row["value"])
        cluster = found.setdefault(title, Cluster(title, [own]))
        cluster.bars.append(Bar(row["engine"], row.get("baseline")))
    return list(found.values())


def draw(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """Return the picture as SVG: a column per chart, tokens/s, each cluster on its own scale."""
    parts: list[str] = []
    height = 0
    charts = {title: clusters(rows, name) for title, name in _CHARTS.items()}
    charts = {title: cases for title, cases in charts.items() if cases}
    for column, (title, cases) in enumerate(charts.items()):
        x, y = column * _COLUMN, _TOP
        parts.append(f'<text x="{x + 14}" y="{y}" font-size="14" font-weight="bold">{title}</text>')
        y += 12
        for cluster in cases:
            parts += _cluster(cluster, x, y)
            y += _GAP + _BAR * len(cluster.bars)
        height = max(height, y)
    size = f'width="{_COLUMN * max(len(charts), 1)}" height="{height}"'
    caption = f"{machine['processor']}, torch {machine['torch']}"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {_FONT}>',
        f'<rect {size} fill="white"/>',
        '<text x="14" y="24" font-size="17" font-weight="bold">Tokens per second on a CPU</text>',
        f'<text x="14" y="42" fill="#555">{escape(caption)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def _cluster(cluster: Cluster, left: int, top: int) -> Iterator[str]:
    yield f'<text x="{left + 14}" y="{top + 14}" fill="#555">{escape(cluster.title)}</text>'
    own = cluster.bars[0].speed or 0.0
    most = max(bar.speed or 0.0 for bar in cluster.bars)
    start = left + _LEFT
    for index, bar in enumerate(cluster.bars):
        y = top + 20 + index * _BAR
        label = "not measured"
        width = 0.0
        if bar.speed is not None:
            width = _WIDTH * bar.speed / most
            relative = "" if index == 0 else f"  (opweave {own / bar.speed:.2f}x)"
            label = f"{bar.speed:{'.0f' if bar.speed > 100 else '.3g'}} tokens/s{relative}"
        yield f'<text x="{start - 8}" y="{y + 13}" text-anchor="end">{escape(bar.engine)}</text>'
        yield (
            f'<rect x="{start}" y="{y + 2}" width="{width:.1f}" height="{_BAR - 5}" '
            f'fill="{_COLORS[bar.engine]}"/>'
        )
        yield f'<text x="{start + width + 6:.1f}" y="{y + 13}">{label}</text>'
