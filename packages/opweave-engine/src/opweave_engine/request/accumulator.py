"""Adds up the deltas of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from opweave_engine.request.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput


@dataclass(slots=True)
class _GrowingOutput:
    """One output of the request so far; the attributes are those of a CompletionOutput."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: CompletionOutput) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            self.index,
            "".join(self.texts),
            list(self.token_ids),
            self.finish_reason,
            None if self.logprobs is None else list(self.logprobs),
            self.stop_reason,
        )


class OutputAccumulator:
    """Accumulates the deltas of one request, each in time proportional to its own size."""

    def __init__(self) -> None:
        self._first: RequestOutput | None = None
        self._newest: RequestOutput | None = None
        self._outputs: dict[int, _GrowingOutput] = {}

    def add(self, delta: RequestOutput) -> None:
        """Append a delta."""
        self._first, self._newest = self._first or delta, delta
        for each in delta.outputs:
            if (growing := self._outputs.get(each.index)) is None:
                growing = self._outputs[each.index] = _GrowingOutput(each.index)
            growing.add(each)

    def output(self) -> RequestOutput:
        """Return everything that was added, as one output. At least one delta must be added."""
        assert self._first is not None, "add() comes first"
        assert self._newest is not None, "add() comes first"
        return replace(
            self._newest,
            prompt=self._first.prompt,
            prompt_token_ids=self._first.prompt_token_ids,
            prompt_logprobs=self._first.prompt_logprobs,
            outputs=[self._outputs[index].output() for index in sorted(self._outputs)],
        )


def merge_deltas(deltas: Sequence[RequestOutput]) -> RequestOutput:
    """Return consecutive deltas of a request, at least one, as one delta."""
    if len(deltas) == 1:
        return deltas[0]
    merged = OutputAccumulator()
    for delta in deltas:
        merged.add(delta)
    return merged.output()
