"""Draws a bar for each figure that has a baseline, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

_LEFT, _WIDTH, _ROW, _TOP = 250, 420, 26, 70
_FONT = 'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12"'


def draw(rows: Sequence[dict[str, Any]], machine: dict[str, Any]) -> str:
    """Return the picture: how many times as fast as its baseline each row is."""
    drawn = [row for row in rows if "ratio" in row]
    most = max([2.0, *(row["ratio"] for row in drawn)])
    size = f'width="{_LEFT + _WIDTH + 190}" height="{_TOP + _ROW * len(drawn) + 24}"'
    caption = f"{machine['processor']}, torch {machine['torch']}, {machine['threads']} thread(s)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {_FONT}>',
        f'<rect {size} fill="white"/>',
        '<text x="14" y="24" font-size="17" font-weight="bold">The engine: times as fast</text>',
        f'<text x="14" y="44" fill="#555">{escape(caption)}</text>',
        *(part for i, row in enumerate(drawn) for part in _bar(i, row, most)),
        _line(_WIDTH / most, len(drawn)),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _bar(index: int, row: dict[str, Any], most: float) -> Iterator[str]:
    y = _TOP + index * _ROW
    width = _WIDTH * row["ratio"] / most
    color = "#4292c6" if row["ratio"] >= 1 else "#d62728"
    share = f", {row['limit_share']:.0%} of the limit" if "limit_share" in row else ""
    yield f'<text x="{_LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(row["name"])}</text>'
    yield (
        f'<rect x="{_LEFT}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 8}" fill="{color}">'
        f"<title>{escape(row['case'])}: {row['value']} {escape(row['unit'])}, "
        f"{escape(row['against'])} {row['baseline']}</title></rect>"
    )
    yield f'<text x="{_LEFT + width + 8:.1f}" y="{y + 14}">{row["ratio"]:g}x{share}</text>'


def _line(at: float, rows: int) -> str:
    x, bottom = _LEFT + at, _TOP + rows * _ROW
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom}" stroke="black"/>'
