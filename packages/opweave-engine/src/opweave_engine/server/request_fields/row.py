"""One row of the table of request fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["supported", "harmless", "refused"]


@dataclass(frozen=True)
class Row:
    """How the server handles one request field.

    Attributes:
        path: the field's name, prefixed with the names of the fields that contain it: ``a.b``.
            Lists do not appear in the path: ``messages.content.type`` is in a list in a list.
        status: ``supported``: it has its documented effect. ``harmless``: it has no effect here,
            and cannot change the answer. ``refused``: a request that sets it gets a 400.
        note: the effect; or the reason and the alternative if it has no effect.
        off: values of a refused field that turn the feature off, and are accepted, like null.
        is_open: whether an object may have fields of any name, which are passed on unchanged.
    """

    path: str
    status: Status
    note: str
    off: tuple[object, ...] = ()
    is_open: bool = False

    def is_off(self, value: object) -> bool:
        """Return whether *value* turns the feature off."""
        return value is None or any(
            value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off
        )


def supported(path: str, note: str, *, is_open: bool = False) -> Row:
    """Return the row of a field that has its documented effect."""
    return Row(path, "supported", note, is_open=is_open)


def harmless(path: str, note: str) -> Row:
    """Return the row of a field that cannot change the answer; its value is ignored."""
    return Row(path, "harmless", note, is_open=True)


def refused(path: str, note: str, *, off: tuple[object, ...] = ()) -> Row:
    """Return the row of a field that is an error unless its value is null or in *off*."""
    return Row(path, "refused", note, off)
