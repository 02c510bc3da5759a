"""Error responses for requests that do not fit the schema."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fastapi.exceptions import RequestValidationError

from opweave_engine.server.errors import ApiError

_SHOWN = 3  # problems in one message
_MAX_CONTAINERS = 1 << 17  # arrays and objects of one body
_OTHER_BYTES = bytes(set(range(256)) - set(b'"[{'))


def validation_error(error: RequestValidationError, content_type: str) -> ApiError:
    """Return the error object with the invalid fields and the reasons."""
    problems: dict[str, list[str]] = {}
    for each in error.errors():
        path, message = _path(each["loc"]), str(each["msg"]).removeprefix("Value error, ")
        if each["type"] == "json_invalid":
            return ApiError(
                f"The body is not valid JSON: {each['ctx']['error']}.", code="invalid_json"
            )
        if message not in problems.setdefault(path, []):
            problems[path].append(message)
    if all(each["loc"] == ("body",) and each["type"] == "missing" for each in error.errors()):
        return ApiError("The body is empty; a JSON object is required.", code="invalid_request")
    if not _is_json(content_type):
        return ApiError(
            f"Content-Type {content_type!a} is not supported. Send JSON with Content-Type: "
            "application/json.",
            status=415,
            code="unsupported_content_type",
        )
    lines = [
        f"{path + ': ' if path else ''}{' or '.join(messages)}"
        for path, messages in problems.items()
    ]
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    param = next(iter(problems)).partition(".")[0] or None
    return ApiError("; ".join(lines[:_SHOWN]) + more + ".", param=param, code="invalid_request")


def check_size(body: bytes, content_type: str) -> None:
    """Raise ApiError if a body of JSON has too many arrays and objects.

    Each takes at least two bytes in the body, but up to 200 bytes of memory.
    """
    if not _is_json(content_type) or body.count(b"{") + body.count(b"[") <= _MAX_CONTAINERS:
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # A regular expression would take a second for a body of many short strings.
    marks = np.frombuffer(unescaped.translate(None, _OTHER_BYTES), np.uint8)
    is_quote = marks == ord('"')
    is_in_string = np.logical_xor.accumulate(is_quote)
    count = len(marks) - int(np.count_nonzero(is_in_string | is_quote))
    if count > _MAX_CONTAINERS:
        raise ApiError(
            f"The body has {count} arrays and objects, but the server takes at most "
            f"{_MAX_CONTAINERS}. Send several requests.",
            code="invalid_request",
        )


def _is_json(content_type: str) -> bool:
    """Whether FastAPI parses a body of this content type as JSON."""
    kind, _, sub = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (sub == "json" or sub.endswith("+json"))


def body_error(error: BaseException | None) -> ApiError | None:
    """Return the error object for a body that cannot be parsed; None for any other *error*."""
    if isinstance(error, UnicodeDecodeError):
        why = f"it is not UTF-8, at byte {error.start} (0x{error.object[error.start]:02x})"
    elif isinstance(error, RecursionError):
        why = "it is nested too deeply"
    elif isinstance(error, ValueError):
        why = str(error).partition(";")[0]
    else:
        return None
    return ApiError(f"The body is not valid JSON: {why}.", code="invalid_json")


def _path(location: Sequence[str | int]) -> str:
    """Return a path in the body: field names and indices, without pydantic's type names."""
    return ".".join(str(part) for part in location[1:] if isinstance(part, int) or _is_field(part))


def _is_field(part: str) -> bool:
    return part.isidentifier() and part not in _TYPES and not part[:1].isupper()


_TYPES = {"str", "int", "float", "bool", "constrained"}
