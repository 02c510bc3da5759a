"""Render reports as one self-contained HTML page, with light and dark themes.

JavaScript is only needed for the filters.
"""

from opweave.compile.html.page import render

__all__ = ["render"]
