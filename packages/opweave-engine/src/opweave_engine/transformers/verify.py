"""Compare a way to run a model with the model's own forward, before it is used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from opweave import ir
from opweave.layers.mamba_states import SequenceStates, StateCache
from opweave_engine.models.forward_context import ForwardContext, forward_context

# Relative to the largest logit. Rows of logits outside are counted: in 16 bits, a mixture of
# experts may route a token differently for a difference in the last bit.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_ROWS_OUTSIDE = {torch.float32: 0.0, torch.float16: 0.2, torch.bfloat16: 0.2}
_LENGTHS = (11, 6)
# Tokens of both sequences in each step: prompts, a chunk after a token, single tokens, a chunk.
_STEPS = ((7, 1), (1, 4), (1, 1), (2, 0))
# The same as generation: a prompt that passes _SWITCH tokens later, and one that is longer already.
_GENERATION_STEPS = ((7, 10), (1, 0), (1, 1), (1, 0), (1, 0))
_SWITCH = 8

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
    steps: Sequence[tuple[int, int]] = _STEPS,
) -> str:
    """Return how the logits of packed sequences in several steps differ; "" if they do not.

    Args:
        forward: takes ids and positions ``(T,)`` of packed sequences, in a forward context.
        logits_of: hidden states to logits.
        tokens: two sequences.
        expected: the logits ``(n, vocab_size)`` of the last tokens of each.
        dtype: of the model.
        steps: the number of tokens of both in each step.
    """
    attention, states, done = _Dense(), StateCache(2), [0, 0]
    found: list[list[Tensor]] = [[], []]
    for counts in steps:
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
    off = torch.cat(
        [
            _error(torch.cat(rows)[-len(wanted) :], wanted)
            for rows, wanted in zip(found, expected, strict=True)
        ]
    )
    outside = (~(off <= _TOLERANCES[dtype])).double().mean().item()
    return "" if outside <= _ROWS_OUTSIDE[dtype] else f"its logits differ by {off.max():.2g}"


def generated_logits(causal_lm: Any, tokens: Tensor) -> list[Tensor]:
    """Return the logits of two generations of *tokens* by transformers' ``generate``.

    The first has a prompt below the length at which the model's rope changes, which is lowered; the
    second has a longer one. :func:`generation_difference` runs the same two.

    Args:
        causal_lm: a model whose rope depends on the length of a sequence.
        tokens: a sequence, to be generated.
    """
    import transformers

    library: Any = transformers  # without types

    class Forced(library.LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            forced = torch.full_like(scores, -torch.inf)
            forced[:, tokens[min(input_ids.shape[1], len(tokens) - 1)]] = 0.0
            return forced

    logits = []
    for prompt in _GENERATION_STEPS[0]:
        count = len(tokens) - prompt + 1  # the last token's logits, too
        config = library.GenerationConfig(
            max_new_tokens=count, do_sample=False, num_beams=1, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        with _lowered_switch(causal_lm.config):
            output = causal_lm.generate(
                tokens[None, :prompt],
                attention_mask=torch.ones_like(tokens[None, :prompt]),
                generation_config=config,
                logits_processor=library.LogitsProcessorList([Forced()]),
            )
        logits.append(torch.cat(output.logits))
    return logits


def generation_difference(
    forward: Forward,
    logits_of: Callable[[Tensor], Tensor],
    config: Any,
    tokens: Tensor,
    expected: Sequence[Tensor],
    dtype: torch.dtype,
) -> str:
    """Return how the logits of two generations of *tokens* differ; "" if they do not.

    Args:
        forward, logits_of, dtype: as for :func:`difference`.
        config: of the model.
        tokens: a sequence.
        expected: of :func:`generated_logits`.
    """
    with _lowered_switch(config):
        return difference(
            forward, logits_of, [tokens, tokens], expected, dtype, steps=_GENERATION_STEPS
        )


@contextmanager
def _lowered_switch(config: Any) -> Iterator[None]:
    """Let ropes that depend on the length change after _SWITCH tokens, for a quick check."""
    key, text = "original_max_position_embeddings", config.get_text_config(decoder=True)
    ropes = [text.rope_parameters, *text.rope_parameters.values()]
    places = [vars(config), vars(text), *(rope for rope in ropes if isinstance(rope, dict))]
    before = [(place, place[key]) for place in places if isinstance(place.get(key), int)]
    for place, _ in before:
        place[key] = _SWITCH
    try:
        yield
    finally:
        for place, value in before:
            place[key] = value


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
