"""Base classes of request and response bodies, and the smaller bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

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

from opweave_engine import RequestOutput
from opweave_engine.server.errors import ApiError
from opweave_engine.server.request_fields import ENDPOINTS

# Base classes of request and response bodies.


T = TypeVar("T")

_SHOWN = 16  # paths of unknown fields in a header


def is_text(text: str) -> str:
    """Return *text*, unless it has half of a surrogate pair."""
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
Text = Annotated[str, AfterValidator(is_text)]
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
    r"""Return the first of *paths*, shortened and escaped to fit a header.

    Spaces, commas and characters other than printable ASCII become escapes such as ``\x20``, since
    a header may not end with a space, and the list is separated by commas.
    """
    escaped = (ascii(path)[1:-1].replace(" ", r"\x20").replace(",", r"\x2c") for path in paths)
    return [path[:64] or '""' for path in islice(escaped, _SHOWN)]


class ResponseBody(BaseModel):
    """A response, or a part of one."""

    model_config = ConfigDict(protected_namespaces=())

    def event(self, **options: Any) -> str:
        """Return the body as a server-sent event."""
        return f"data: {self.model_dump_json(**options)}\n\n"


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

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        """Return the usage for numbers of prompt, generated and cached prompt tokens."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


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
        self._completion += sum(len(each.token_ids) for each in output.outputs)
        self._cached[number] = output.num_cached_tokens or self._cached.get(number, 0)

    def usage(self) -> Usage:
        """Return the usage so far."""
        completion = self._completion * self._counts_completion
        return Usage.of(self._prompt, completion, sum(self._cached.values()))


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
