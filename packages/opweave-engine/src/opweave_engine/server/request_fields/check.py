"""Checks requests against the table of request fields."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opweave_engine.server.errors import unsupported
from opweave_engine.server.request_fields.row import Row

_MAX_UNKNOWN = 1024  # paths of one request; only a few of them are reported


@dataclass
class _Node:
    """A field, and the fields that it may contain."""

    row: Row | None
    children: dict[str, _Node] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self.row is not None and self.row.is_open


class FieldTable:
    """The fields of the requests to one endpoint.

    Args:
        rows: one for each field; the field that contains another one comes first.

    Attributes:
        rows: by path, in the given order.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows: dict[str, Row] = {}
        self._root = _Node(None)
        for row in rows:
            if row.path in self.rows:
                raise ValueError(f"the field {row.path!r} has two rows")
            self.rows[row.path] = row
            node = self._root
            *parents, name = row.path.split(".")
            for parent in parents:
                node = node.children[parent]
            node.children[name] = _Node(row)

    def check(self, values: Mapping[str, Any]) -> list[str]:
        """Return the first paths of fields in *values* that the table does not have, sorted.

        Raises:
            ApiError: a refused field is set.
        """
        unknown: set[str] = set()
        _check(values, self._root, "", unknown)
        return sorted(unknown)


def _check(values: Mapping[str, Any], node: _Node, prefix: str, unknown: set[str]) -> None:
    for name, value in values.items():
        path, child = prefix + name, node.children.get(name)
        if child is None or child.row is None:
            if not node.is_open and len(unknown) < _MAX_UNKNOWN:
                unknown.add(path)
            continue
        if child.row.status == "refused" and not child.row.is_off(value):
            raise unsupported(path, f"{path}={reprlib.repr(value)}", child.row.note)
        if child.children:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, dict):
                    _check(part, child, f"{path}.", unknown)
