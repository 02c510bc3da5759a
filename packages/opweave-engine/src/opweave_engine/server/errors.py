"""Errors: exceptions, and error objects of OpenAI's API."""

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from fastapi.exceptions import RequestValidationError
from starlette.requests import Request

import opweave_engine
from opweave.ir.errors import OpweaveError

_log = logging.getLogger(__name__)

RETRY = {"Retry-After": "1"}  # the client may retry
NO_RETRY = {"X-Should-Retry": "false"}  # OpenAI's clients repeat other requests that got a 5xx
HANG_UP = {"Connection": "close"}  # the connection is closed
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ServerError(OpweaveError):
    """Base class of the errors of :mod:`opweave_engine.server`."""


class ServerConfigError(ServerError, ValueError):
    """A configuration value of the server is invalid."""


class ApiError(ServerError):
    """An error response.

    Args:
        message: the reason, for people.
        status: the HTTP status.
        param: the invalid request field.
        code: the reason, for programs.
        headers: additional headers of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The error object."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        type_ = _ERROR_TYPES.get(self.status, default)
        error = {"message": self.message, "type": type_, "param": self.param, "code": self.code}
        return {"error": error}

    def json(self) -> str:
        """Return the error object as ASCII JSON."""
        return json.dumps(self.body)


def unsupported(path: str, subject: str, note: str) -> ApiError:
    """Return the error for an unsupported field.

    Args:
        path: the path of the field.
        subject: the field and its value, as the message shows them.
        note: the reason or the alternative.
    """
    return ApiError(
        f"{subject} is not supported. {note}", param=path.partition(".")[0], code="unsupported"
    )


def too_large(limit: int) -> ApiError:
    """Return the error for a body of more than *limit* bytes."""
    return ApiError(
        f"The request is larger than {limit} bytes, which is the most that the server takes.",
        status=413,
        code="request_too_large",
        headers=HANG_UP,
    )


def shutting_down() -> ApiError:
    """Return the error for a request that has not finished when the server shuts down."""
    return ApiError(
        "The server shuts down, and the request took too long to wait for.",
        status=503,
        code="shutting_down",
    )


def not_arrived(seconds: float) -> ApiError:
    """Return the error for a request that did not arrive within *seconds*."""
    return ApiError(
        f"The request did not arrive within {seconds:g} s.",
        status=408,
        code="timeout",
        headers=HANG_UP,
    )


def api_error(error: Exception, request: Request) -> ApiError:
    """Return the error response for *error*.

    Internal errors are logged; the client gets a generic 500 with the request id.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, opweave_engine.EngineDeadError):
        server = request.app.state.server
        if server.admission.is_closed and server.engine.dead_with is None:
            return shutting_down()
        if not server.engine.is_running:
            return ApiError("The engine does not run.", status=503, code="engine_dead")
        return ApiError(
            "The replica that worked on this request has died. Other replicas take new requests.",
            status=503,
            code="replica_died",
            headers=NO_RETRY,  # the request may have killed the replica
        )
    if (response := engine_error(error)) is not None:
        return response
    request_id = request.state.request_id
    _log.error("request %s failed", request_id, exc_info=error)
    return ApiError(
        f"Something went wrong in the server. Its log says more about request {request_id}.",
        status=500,
        code="internal_error",
    )


def engine_error(error: Exception) -> ApiError | None:
    """Return the error response for an engine error about this request, or None."""
    if isinstance(error, opweave_engine.EngineError) and isinstance(error, ValueError):
        return ApiError(str(error), param=getattr(error, "parameter", None))
    if isinstance(error, opweave_engine.TokenizerError):
        return ApiError(
            "The server has no tokenizer, since the model's directory has none: send token ids "
            "instead of text.",
            code="no_tokenizer",
        )
    if isinstance(error, opweave_engine.GrammarQueueFullError):
        return ApiError(str(error), status=429, code="queue_full", headers=RETRY)
    if isinstance(error, opweave_engine.NonFiniteLogitsError):
        return ApiError(str(error), status=500, code="non_finite_logits")
    return None


def http_error(status: int, detail: str, headers: Mapping[str, str] | None) -> ApiError:
    """Return the error response for an error of the web framework."""
    phrase = HTTPStatus(status).phrase
    message = phrase if detail in ("", phrase) else detail
    return ApiError(
        f"{message.rstrip('.')}.",
        status=status,
        code=phrase.lower().replace(" ", "_"),
        headers=headers,
    )


# Error responses for requests that do not fit the schema.


_MAX_PROBLEMS = 3  # problems in one message
_PYDANTIC_NAMES = {"str", "int", "float", "bool", "constrained"}  # types, in paths of fields


def validation_error(error: RequestValidationError, content_type: str) -> ApiError:
    """Return the error object with the invalid fields and the reasons."""
    problems: dict[str, list[str]] = {}
    for fault in error.errors():
        path, message = _path(fault["loc"]), str(fault["msg"]).removeprefix("Value error, ")
        if fault["type"] == "json_invalid":
            return ApiError(
                f"The body is not valid JSON: {fault['ctx']['error']}.", code="invalid_json"
            )
        if message not in problems.setdefault(path, []):
            problems[path].append(message)
    if all(fault["loc"] == ("body",) and fault["type"] == "missing" for fault in error.errors()):
        return ApiError("The body is empty; a JSON object is required.", code="invalid_request")
    if not is_json(content_type):
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
    more = f"; and {len(lines) - _MAX_PROBLEMS} more" if len(lines) > _MAX_PROBLEMS else ""
    param = next(iter(problems)).partition(".")[0] or None
    return ApiError(
        "; ".join(lines[:_MAX_PROBLEMS]) + more + ".", param=param, code="invalid_request"
    )


def is_json(content_type: str) -> bool:
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

    def is_field(part: str) -> bool:
        return part.isidentifier() and part not in _PYDANTIC_NAMES and not part[:1].isupper()

    return ".".join(str(part) for part in location[1:] if isinstance(part, int) or is_field(part))
