"""The perplexity of a model over a text."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from opweave_engine.errors import InvalidArgumentError
from opweave_engine.load.checkpoint import Checkpoint, Progress
from opweave_engine.load.loader import as_language_model, load_model
from opweave_engine.tokenizer import Tokenizer

WINDOW = 512  # tokens


def token_ids(path: str | Path, text: str) -> list[int]:
    """Return the tokens of *text*.

    Raises:
        CheckpointError, TokenizerError: the tokenizer of the checkpoint *path* cannot be read.
        InvalidArgumentError: there are fewer than two tokens, so that none is predicted.
    """
    ids = Tokenizer(Checkpoint(path)).encode(text)
    if len(ids) < 2:
        raise InvalidArgumentError("the text for the perplexity has fewer than two tokens.")
    return ids


def perplexity(path: str | Path, text: str, *, progress: Progress | None = None) -> float:
    """Return the exponential of the mean negative log likelihood of the tokens of *text*.

    The text is cut into windows of ``WINDOW`` tokens, each of which is read by itself; their first
    tokens are not predicted.

    Args:
        path: of the checkpoint.
        text: at least two tokens.
        progress: called with the number of windows read so far and in total.

    Raises:
        CheckpointError, ModelError: the checkpoint is damaged or not supported.
        InvalidArgumentError: the text is too short.
    """
    ids = token_ids(path, text)
    model = as_language_model(load_model(path))
    size = min(WINDOW, model.max_positions or WINDOW)
    windows = [ids[at : at + size] for at in range(0, len(ids), size)]
    windows = [window for window in windows if len(window) > 1]
    total, count = 0.0, 0
    for done, window in enumerate(windows, start=1):
        tokens = torch.tensor(window, device=model.device)
        with torch.inference_mode():
            hidden = model(tokens, torch.arange(len(window), device=model.device))
            logits = model.compute_logits(hidden[:-1]).float()
        total += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
        count += len(window) - 1
        if progress is not None:
            progress(done, len(windows))
    return math.exp(total / count)
