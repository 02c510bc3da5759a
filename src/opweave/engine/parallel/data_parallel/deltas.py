"""Outputs that hold everything so far, sent as what is new in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from opweave.engine.request.outputs import CompletionOutput, RequestOutput

T = TypeVar("T")


def since(before: RequestOutput | None, output: RequestOutput) -> RequestOutput:
    """Return what *output* says that *before* does not; :func:`joined` undoes it.

    Args:
        before: an earlier output of the same request, or None.
        output: a later one, whose texts and lists begin with the earlier ones.
    """
    if before is None:
        return output
    return replace(
        output,
        prompt=None,
        prompt_token_ids=[],
        prompt_logprobs=_tail(before.prompt_logprobs, output.prompt_logprobs),
        outputs=[
            replace(
                new,
                text=new.text[len(old.text) :],
                token_ids=new.token_ids[len(old.token_ids) :],
                logprobs=_tail(old.logprobs, new.logprobs),
            )
            for old, new in _pairs(before, output)
        ],
    )


def joined(before: RequestOutput | None, piece: RequestOutput) -> RequestOutput:
    """Return the output of which *piece* is what *before* lacks."""
    if before is None:
        return piece
    return replace(
        piece,
        prompt=before.prompt,
        prompt_token_ids=before.prompt_token_ids,
        prompt_logprobs=_whole(before.prompt_logprobs, piece.prompt_logprobs),
        outputs=[
            replace(
                new,
                text=old.text + new.text,
                token_ids=old.token_ids + new.token_ids,
                logprobs=_whole(old.logprobs, new.logprobs),
            )
            for old, new in _pairs(before, piece)
        ],
    )


def _pairs(
    before: RequestOutput, after: RequestOutput
) -> Sequence[tuple[CompletionOutput, CompletionOutput]]:
    return list(zip(before.outputs, after.outputs, strict=True))


def _tail(before: list[T] | None, after: list[T] | None) -> list[T] | None:
    return None if after is None else after[len(before or ()) :]


def _whole(before: list[T] | None, tail: list[T] | None) -> list[T] | None:
    return None if tail is None else (before or []) + tail
