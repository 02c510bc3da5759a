"""Base classes of request and response bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from opweave_engine.server.errors import ApiError
from opweave_engine.server.request_fields import ENDPOINTS

T = TypeVar("T")

_SHOWN = 16  # paths of unknown fields in a header


def _is_text(text: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("has half of a surrogate pair, which is not a character") from error
    return text


def _whole(value: object) -> object:
    """JSON has one type of number: 2.0 is an integer, too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
Text = Annotated[str, AfterValidator(_is_text)]
# pydantic creates an error for every wrong item, which takes seconds and gigabytes for a long list.
# So the lists of requests stop at their first fault.
Items = Annotated[list[T], Field(fail_fast=True)]
TokenIds = Items[int]


def until_fault(values: object, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate a dictionary item by item, which stops at the first fault."""
    if not isinstance(values, Mapping):
        return handler(values)
    return {k: v for item in values.items() for k, v in handler(dict([item])).items()}


StopsAtFault = WrapValidator(until_fault)  # fail_fast for dictionaries


def _input_kind(value: object) -> str:
    """Return the tag of a type in Input, from the first item only."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "tokens of prompts"
    return "tokens" if isinstance(first, int | float) else "texts"


Input = Annotated[  # one prompt or several
    Annotated[Text, Tag("text")]
    | Annotated[Items[Text], Tag("texts")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[Items[TokenIds], Tag("tokens of prompts")],
    Discriminator(_input_kind),
]


def either(one: str, tag: str, other: str, other_tag: str) -> Callable[[object], str]:
    """Return a discriminator for two types of bodies, by the field that a body has.

    Error messages then refer to one of the types only.
    """

    def kind(body: object) -> str:
        if not isinstance(body, Mapping):
            return tag
        if body.get(one) is not None and body.get(other) is not None:
            raise ApiError(f"Send {one} or {other}, not both.", param=other)
        return other_tag if other in body and body.get(one) is None else tag

    return kind


class RequestFields(BaseModel):
    """A part of a request; it may have unknown fields.

    Only integers and whole floats are converted into each other; ``"5"`` or ``true`` for a number
    is an error.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=(), strict=True)


class RequestBody(RequestFields):
    """A request, checked against the table of request fields.

    Attributes:
        endpoint: its name in the table.
    """

    endpoint: ClassVar[str]

    model: Text | None = None

    _unknown: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _check_fields(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # Before the types are checked: an unsupported field is rejected, regardless of its type.
        table = ENDPOINTS[cls.endpoint].table
        unknown = table.check(values) if isinstance(values, Mapping) else []
        body = handler(values)
        body._unknown = unknown
        return body

    def ignored_fields(self) -> list[str]:
        """Return the paths of fields that are not in the table, shortened to fit a header."""
        return for_header(self._unknown)


def for_header(paths: Sequence[str]) -> list[str]:
    """Return the first of *paths*, shortened to fit a header."""
    return [ascii(path)[1:-1][:64] for path in paths[:_SHOWN]]


class ResponseBody(BaseModel):
    """A response, or a part of one."""

    model_config = ConfigDict(protected_namespaces=())

    def event(self, **options: Any) -> str:
        """Return the body as a server-sent event."""
        return f"data: {self.model_dump_json(**options)}\n\n"
