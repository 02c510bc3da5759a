"""Fills in the parts of the documentation that are generated from the code."""

from __future__ import annotations

from typing import Any

from opweave.config.environment import VARIABLES
from opweave.conformance import CHECKS
from opweave.ir import TRAITS


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers in a page."""
    for name, fill in _PARTS.items():
        markdown = markdown.replace(f"<!-- {name} -->", fill())
    return markdown


def _environment() -> str:
    rows = [f"| `{v.name}` | {v.kind} | {v.default or '-'} | {v.doc} |" for v in VARIABLES]
    return "\n".join(["| variable | type | default | meaning |", "|---|---|---|---|", *rows])


def _traits() -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in TRAITS.items()]
    return "\n".join(["| trait | promise |", "|---|---|", *rows])


def _checks() -> str:
    rows = [f"| `{name}` | {check.promise} |" for name, check in CHECKS.items()]
    return "\n".join(["| check | what holds where it passes |", "|---|---|", *rows])


_PARTS = {"environment": _environment, "traits": _traits, "checks": _checks}
