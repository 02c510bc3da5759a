"""Base classes of request and response bodies, and the smaller bodies."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from json.encoder import encode_basestring
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

import pydantic
from pydantic.json_schema import SkipJsonSchema

from opweave.errors import shown
from opweave_engine import RequestOutput
from opweave_engine.server.errors import ApiError, unsupported

# Types of fields.


T = TypeVar("T")


def check_unicode(text: str) -> str:
    """Return *text*; raise ValueError if it has a lone surrogate."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("has half of a surrogate pair, which is not a character") from error
    return text


def _whole(value: object) -> object:
    """JSON has one type of number: 2.0 is an integer, too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, pydantic.BeforeValidator(_whole)]
Text = Annotated[str, pydantic.AfterValidator(check_unicode)]
# pydantic creates an error for every wrong item, which takes seconds and gigabytes for a long list.
# So the lists of requests stop at their first fault.
Items = Annotated[list[T], pydantic.Field(fail_fast=True)]
TokenIds = Items[int]


def until_fault(values: object, handler: pydantic.ValidatorFunctionWrapHandler) -> Any:
    """Validate a dictionary item by item, which stops at the first fault."""
    if not isinstance(values, Mapping):
        return handler(values)
    return {k: v for item in values.items() for k, v in handler(dict([item])).items()}


StopsAtFault = pydantic.WrapValidator(until_fault)  # fail_fast for dictionaries


def _input_kind(value: object) -> str:
    """Return the tag of a type in Input, from the first item only."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "tokens of prompts"
    return "tokens" if isinstance(first, int | float) else "texts"


Input = Annotated[  # one prompt or several
    Annotated[Text, pydantic.Tag("text")]
    | Annotated[Items[Text], pydantic.Tag("texts")]
    | Annotated[TokenIds, pydantic.Tag("tokens")]
    | Annotated[Items[TokenIds], pydantic.Tag("tokens of prompts")],
    pydantic.Discriminator(_input_kind),
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


# How the server handles a field: each model of a request declares it with one of these functions.


Unused = Annotated[Any, SkipJsonSchema()]  # the type of a field that no code reads


def supported(note: str, **options: Any) -> Any:
    """Declare an optional field that has an effect; *note* says which one."""
    return pydantic.Field(None, description=note, **options)


def harmless(note: str) -> Any:
    """Declare a field that cannot change the answer; *note* is the reason."""
    return pydantic.Field(None, description=note, json_schema_extra={"status": "harmless"})


def refused(note: str, *off: Any) -> Any:
    """Declare a field that gets a 400, unless its value is null or in *off*.

    Args:
        note: the reason or the alternative.
        off: values that turn the feature off.
    """
    extra: Any = {"status": "refused", "off": off}
    return pydantic.Field(None, description=note, json_schema_extra=extra)


class RequestFields(pydantic.BaseModel):
    """A part of a request; it may have unknown fields.

    Only integers and whole floats are converted into each other; ``"5"`` or ``true`` for a number
    is an error.

    Attributes:
        is_open: whether it may have fields of any name, which have an effect.
    """

    model_config = pydantic.ConfigDict(extra="allow", protected_namespaces=(), strict=True)

    is_open: ClassVar[bool] = False


@dataclass(frozen=True)
class FieldRow:
    """How the server handles one request field.

    Attributes:
        status: ``supported``: it has its documented effect. ``harmless``: it has no effect here,
            and cannot change the answer. ``refused``: a request that sets it gets a 400.
        note: the effect; or the reason and the alternative if it has no effect.
        off: values of a refused field that turn the feature off, and are accepted, like null.
        parts: the model of the objects in its value, if it has one.
    """

    status: Literal["supported", "harmless", "refused"]
    note: str
    off: Sequence[object] = ()
    parts: type[RequestFields] | None = None

    def is_off(self, value: object) -> bool:
        """Return whether *value* turns the feature off."""
        return value is None or any(
            value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off
        )


def models_of(annotation: Any) -> Iterator[type[RequestFields]]:
    """Yield the models of requests in a type, through lists and unions."""
    if isinstance(annotation, type) and issubclass(annotation, RequestFields):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from models_of(argument)


@cache
def field_rows(model: type[RequestFields]) -> dict[str, FieldRow]:
    """Return how the server handles the fields of a model, by the names that clients send."""
    rows = {}
    for name, info in model.model_fields.items():
        extra: Any = {"status": "supported", **(info.json_schema_extra or {})}  # type: ignore[dict-item]
        parts = next(models_of(info.annotation), None)
        rows[info.alias or name] = FieldRow(note=info.description or "", parts=parts, **extra)
    return rows


def all_rows(model: type[RequestFields], prefix: str = "") -> dict[str, FieldRow]:
    """Return the rows of a model and of its parts, by path: ``messages.content.type``."""
    rows = {}
    for name, row in field_rows(model).items():
        rows[prefix + name] = row
        if row.parts is not None:
            rows |= all_rows(row.parts, f"{prefix}{name}.")
    return rows


_MAX_UNKNOWN_PATHS = 1024  # recorded for one request
_MAX_HEADER_PATHS = 16  # reported in the header of the response


class RequestBody(RequestFields):
    """A request, whose fields are declared in its model and those of its parts."""

    model: Text | None = supported("Name of a served model. Missing or empty: the served model.")
    user: Text | None = harmless("Not used.")

    _unknown: set[str] = pydantic.PrivateAttr(default_factory=set)

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _check_fields(cls, values: Any, handler: pydantic.ModelWrapValidatorHandler[Self]) -> Self:
        # Before the types are checked: an unsupported field is rejected, regardless of its type.
        unknown: set[str] = set()
        if isinstance(values, Mapping):
            _check(values, cls, "", unknown)
        body = handler(values)
        body._unknown = unknown
        return body

    def ignored_fields(self) -> list[str]:
        """Return the paths of undeclared fields, shortened to fit a header."""
        return for_header(sorted(self._unknown))


def _check(
    values: Mapping[str, Any], model: type[RequestFields], prefix: str, unknown: set[str]
) -> None:
    """Add the paths of undeclared fields to *unknown*.

    Raises:
        ApiError: a refused field is set.
    """
    rows = field_rows(model)
    for name, value in values.items():
        path, row = prefix + name, rows.get(name)
        if row is None:
            if not model.is_open and len(unknown) < _MAX_UNKNOWN_PATHS:
                unknown.add(path)
        elif row.status == "refused" and not row.is_off(value):
            raise unsupported(path, f"{path}={shown(value)}", row.note)
        elif row.parts is not None:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, dict):
                    _check(part, row.parts, f"{path}.", unknown)


def for_header(paths: Sequence[str]) -> list[str]:
    r"""Return the first of *paths*, shortened and escaped to fit a header.

    Spaces, commas and characters other than printable ASCII become escapes such as ``\x20``, since
    a header may not end with a space, and the list is separated by commas.
    """
    escaped = (ascii(path)[1:-1].replace(" ", r"\x20").replace(",", r"\x2c") for path in paths)
    return [path[:64] or '""' for path in islice(escaped, _MAX_HEADER_PATHS)]


class ResponseBody(pydantic.BaseModel):
    """A response, or a part of one."""

    model_config = pydantic.ConfigDict(protected_namespaces=())

    def event(self, **options: Any) -> str:
        """Return the body as a server-sent event."""
        return f"data: {self.model_dump_json(**options)}\n\n"


_TEXT = uuid.uuid4().hex  # occurs in no other field


class TextEvents:
    """Server-sent events that differ only in an index and a text; encoded once per index.

    Args:
        body: returns the event with an index and a text.
    """

    def __init__(self, body: Callable[[int, str], ResponseBody]) -> None:
        self._body = body
        self._parts: dict[int, list[str]] = {}  # before and after the text

    def event(self, index: int, text: str) -> str:
        """Return the event."""
        if index not in self._parts:
            self._parts[index] = self._body(index, _TEXT).event().split(encode_basestring(_TEXT))
        return encode_basestring(text).join(self._parts[index])


class GeneratedBody(ResponseBody):
    """A response, or an event of one, with an id."""

    id: str
    object: str
    created: int
    model: str


# Token usage of a request.


class PromptTokensDetails(ResponseBody):
    """Where the prompt tokens came from."""

    cached_tokens: int


class Usage(ResponseBody):
    """The number of prompt tokens and of generated tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails


class UsageCounter:
    """Counts the tokens of a request, from deltas or from complete outputs.

    Args:
        counts_completion: whether generated tokens are counted.
    """

    def __init__(self, *, counts_completion: bool = True) -> None:
        self._counts_completion = counts_completion
        self._prompt = self._completion = 0
        self._cached: dict[int, int] = {}

    def add(self, output: RequestOutput, number: int = 0) -> None:
        """Count the tokens of an output or a delta for prompt *number*."""
        self._prompt += len(output.prompt_token_ids)
        for completion in output.outputs:
            self._completion += len(completion.token_ids)
        if output.num_cached_tokens:
            self._cached[number] = output.num_cached_tokens

    def usage(self) -> Usage:
        """Return the usage so far."""
        completion = self._completion * self._counts_completion
        return Usage(
            prompt_tokens=self._prompt,
            completion_tokens=completion,
            total_tokens=self._prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )


# Parts of responses that completions and chat completions share.


class PromptLogprob(ResponseBody):
    """The log-probability of a token at one place of a prompt."""

    logprob: float
    rank: int
    decoded_token: str


# By token id; None for the first token, which follows nothing.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class ErrorDetail(ResponseBody):
    """Why a request, or one prompt of several, was not answered."""

    message: str
    type: str
    param: str | None
    code: str | None


# ``/v1/models``.


class ModelCard(ResponseBody):
    """A served model name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "opweave"
    root: str
    max_model_len: int


class ModelList(ResponseBody):
    """All served model names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
