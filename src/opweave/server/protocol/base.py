"""What the bodies of all requests share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

_SHOWN = 16  # names of unknown fields in a header


def _is_text(text: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("holds half of a surrogate pair, which is no character") from error
    return text


Text = Annotated[str, AfterValidator(_is_text)]
TokenIds = list[int]
Input = Text | list[Text] | TokenIds | list[TokenIds]  # one prompt or several


class Fields(BaseModel):
    """A part of a request; it may hold more than is known here.

    Nothing is converted, but integers to floats: a client that sends ``"5"`` or ``true`` for a
    number has a defect, which it should see.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=(), strict=True)


class RequestBody(Fields):
    """A request; fields that nobody knows are ignored, and named in the response's headers."""

    model: Text | None = None

    def ignored_fields(self) -> list[str]:
        """Return the names of the fields that mean nothing here, fit for a header."""
        names = [ascii(name)[1:-1][:64] for name in self.model_extra or {}]
        return sorted(names)[:_SHOWN]


class ResponseBody(BaseModel):
    """A response, or a part of one."""

    model_config = ConfigDict(protected_namespaces=())

    def event(self, **options: Any) -> str:
        """Return it as a server-sent event."""
        return f"data: {self.model_dump_json(**options)}\n\n"
