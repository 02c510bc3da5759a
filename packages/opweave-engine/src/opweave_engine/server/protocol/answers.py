"""Parts of responses that completions and chat completions share."""

from __future__ import annotations

from opweave_engine.server.protocol.base import ResponseBody


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
