"""Draws what was found: a row for each kernel, a dot for each cell, as SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from kernel_cells.summary import Cell

_ROW, _TOP, _LEFT, _WIDTH, _GAP = 22, 96, 356, 250, 34
_COLOURS = ("#9ecae1", "#4292c6", "#08519c", "#041f3f")
_BAD = "#d62728"
_FONT = 'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One scale: what of a cell is drawn on it, and where the bar is."""

    title: str
    value: Callable[[Cell], float | None]
    ticks: Sequence[float]
    bar: float
    is_log: bool = True

    def at(self, value: float) -> float:
        """Return how far to the right *value* is, from 0 to the panel's width."""
        low, high = self.ticks[0], self.ticks[-1]
        value = min(max(value, low), high)
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low) * _WIDTH

    def label(self, value: float) -> str:
        return f"{value:g}x" if self.is_log else f"{value:.0%}"


PANELS = (
    Panel("time of eager / ours", lambda c: c.over("eager"), (0.5, 1, 2, 5, 10, 20, 50, 100), 1),
    Panel("time of Inductor / ours", lambda c: c.over("inductor"), (0.5, 1, 2, 5, 10, 20), 1),
    Panel("share of the stream", lambda c: c.share, (0, 0.4, 0.8, 1.2, 1.6), 0.8, is_log=False),
)


def draw(cells: Sequence[Cell], machine: dict[str, Any]) -> str:
    """Return the picture of *cells* as SVG."""
    ordered = sorted(cells, key=lambda cell: cell.kernel)
    rows = [(name, list(own)) for name, own in itertools.groupby(ordered, lambda c: c.kernel)]
    tokens = sorted({cell["tokens"] for cell in cells})
    colours = {count: _COLOURS[min(i, len(_COLOURS) - 1)] for i, count in enumerate(tokens)}
    width = _LEFT + len(PANELS) * (_WIDTH + _GAP)
    height = _TOP + _ROW * len(rows) + 40
    size = f'width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" {_FONT}>',
        f'<rect {size} fill="white"/>',
        _text(14, 24, "opweave_c: every cell of every kernel", size=17, weight="bold"),
        _text(14, 44, _caption(machine), colour="#555"),
        *_legend(colours),
        *_names([name for name, _ in rows], width),
    ]
    for i, panel in enumerate(PANELS):
        left = _LEFT + i * (_WIDTH + _GAP)
        parts += [*_frame(panel, left, len(rows)), *_dots(panel, left, rows, colours)]
    return "\n".join([*parts, "</svg>", ""])


def _caption(machine: dict[str, Any]) -> str:
    threads = " and ".join(map(str, machine["threads"]))
    return f"{machine['processor']}, torch {machine['torch']}, threads: {threads}"


def _legend(colours: dict[int, str]) -> Iterator[str]:
    x = 14
    for count, colour in colours.items():
        label = f"{count} token{'s' if count > 1 else ''}"
        yield f'<circle cx="{x + 5}" cy="64" r="5" fill="{colour}"/>'
        yield _text(x + 14, 68, label)
        x += 30 + 7 * len(label)
    yield f'<circle cx="{x + 5}" cy="64" r="4.5" fill="none" stroke="{_BAD}" stroke-width="1.5"/>'
    yield _text(x + 14, 68, "below the bar", colour=_BAD)


def _names(names: Sequence[str], width: int) -> Iterator[str]:
    for i, name in enumerate(names):
        if i % 2 == 0:
            y = _TOP + i * _ROW
            yield f'<rect x="0" y="{y}" width="{width}" height="{_ROW}" fill="#f4f6f8"/>'
        yield _text(_LEFT - 12, _TOP + i * _ROW + 15, name, anchor="end")


def _frame(panel: Panel, left: float, rows: int) -> Iterator[str]:
    bottom = _TOP + rows * _ROW
    yield _text(left, _TOP - 26, panel.title, weight="bold")
    for tick in panel.ticks:
        x, is_bar = left + panel.at(tick), tick == panel.bar
        stroke = f'stroke="{_BAD if is_bar else "#ccc"}" stroke-width="{1.5 if is_bar else 0.7}"'
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" {stroke}/>'
        for y in (_TOP - 6, bottom + 16):
            yield _text(x, y, panel.label(tick), anchor="middle", size=10, colour="#555")


def _dots(
    panel: Panel, left: float, rows: Sequence[tuple[str, Sequence[Cell]]], colours: dict[int, str]
) -> Iterator[str]:
    for i, (_, cells) in enumerate(rows):
        y = _TOP + i * _ROW + _ROW / 2
        found = [(cell, value) for cell in cells if (value := panel.value(cell)) is not None]
        for cell, value in found:
            least = panel.bar if panel.is_log else cell.rows[-1].get("least_share", 0)
            ring = f'stroke="{_BAD}" stroke-width="1.3"' if value < least else ""
            yield (
                f'<circle cx="{left + panel.at(value):.1f}" cy="{y}" r="3.6" '
                f'fill="{colours[cell["tokens"]]}" fill-opacity="0.75" {ring}>'
                f"<title>{escape(cell.kernel)}: {escape(cell.case)}, {cell['threads']} thread(s): "
                f"{value:.2f}</title></circle>"
            )
        if found:
            x = left + panel.at(median(value for _, value in found))
            yield f'<rect x="{x - 1:.1f}" y="{y - 8}" width="2" height="16" fill="black"/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    anchor: str = "start",
    weight: str = "normal",
    colour: str = "#111",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="{colour}">{escape(text)}</text>'
    )
