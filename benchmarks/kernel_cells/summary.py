"""Summaries of rows: cells with all their states, and those below the bar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
_KEY = ("name", "variant", "dtype", "tokens", "hidden", "context", "threads")


@dataclass(frozen=True, slots=True)
class Cell:
    """The rows of one cell: one for each state that was measured."""

    rows: Sequence[Row]

    @property
    def kernel(self) -> str:
        """The kernel and its variant."""
        name: str = self.rows[0]["name"].removeprefix("kernel.")
        variant = self.rows[0]["variant"]
        return f"{name} ({variant})" if variant else name

    def __getitem__(self, key: str) -> Any:
        return self.rows[0][key]

    @property
    def case(self) -> str:
        parts: list[str] = self["case"].split(", ")
        return ", ".join(parts[1 if self["variant"] else 0 : -2])

    def value(self, state: str) -> float | None:
        """Return our microseconds with outputs in *state*."""
        return next((row["value"] for row in self.rows if row["outputs"] == state), None)

    def over(self, baseline: str) -> float | None:
        """Return how many times as long *baseline* takes as we do; with fresh outputs, if any."""
        return self[baseline] / self["value"] if baseline in self.rows[0] else None

    @property
    def share(self) -> float | None:
        """The share of the stream's bandwidth, with reused outputs where that was measured."""
        return self.rows[-1].get("stream_share")

    @property
    def limit_share(self) -> float | None:
        """The same of what the memory allows for these reads and writes."""
        return self.rows[-1].get("limit_share")

    @property
    def least_share(self) -> float | None:
        """The share of the stream's bandwidth that the cell should reach, if it should any."""
        least: float | None = self.rows[-1].get("least_share")
        return least or None

    @property
    def shortfalls(self) -> list[str]:
        """The figures below the bar."""
        found = []
        for baseline, label in (("eager", "eager"), ("inductor", "Inductor")):
            ratio = self.over(baseline)
            if ratio is not None and ratio < 1:
                found.append(f"{ratio:.2f} x {label}")
        least = self.least_share
        if least is not None and self.share is not None and self.share < least:
            found.append(f"{self.share:.0%} of the stream, not {least:.0%}")
        return found


def cells_of_rows(rows: Iterable[Row]) -> list[Cell]:
    """Return the cells of *rows*, in their order."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in _KEY), []).append(row)
    return [Cell(states) for states in found.values()]


def below_the_bar(cells: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.shortfalls]
