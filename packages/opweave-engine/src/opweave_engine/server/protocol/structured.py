"""The fields for structured output, of OpenAI and of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from opweave_engine import SamplingParamsError, StructuredOutputsParams
from opweave_engine.server.errors import ApiError, unsupported
from opweave_engine.server.protocol.base import Items, RequestBody, RequestFields, Text

Schema = dict[str, Any] | bool
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class JsonSchema(RequestFields):
    """A JSON schema with a name."""

    schema_: Schema | None = Field(None, alias="schema")


class ResponseFormat(RequestFields):
    """Free text, any JSON object, or JSON that satisfies a schema."""

    type: Text | None
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(None, alias="schema")

    @property
    def any_schema(self) -> Schema | None:
        """The schema, which clients write in ``json_schema.schema`` or in ``schema``.

        Raises:
            ApiError: it is written in both.
        """
        inner = None if self.json_schema is None else self.json_schema.schema_
        if inner is not None and self.schema_ is not None:
            raise ApiError(
                "response_format has json_schema.schema and schema; give one of them.",
                param="response_format",
            )
        return self.schema_ if inner is None else inner


class StructuredOutputs(RequestFields):
    """The fields of :class:`opweave_engine.StructuredOutputsParams`."""

    json_: Schema | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Items[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: Text | None = None


class FormFields(RequestBody):
    """The fields for structured output; at most one may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Items[Text] | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None

    @property
    def form_field(self) -> str:
        """The field that is set."""
        return next((name for name, _ in self._forms()), "structured_outputs")

    def form(self) -> StructuredOutputsParams | None:
        """Return the constraint, or None for free text.

        Raises:
            ApiError: several fields are set, or one contradicts itself.
        """
        given = list(self._forms())
        if not given:
            return None
        if len(given) > 1:
            names = " and ".join(name for name, _ in given)
            raise ApiError(
                f"{names} both say what form the answer must have; give one of them.",
                param=given[1][0],
            )
        ((name, options),) = given
        try:
            return StructuredOutputsParams(
                **{key: value for key, value in options.items() if value is not None}
            )
        except SamplingParamsError as error:
            raise form_error(error, name) from error

    def _forms(self) -> Iterator[tuple[str, dict[str, Any]]]:
        spaces = {"whitespace_pattern": self.guided_whitespace_pattern}
        if self.response_format is not None and (form := _of(self.response_format)):
            yield "response_format", {**form, **spaces}
        if self.structured_outputs is not None:
            declared = self.structured_outputs.model_dump(by_alias=True)
            known = type(self.structured_outputs).model_fields.items()
            names = {info.alias or name for name, info in known}
            yield "structured_outputs", {name: declared[name] for name in names}
        for field, kind in _GUIDED.items():
            if (value := getattr(self, field)) is not None:
                yield field, {kind: value, **spaces}


def form_error(error: Exception, field: str) -> ApiError:
    """Return *error* about structured output, with the name of the request field."""
    return ApiError(str(error).replace("structured_outputs", field, 1), param=field)


def _of(form: ResponseFormat) -> dict[str, Any]:
    if form.type not in (None, "text", "json_object", "json_schema"):
        raise unsupported(
            "response_format.type",
            f"response_format.type={form.type!r}",
            "It may be 'text', 'json_object' or 'json_schema'.",
        )
    schema = form.any_schema
    if form.type in (None, "text"):
        if schema is not None:
            raise ApiError(
                f"response_format has a schema, but type={form.type!r}; for JSON that satisfies "
                "the schema, the type is 'json_schema'.",
                param="response_format",
            )
        return {}
    if form.type == "json_object":
        if isinstance(schema, dict):
            return {"json": {"type": "object", **schema}}
        return {"json": False} if schema is False else {"json_object": True}
    if schema is None:
        raise ApiError(
            "response_format of type 'json_schema' needs json_schema.schema.",
            param="response_format",
        )
    return {"json": schema}
