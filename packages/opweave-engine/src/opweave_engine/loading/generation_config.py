"""Sampling defaults from ``generation_config.json``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from opweave_engine.errors import CheckpointError, SamplingParamsError
from opweave_engine.loading.checkpoint import Checkpoint
from opweave_engine.sampling.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

FILE = "generation_config.json"
# "vllm" is what vLLM calls its own defaults.
_OFF = ("none", "vllm")
# The names in the file, and those of SamplingParams.
_FOLLOWED = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
# Other fields that change what transformers generates, and the values that do not.
_NOT_FOLLOWED: Mapping[str, tuple[object, ...]] = {
    "do_sample": (True,),
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
}


def generation_folder(checkpoint: Checkpoint, source: str) -> Checkpoint:
    """Return the directory whose ``generation_config.json`` counts.

    Args:
        checkpoint: of the model.
        source: ``EngineConfig.generation_config``.

    Raises:
        CheckpointError: *source* is not a directory with that file.
    """
    if source == "auto" or source in _OFF:
        return checkpoint
    folder = Checkpoint(source)
    if folder.json(FILE) is None:
        raise CheckpointError(
            f"generation_config={source!r} has no {FILE}. Give a directory that has it, 'auto' for "
            "the checkpoint's, or 'none'."
        )
    return folder


def sampling_defaults(checkpoint: Checkpoint, source: str = "auto") -> dict[str, Any]:
    """Return the sampling parameters that ``generation_config.json`` sets, by their name.

    Args:
        checkpoint: of the model.
        source: ``"auto"`` for the file in *checkpoint*, ``"none"`` for no defaults, or a directory
            with another such file.

    Raises:
        CheckpointError: the file is damaged or missing, or a value is out of range.
    """
    if source in _OFF:
        return {}
    folder = generation_folder(checkpoint, source)
    fields = folder.json(FILE) or {}
    given = {
        ours: fields[theirs] for theirs, ours in _FOLLOWED.items() if fields.get(theirs) is not None
    }
    try:
        SamplingParams(**given)
    except SamplingParamsError as error:
        raise CheckpointError(
            f"{folder.path / FILE} has a wrong value: {error} Correct it, or do without the file's "
            "defaults (--generation-config none)."
        ) from error
    return given


def log_defaults(checkpoint: Checkpoint, source: str, defaults: Mapping[str, Any]) -> None:
    """Log the sampling defaults, and what ``generation_config.json`` asks for in vain."""
    if source in _OFF:
        return
    folder = generation_folder(checkpoint, source)
    # Defaults of SamplingParams change nothing.
    neutral = SamplingParams()
    changed = {k: v for k, v in defaults.items() if v != getattr(neutral, k)}
    if changed:
        _log.warning(
            "sampling defaults from %s: %s; requests override them, and "
            "generation_config='none' (--generation-config none) disables them",
            folder.path / FILE, _listed(changed),
        )  # fmt: skip
    fields = folder.json(FILE) or {}
    ignored = {
        name: fields[name]
        for name, neutral_values in _NOT_FOLLOWED.items()
        if fields.get(name) is not None and fields[name] not in neutral_values
    }
    if ignored:
        _log.warning("%s: not followed: %s", folder.path / FILE, _listed(ignored))


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
