"""A causal transformers model with the engine's interface of models."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor

from opweave.ir.errors import described
from opweave.layers.parallel import current_tensor_parallel
from opweave.optimization import optimize
from opweave_engine.models.errors import UnsupportedModelError
from opweave_engine.models.language_model import LanguageModel
from opweave_engine.transformers import verify
from opweave_engine.transformers.base_model import Halves, ropes_by_length
from opweave_engine.transformers.errors import NotSuitableError
from opweave_engine.transformers.packed import PackedSequences
from opweave_engine.transformers.sequences import CachedSequences, RecomputedSequences
from opweave_engine.transformers.sharding import shard

_log = logging.getLogger(__name__)


class TransformersModel(LanguageModel):
    """A causal language model of transformers with loaded weights; on several ranks, a part of it.

    The fastest of three ways to run it is chosen whose logits agree with those of the model's own
    forward: packed sequences with a paged cache; one sequence at a time, with the model's own
    cache; or without any cache.

    Args:
        causal_lm: the model, in evaluation mode.

    Attributes:
        config: its configuration.
        report: which modules run opweave's ops.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.config = causal_lm.config
        self.dtype = causal_lm.dtype
        text = causal_lm.config.get_text_config(decoder=True)
        positions = getattr(text, "max_position_embeddings", None)
        self.max_positions = positions if positions and positions > 0 else None  # XLNet has -1
        causal_lm.requires_grad_(False)
        tokens = verify.sample_tokens(text.vocab_size, _special_tokens(text), causal_lm.device)
        with torch.inference_mode():
            halves, first = Halves.of(causal_lm, tokens[0])
            expected = [first, Halves.of(causal_lm, tokens[1])[1]]
            # Of generations that pass the length at which the rope changes; others need no check.
            by_length = ropes_by_length(text)
            generated = _generated(causal_lm, tokens[0]) if "longrope" in by_length else None
            self.vocab_size = expected[0].shape[-1]
            shard(causal_lm, current_tensor_parallel())
            self.report = optimize(causal_lm)
            self.sequences, slower = _choose(halves, tokens, expected, generated, self.dtype)
        self.needs_whole_prompts = bool(by_length) or type(self.sequences) is RecomputedSequences
        name = type(causal_lm).__name__
        if slower:
            _log.warning("%s runs %s; %s", name, self.sequences.description, slower)
        else:
            _log.info("%s runs %s", name, self.sequences.description)

    @property
    def halves(self) -> Halves:
        """The model of transformers."""
        return self.sequences.halves

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.sequences(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.halves.logits(hidden)


Sequences = PackedSequences | RecomputedSequences


def _choose(
    halves: Halves,
    tokens: list[Tensor],
    expected: list[Tensor],
    generated: list[Tensor] | None,
    dtype: torch.dtype,
) -> tuple[Sequences, str]:
    """Return the fastest way to run a model that gives *expected*, and why not a faster one.

    *generated* are the logits of ``verify.generated_logits``, to be given, too.

    Raises:
        UnsupportedModelError: none does.
    """
    reasons: list[str] = []
    for kind in (PackedSequences, CachedSequences, RecomputedSequences):
        try:
            with ExitStack() as undo:
                sequences = kind.of(halves, tokens[0], undo)
                # Without a cache, models need not be causal: then, the logits of other tokens than
                # the last one change with the tokens that follow.
                compared = slice(-1 if kind is RecomputedSequences else 0, None)
                logits = [rows[compared] for rows in expected]
                reason = verify.difference(sequences, halves.logits, tokens, logits, dtype)
                if not reason and generated is not None:
                    reason = verify.generation_difference(
                        sequences,
                        halves.logits,
                        halves.causal_lm.config,
                        tokens[0],
                        generated,
                        dtype,
                    )
                if not reason:
                    undo.pop_all()
                    return sequences, "; ".join(reasons)
        except NotSuitableError as error:
            reason = str(error)
        # Code of the model, which may fail in any way.
        except Exception as error:
            reason = f"it fails ({described(error)})"
        reasons.append(f"not {kind.description}: {reason}")
    raise UnsupportedModelError(
        f"{type(halves.causal_lm).__name__} cannot run in the engine: {'; '.join(reasons)}."
    )


def _generated(causal_lm: Any, tokens: Tensor) -> list[Tensor]:
    """Return ``verify.generated_logits``.

    Raises:
        UnsupportedModelError: transformers cannot generate with the model.
    """
    try:
        return verify.generated_logits(causal_lm, tokens)
    except Exception as error:  # code of the model, which may fail in any way
        raise UnsupportedModelError(
            f"{type(causal_lm).__name__} cannot run in the engine: its rope depends on the length "
            f"of a sequence, and transformers' generate fails ({described(error)})."
        ) from error


def _special_tokens(config: Any) -> set[int]:
    """Return the ids that a configuration names, which models may treat specially."""
    found = set()
    for name, value in config.to_dict().items():
        if name.endswith(("_token_id", "_token_index")):
            with suppress(TypeError):
                found |= set(value) if isinstance(value, list) else {value}
    return found
