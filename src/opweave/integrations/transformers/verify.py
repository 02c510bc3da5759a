"""Compare a way to run a model with the model's own forward, before it is used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from opweave import ir
from opweave.layers.mamba.states import SequenceStates, StateCache
from opweave.models.forward_context import ForwardContext, forward_context

# Relative to the largest logit. Rows of logits outside are counted: in 16 bits, a mixture of
# experts may route a token differently for a difference in the last bit.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_ROWS_OUTSIDE = {torch.float32: 0.0, torch.float16: 0.2, torch.bfloat16: 0.2}
_LENGTHS = (11, 6)
# Tokens of both sequences in each step: prompts, a chunk after a token, single tokens, a chunk.
_STEPS = ((7, 1), (1, 4), (1, 1), (2, 0))

Forward = Callable[[Tensor, Tensor], Tensor]


def sample_tokens(vocab_size: int, avoid: Collection[int], device: torch.device) -> list[Tensor]:
    """Return two sequences of token ids, without special ones."""
    generator = torch.Generator().manual_seed(vocab_size)
    ids = torch.tensor([token for token in range(min(vocab_size, 4096)) if token not in avoid])
    return [
        ids[torch.randint(len(ids), (length,), generator=generator)].to(device)
        for length in _LENGTHS
    ]


def difference(
    forward: Forward,
    logits_of: Callable[[Tensor], Tensor],
    tokens: Sequence[Tensor],
    expected: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    last_only: bool = False,
) -> str:
    """Return how the logits of packed sequences in several steps differ; "" if they do not.

    Args:
        forward: takes ids and positions ``(T,)`` of packed sequences, in a forward context.
        logits_of: hidden states to logits.
        tokens: two sequences.
        expected: the logits ``(T, vocab_size)`` of each.
        dtype: of the model.
        last_only: compare the last token of each sequence only. In models that are not causal, the
            logits of other tokens change with the tokens that follow.
    """
    attention, states, done = _Dense(), StateCache(2), [0, 0]
    found: list[list[Tensor]] = [[], []]
    for counts in _STEPS:
        present = [each for each in (0, 1) if counts[each]]
        parts = [slice(done[each], done[each] + counts[each]) for each in present]
        attention.sequences = [(each, counts[each]) for each in present]
        context = ForwardContext(
            attention,
            SequenceStates.of(
                [counts[each] for each in present],
                [done[each] for each in present],
                present,
                states,
                tokens[0].device,
            ),
        )
        ids = torch.cat([tokens[each][part] for each, part in zip(present, parts, strict=True)])
        positions = torch.cat([torch.arange(p.start, p.stop, device=ids.device) for p in parts])
        with forward_context(context):
            logits = logits_of(forward(ids, positions))
        sizes = [counts[each] for each in present]
        for each, rows in zip(present, torch.split_with_sizes(logits, sizes), strict=True):
            found[each].append(rows)
            done[each] += counts[each]
    compared = slice(-1 if last_only else 0, None)
    off = torch.cat(
        [
            _error(torch.cat(rows)[compared], wanted[compared])
            for rows, wanted in zip(found, expected, strict=True)
        ]
    )
    outside = (~(off <= _TOLERANCES[dtype])).double().mean().item()
    return "" if outside <= _ROWS_OUTSIDE[dtype] else f"its logits differ by {off.max():.2g}"


def _error(found: Tensor, expected: Tensor) -> Tensor:
    """Return the largest error of each row, relative to the largest logit of all."""
    found, expected = found.double(), expected.double()
    return (found - expected).abs().amax(-1) / expected.abs().amax().clamp(min=1e-6)


class _Dense:
    """Attention that keeps the keys and values of each sequence in one tensor."""

    def __init__(self) -> None:
        self.sequences: list[tuple[int, int]] = []  # of the current step, with the new tokens
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        counts = [count for _, count in self.sequences]
        found = []
        for (sequence, _), q, *new in zip(
            self.sequences,
            *(torch.split_with_sizes(each, counts) for each in (query, key, value)),
            strict=True,
        ):
            known = self._kept.get((layer, sequence))
            k, v = new if known is None else map(torch.cat, zip(known, new, strict=True))
            self._kept[layer, sequence] = k, v
            ends = [torch.tensor([0, len(each)], device=q.device) for each in (q, k)]
            found.append(ir.ops.varlen_attention(q, k, v, *ends, scale, True, window, soft_cap))
        return torch.cat(found)

    def attend_latent(self, *inputs: Any) -> Tensor:
        raise AssertionError("models of transformers expand latent attention themselves")
