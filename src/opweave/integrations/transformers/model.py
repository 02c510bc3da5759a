"""A causal transformers model with the engine's interface of models."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor

from opweave.integrations.optimize import optimize
from opweave.integrations.transformers import verify
from opweave.integrations.transformers.base_model import Halves
from opweave.integrations.transformers.errors import NotSuitableError
from opweave.integrations.transformers.packed import PackedSequences
from opweave.integrations.transformers.sequences import CachedSequences, RecomputedSequences
from opweave.integrations.transformers.sharding import shard
from opweave.ir.errors import described
from opweave.layers.parallel import current_tensor_parallel
from opweave.models.errors import UnsupportedModelError
from opweave.models.language_model import LanguageModel

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
            self.vocab_size = expected[0].shape[-1]
            shard(causal_lm, current_tensor_parallel())
            self.report = optimize(causal_lm)
            self.sequences, slower = _choose(halves, tokens, expected, self.dtype)
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
    halves: Halves, tokens: list[Tensor], expected: list[Tensor], dtype: torch.dtype
) -> tuple[Sequences, str]:
    """Return the fastest way to run a model that gives *expected*, and why not a faster one.

    Raises:
        UnsupportedModelError: none does.
    """
    reasons: list[str] = []
    for kind in (PackedSequences, CachedSequences, RecomputedSequences):
        try:
            with ExitStack() as undo:
                sequences = kind.of(halves, tokens[0], undo)
                reason = verify.difference(
                    sequences,
                    halves.logits,
                    tokens,
                    expected,
                    dtype,
                    last_only=kind is RecomputedSequences,
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


def _special_tokens(config: Any) -> set[int]:
    """Return the ids that a configuration names, which models may treat specially."""
    found = set()
    for name, value in config.to_dict().items():
        if name.endswith(("_token_id", "_token_index")):
            with suppress(TypeError):
                found |= set(value) if isinstance(value, list) else {value}
    return found
