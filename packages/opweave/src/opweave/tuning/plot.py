"""Charts of times over tokens, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jinja2

Points = Sequence[tuple[int, float]]

_TEMPLATE = Path(__file__).parent / "templates" / "chart.svg"
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 624, 52, 356  # the edges of the plot in pixels
_TICK_STEPS = (1, 2, 5)  # of each power of ten


def draw(lines: Mapping[str, Points], title: str, caption: str) -> str:
    """Return a chart of one line per implementation; both axes are logarithmic.

    Args:
        lines: tokens and microseconds by implementation.
        title: the heading.
        caption: the line below it.
    """
    tokens = sorted({count for points in lines.values() for count, _ in points}) or [1]
    times = [time for points in lines.values() for _, time in points] or [1.0]
    first, last = tokens[0], max(tokens[-1], tokens[0] + 1)
    low, high = min(times) / 1.2, max(times) * 1.2

    def x_of(count: int) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * math.log(count / first, last / first), 1)

    def y_of(time: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * math.log(time / low, high / low), 1)

    environment = jinja2.Environment(
        autoescape=True,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        caption=caption,
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        bottom=_BOTTOM,
        tokens=[(x_of(count), count) for count in tokens],
        times=[(y_of(time), f"{time:g}") for time in _ticks(low, high)],
        lines={
            name: [
                (x_of(count), y_of(time), count, f"{time:.1f}") for count, time in sorted(points)
            ]
            for name, points in lines.items()
        },
    )


def _ticks(low: float, high: float) -> Iterator[float]:
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        ticks = (step * 10.0**power for step in _TICK_STEPS)
        yield from (tick for tick in ticks if low <= tick <= high)
