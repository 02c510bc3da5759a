"""Charts of times over tokens, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

Points = Sequence[tuple[int, float]]

_COLORS = ("#2f6fb2", "#e08214", "#2a9d5c", "#c23b3b", "#8e5bb5", "#7a6a58", "#d16ba5")
_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 16, 52, 44
_STEPS = (1, 2, 5)


def draw(lines: Mapping[str, Points], title: str, caption: str) -> str:
    """Return a chart of one line per implementation; both axes are logarithmic.

    Args:
        lines: tokens and microseconds by implementation.
        title: the heading.
        caption: the line below it.
    """
    tokens = sorted({x for points in lines.values() for x, _ in points}) or [1]
    times = [y for points in lines.values() for _, y in points] or [1.0]
    left, right = tokens[0], max(tokens[-1], tokens[0] + 1)
    low, high = min(times) / 1.2, max(times) * 1.2

    def x_of(count: float) -> float:
        share = math.log(count / left) / math.log(right / left)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y_of(time: float) -> float:
        share = math.log(time / low) / math.log(high / low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box}>',
        f'<rect {size} fill="white"/>',
        _text(_LEFT, 20, title, size=15),
        _text(_LEFT, 38, caption, color="#555"),
        _text(_WIDTH - _RIGHT, _HEIGHT - 8, "tokens", anchor="end"),
        _text(8, _TOP - 6, "µs"),
    ]
    for count in tokens:
        x = x_of(count)
        parts.append(_line(x, _TOP, x, _HEIGHT - _BOTTOM))
        parts.append(_text(x, _HEIGHT - _BOTTOM + 16, str(count), anchor="middle"))
    for time in _ticks(low, high):
        y = y_of(time)
        parts.append(_line(_LEFT, y, _WIDTH - _RIGHT, y))
        parts.append(_text(_LEFT - 6, y + 4, f"{time:g}", anchor="end"))
    for i, (name, points) in enumerate(lines.items()):
        color = _COLORS[i % len(_COLORS)]
        places = [(x_of(count), y_of(time)) for count, time in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for (x, y), (count, time) in zip(places, sorted(points), strict=True):
            tooltip = f"<title>{escape(name)}: {count} tokens, {time:.1f} µs</title>"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}">{tooltip}</circle>'
            )
        parts.append(_text(_LEFT + 8, _TOP + 16 + 16 * i, name, color=color))
    return "\n".join([*parts, "</svg>", ""])


def _ticks(low: float, high: float) -> Iterator[float]:
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (step * 10.0**power for step in _STEPS if low <= step * 10.0**power <= high)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="#ddd"/>'


def _text(
    x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", color: str = "#111"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{color}">{escape(text)}</text>'
    )
