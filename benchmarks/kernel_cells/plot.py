"""Draws the results as SVG: a row per kernel, a dot per cell.

A cell outside the scale is a triangle at the edge, pointing outwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from kernel_cells.summary import Cell

_ROW, _TOP, _LEFT, _WIDTH, _GAP = 22, 116, 356, 250, 34
_COLORS = ("#9ecae1", "#4292c6", "#08519c", "#041f3f")
_BAD = "#d62728"
_FONT = 'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True)
class Panel:
    """A scale, with the figure of a cell that is drawn on it and the cell's bar, if it has one."""

    title: str
    value: Callable[[Cell], float | None]
    bar: Callable[[Cell], float | None]
    ticks: Sequence[float]
    is_log: bool = True

    def is_below(self, cell: Cell, value: float) -> bool:
        bar = self.bar(cell)
        return bar is not None and value < bar

    def side(self, value: float) -> int:
        """Return -1 if *value* is below the scale, 1 if it is above, and 0 if it is inside."""
        return (value > self.ticks[-1]) - (value < self.ticks[0])

    def at(self, value: float) -> float:
        """Return the x coordinate of *value* inside the panel, from 0 to its width."""
        low, high = self.ticks[0], self.ticks[-1]
        value = min(max(value, low), high)
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low) * _WIDTH

    def label(self, value: float) -> str:
        return f"{value:g}x" if self.is_log else f"{value:.0%}"


_TIMES = (0.5, 1, 2, 5, 10, 20, 50, 100)
_SHARES = (0, 0.4, 0.6, 0.8, 1.2, 1.6)
PANELS = (
    Panel("time of eager / ours", lambda c: c.over("eager"), lambda c: 1, _TIMES),
    Panel("time of Inductor / ours", lambda c: c.over("inductor"), lambda c: 1, _TIMES),
    Panel("share of the stream", lambda c: c.share, lambda c: c.least_share, _SHARES, is_log=False),
)


def draw(cells: Sequence[Cell], machine: dict[str, Any], *, tooltips: bool = True) -> str:
    """Return the chart of *cells* as SVG.

    A tooltip names the cell of a dot. Without them, dots of one color are one path, and those at
    the same place one dot: 60 KB instead of 750 KB for a full table.
    """
    ordered = sorted(cells, key=lambda cell: cell.kernel)
    rows = [(name, list(own)) for name, own in itertools.groupby(ordered, lambda c: c.kernel)]
    tokens = sorted({cell["tokens"] for cell in cells})
    colors = {count: _COLORS[min(i, len(_COLORS) - 1)] for i, count in enumerate(tokens)}
    width = _LEFT + len(PANELS) * (_WIDTH + _GAP)
    height = _TOP + _ROW * len(rows) + 40
    size = f'width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" {_FONT}>',
        f'<rect {size} fill="white"/>',
        _text(14, 24, "opweave_c: every cell of every kernel", size=17, weight="bold"),
        _text(14, 44, _caption(machine), color="#555"),
        *_legend(colors),
        *_names([name for name, _ in rows], width),
    ]
    for i, panel in enumerate(PANELS):
        left = _LEFT + i * (_WIDTH + _GAP)
        parts += [*_frame(panel, left, len(rows)), *_bars(panel, left, rows)]
        parts += _dots(panel, left, rows, colors, tooltips)
    return "\n".join([*parts, "</svg>", ""])


def _caption(machine: dict[str, Any]) -> str:
    threads = " and ".join(map(str, machine["threads"]))
    return f"{machine['processor']}, torch {machine['torch']}, threads: {threads}"


def _legend(colors: dict[int, str]) -> Iterator[str]:
    x = 14
    for count, color in colors.items():
        label = f"{count} token{'s' if count > 1 else ''}"
        yield f'<circle cx="{x + 5}" cy="64" r="5" fill="{color}"/>'
        yield _text(x + 14, 68, label)
        x += 30 + 7 * len(label)
    yield f'<rect x="{x + 4}" y="56" width="2" height="16" fill="black"/>'
    yield _text(x + 14, 68, "median of the kernel")
    x += 160
    yield _triangle(x + 5, 64, 1, f'fill="{_COLORS[1]}"')
    yield _text(x + 14, 68, "outside of the scale")
    x += 145
    yield f'<line x1="{x + 5}" x2="{x + 5}" y1="56" y2="72" stroke="{_BAD}" stroke-width="1.5"/>'
    yield _text(x + 14, 68, "the bar", color=_BAD)
    x += 70
    yield f'<circle cx="{x + 5}" cy="64" r="4.5" fill="none" stroke="{_BAD}" stroke-width="1.5"/>'
    yield _text(x + 14, 68, "below the bar", color=_BAD)


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
        x = left + panel.at(tick)
        stroke = 'stroke="#ccc" stroke-width="0.7"'
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" {stroke}/>'
        for y in (_TOP - 6, bottom + 16):
            yield _text(x, y, panel.label(tick), anchor="middle", size=10, color="#555")


def _bars(panel: Panel, left: float, rows: Sequence[tuple[str, Sequence[Cell]]]) -> Iterator[str]:
    """Draw the bars of each kernel: those of decoding are not those of a prompt."""
    for i, (_, cells) in enumerate(rows):
        drawn = [cell for cell in cells if panel.value(cell) is not None]
        for bar in sorted({bar for cell in drawn if (bar := panel.bar(cell)) is not None}):
            x, y = left + panel.at(bar), _TOP + i * _ROW
            ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + _ROW}"'
            yield f'<line {ends} stroke="{_BAD}" stroke-width="1.5"/>'


def _dots(
    panel: Panel,
    left: float,
    rows: Sequence[tuple[str, Sequence[Cell]]],
    colors: dict[int, str],
    tooltips: bool,
) -> Iterator[str]:
    paths: dict[tuple[str, bool], dict[str, None]] = {}
    others: list[str] = []
    for i, (_, cells) in enumerate(rows):
        y = _TOP + i * _ROW + _ROW / 2
        found = [(cell, value) for cell in cells if (value := panel.value(cell)) is not None]
        for cell, value in found:
            x, side = left + panel.at(value), panel.side(value)
            color, is_below = colors[cell["tokens"]], panel.is_below(cell, value)
            if not tooltips and not side:
                paths.setdefault((color, is_below), {})[f"M{round(x)},{y:g}h0"] = None
                continue
            look = f'fill="{color}" fill-opacity="0.75"'
            if is_below:
                look += f' stroke="{_BAD}" stroke-width="1.3"'
            title = (
                f"{escape(cell.kernel)}: {escape(cell.case)}, {cell['threads']} thread(s): "
                f"{value:.2f}"
            )
            title = title if tooltips else ""
            others.append(_triangle(x, y, side, look, title) if side else _dot(x, y, look, title))
        if found:
            x = left + panel.at(median(value for _, value in found))
            others.append(f'<rect x="{x - 1:.1f}" y="{y - 8}" width="2" height="16"/>')
    for (color, is_below), dots in paths.items():
        yield from _path(dots, color, is_below)
    yield from others


def _path(dots: Iterable[str], color: str, is_below: bool) -> Iterator[str]:
    """Draw dots as the round caps of strokes without length."""
    for stroke, width in [(_BAD, 8.5)] * is_below + [(color, 7.2)]:
        look = f'stroke="{stroke}" stroke-width="{width}" stroke-linecap="round"'
        yield f'<path d="{"".join(dots)}" {look} stroke-opacity="0.75"/>'


def _dot(x: float, y: float, look: str, title: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y}" r="3.6" {look}><title>{title}</title></circle>'


def _triangle(x: float, y: float, side: int, look: str, title: str = "") -> str:
    points = f"{x - 4 * side:.1f},{y - 4.5} {x + 5 * side:.1f},{y} {x - 4 * side:.1f},{y + 4.5}"
    named = title and f"<title>{title}</title>"
    return f'<polygon points="{points}" {look}>{named}</polygon>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    anchor: str = "start",
    weight: str = "normal",
    color: str = "#111",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="{color}">{escape(text)}</text>'
    )
