"""Tables that stay readable in a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 2  # between columns
_LONGEST_WORD = 24  # longer words, such as paths, may be wrapped


class PlainTable(Table):
    """A table without borders whose cells wrap between words.

    Rich shrinks all columns of a wide table equally, down to one letter per line. Here a column is
    at least as wide as its longest word of up to 24 characters.
    """

    def __init__(self, *columns: str) -> None:
        super().__init__(box=None, header_style="bold", padding=(0, _GAP, 0, 0), pad_edge=False)
        for column in columns:
            self.add_column(column, overflow="fold", min_width=_longest_word(column))

    def add_row(self, *cells: RenderableType | None, **options: object) -> None:
        for column, cell in zip(self.columns, cells, strict=False):
            if isinstance(cell, str) and column.min_width is not None:
                column.min_width = max(column.min_width, _longest_word(cell))
        super().add_row(*cells, **options)  # type: ignore[arg-type]


def _longest_word(cell: str) -> int:
    words = Text.from_markup(cell).plain.split()
    return min(max(map(len, words), default=1), _LONGEST_WORD)


class ListTable(Table):
    """A table with one line per row; the last column is truncated to the terminal."""

    def __init__(self, *columns: str) -> None:
        super().__init__(box=None, header_style="bold", padding=(0, _GAP, 0, 0), pad_edge=False)
        for column in columns:
            self.add_column(column, no_wrap=True, min_width=len(column))
        self.columns[-1].min_width = None

    def add_row(self, *cells: RenderableType | None, **options: object) -> None:
        for column, cell in zip(self.columns, cells, strict=False):
            if isinstance(cell, str) and column.min_width is not None:
                column.min_width = max(column.min_width, len(Text.from_markup(cell).plain))
        super().add_row(*cells, **options)  # type: ignore[arg-type]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        *whole, last = self.columns
        taken = sum((column.min_width or 0) + _GAP for column in whole)
        last.max_width = max(options.max_width - taken - _GAP, 1)
        return super().__rich_console__(console, options)
