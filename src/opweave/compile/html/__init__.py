"""Reports as a page that one can read: one file, nothing to load, light and dark.

Without JavaScript only the filters are missing.
"""

from opweave.compile.html.page import render

__all__ = ["render"]
