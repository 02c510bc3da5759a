"""Logits processors: penalties, bias, and tokens that must not be sampled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from opweave_engine.sampling.sampling_request import SamplingRequest

_LARGEST = torch.finfo(torch.float32).max

TokenValue = tuple[int, int, float]  # a row, a token, and a value for it


def adjusted(logits: Tensor, requests: Sequence[SamplingRequest]) -> Tensor:
    """Return the logits after all logits processors, in this order.

    1. The repetition penalty divides positive logits of tokens in the prompt or the output, and
       multiplies negative ones (Keskar et al. 2019, arXiv:1909.05858, eq. 4).
    2. Presence and frequency penalties are subtracted, as OpenAI's API defines them.
    3. The bias is added.
    4. Tokens that are forbidden at this position, or that ``allowed_token_ids`` or a grammar
       exclude, get the logit -inf.

    Args:
        logits: ``(rows, vocabulary)``, floating point; not changed.
        requests: one for each row.

    Returns:
        *logits* themselves if no request changes them; else new float32 logits.
    """
    if not any(_is_adjusted(request) for request in requests):
        return logits
    scores = logits.to(torch.float32, copy=True)
    rows, tokens, numbers = _columns(_repetitions(requests), scores)
    known = scores[rows, tokens].double()
    _put(scores, rows, tokens, torch.where(known > 0, known / numbers, known * numbers))
    for entries in (_penalties(requests), _biases(requests)):
        rows, tokens, numbers = _columns(entries, scores)
        _put(scores, rows, tokens, scores[rows, tokens].double() + numbers)
    rows, tokens, _ = _columns(_forbidden(requests), scores)
    scores[rows, tokens] = -torch.inf
    _apply_masks(scores, requests)
    return scores


def _is_adjusted(request: SamplingRequest) -> bool:
    return (
        request.history is not None
        or request.allowed is not None
        or bool(request.params.logit_bias or request.forbidden)
    )


def _apply_masks(scores: Tensor, requests: Sequence[SamplingRequest]) -> None:
    """Set the logits of tokens that a mask excludes to -inf."""
    masks = [(row, r.allowed) for row, r in enumerate(requests) if r.allowed is not None]
    if not masks:
        return
    width = -(-scores.shape[-1] // 8)  # some masks have more bits than the vocabulary
    joined = bytearray().join(mask[:width].ljust(width, b"\0") for _, mask in masks)
    packed = torch.frombuffer(joined, dtype=torch.uint8)
    # Adding -inf from a table is several times faster than masked_fill_.
    entries = torch.nn.functional.embedding(
        packed.to(scores.device, torch.int32), _impossible(scores.device)
    )
    added = entries.reshape(len(masks), -1)[:, : scores.shape[-1]]
    if len(masks) == len(scores):
        scores += added
    else:
        rows = torch.tensor([row for row, _ in masks], device=scores.device)
        scores[rows] += added


@cache
def _impossible(device: torch.device) -> Tensor:
    """Return the value to add for each bit of each byte: 0 if the bit is set, else -inf."""
    bytes_, bits = torch.arange(256, device=device), torch.arange(8, device=device)
    is_set = (bytes_.unsqueeze(-1) >> bits) & 1
    return torch.zeros(256, 8, device=device).masked_fill_(is_set == 0, -torch.inf)


def _repetitions(requests: Sequence[SamplingRequest]) -> Iterator[TokenValue]:
    for row, (params, history) in enumerate((r.params, r.history) for r in requests):
        if history is not None and params.repetition_penalty != 1:
            for token in history.tokens:
                yield row, token, params.repetition_penalty


def _penalties(requests: Sequence[SamplingRequest]) -> Iterator[TokenValue]:
    for row, (params, history) in enumerate((r.params, r.history) for r in requests):
        if history is not None and (params.presence_penalty or params.frequency_penalty):
            for token, count in history.counts.items():
                yield row, token, -params.presence_penalty - count * params.frequency_penalty


def _biases(requests: Sequence[SamplingRequest]) -> Iterator[TokenValue]:
    for row, request in enumerate(requests):
        for token, bias in (request.params.logit_bias or {}).items():
            yield row, token, bias


def _forbidden(requests: Sequence[SamplingRequest]) -> Iterator[TokenValue]:
    for row, request in enumerate(requests):
        for token in request.forbidden:
            yield row, token, 0.0


def _columns(entries: Iterable[TokenValue], scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens, numbers = zip(*listed, strict=True) if (listed := list(entries)) else ((),) * 3
    device = scores.device
    return (
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(numbers, dtype=torch.float64, device=device),
    )


def _put(scores: Tensor, rows: Tensor, tokens: Tensor, new: Tensor) -> None:
    """Write logits. A penalty must not turn a finite logit into an infinite one."""
    old = scores[rows, tokens]
    scores[rows, tokens] = torch.where(
        old.isfinite(), new.clamp(-_LARGEST, _LARGEST).to(torch.float32), old
    )
