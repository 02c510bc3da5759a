"""Runs a checkpoint's model for ``opweave explain``, ``record`` and ``tune``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from opweave.cli.companions import Progress
from opweave.config import EngineConfig, SchedulerConfig
from opweave.config.engine import LoadFormat
from opweave_engine import LLM, SamplingParams
from opweave_engine.load.checkpoint import Checkpoint
from opweave_engine.load.loader import as_language_model, load_model
from opweave_engine.prompts import PromptReader
from opweave_engine.tokenizer import Tokenizer


def tokens(model: Path, prompt: str) -> list[int]:
    """Return the token ids of *prompt*, encoded by the model's tokenizer."""
    return Tokenizer(Checkpoint(model)).encode(prompt)


def module(
    model: Path, prompt: str, *, dtype: str, progress: Progress
) -> tuple[torch.nn.Module, list[int], torch.dtype]:
    """Return the model as a module, the tokens of *prompt*, and the dtype of the weights."""
    tokenizer = Tokenizer(Checkpoint(model))
    loaded = as_language_model(load_model(model, dtype=dtype, progress=progress))
    reader = PromptReader(tokenizer, loaded.vocab_size, loaded.max_positions or sys.maxsize)
    return loaded, reader.tokens(prompt), loaded.dtype


def generator(
    model: Path,
    *,
    dtype: str,
    load_format: str = "auto",
    max_length: int | None = None,
    progress: Progress,
) -> Callable[[str | list[int], int, Progress | None], object]:
    """Return a function that generates greedily from a prompt."""
    scheduler = SchedulerConfig()
    if max_length is not None:
        scheduler = SchedulerConfig(
            max_num_seqs=1, max_num_batched_tokens=max_length, max_model_len=max_length
        )
    config = EngineConfig(
        dtype=dtype, load_format=cast("LoadFormat", load_format), scheduler=scheduler
    )
    llm = LLM(model, config=config, progress=progress)

    def generate(
        prompt: str | list[int], max_tokens: int, progress: Progress | None = None
    ) -> object:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return llm.generate(prompt, sampling, progress=progress)

    return generate
