"""Load a causal language model with transformers' own code, strictly."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from opweave.integrations.transformers.model import TransformersModel
from opweave.ir.errors import described
from opweave.models.errors import InvalidConfigError, WeightsError

_SHOWN = 10  # names in an error


def is_available() -> bool:
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def is_causal_lm(architecture: str) -> bool:
    """Whether transformers has a causal language model of that name, as in ``config.json``."""
    if not is_available():
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def load_transformers_model(
    path: Path, config: Mapping[str, Any], dtype: torch.dtype, *, seed: int | None = None
) -> TransformersModel:
    """Build the model that directory *path* holds, and load its weights.

    Args:
        path: with ``config.json`` and safetensors files.
        config: the object in ``config.json``.
        dtype: of weights and activations.
        seed: make weights up: small random numbers. None: load the checkpoint's.

    Raises:
        InvalidConfigError: transformers refuses the configuration.
        UnsupportedModelError: the checkpoint is quantised, or the model cannot run in the engine.
        WeightsError: tensors are missing, unexpected or do not fit.
    """
    import transformers

    (architecture,) = config["architectures"]
    model_class: Any = getattr(transformers, architecture)
    with _quiet():
        try:
            typed = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
            if seed is not None:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    model = model_class._from_config(typed, dtype=dtype)
        except Exception as error:  # of any kind, for values that do not fit
            raise InvalidConfigError(
                f"transformers refuses {path / 'config.json'}: {described(error)}"
            ) from error
        if seed is None:
            model = _loaded(model_class, path, typed, dtype)
        return TransformersModel(model.eval())


def _loaded(model_class: Any, path: Path, config: Any, dtype: torch.dtype) -> Any:
    try:
        model, loaded = model_class.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to name them
        )
    except Exception as error:
        raise WeightsError(f"transformers cannot load {path}: {described(error)}") from error
    problems = {
        "missing": loaded["missing_keys"],
        "unexpected": loaded["unexpected_keys"],
        "do not fit": loaded["mismatched_keys"],
    }
    lines = [f"{len(names)} {kind}: {_some(names)}" for kind, names in problems.items() if names]
    if lines:
        raise WeightsError(f"The checkpoint's tensors do not fit the model. {'; '.join(lines)}.")
    return model


def _some(names: Any) -> str:
    shown = sorted(str(name[0] if isinstance(name, tuple) else name) for name in names)
    rest = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing a report and progress bars: errors say the same."""
    from transformers.utils import logging

    their_log: Any = logging

    level, bars = their_log.get_verbosity(), their_log.is_progress_bar_enabled()
    their_log.set_verbosity_error()
    their_log.disable_progress_bar()
    try:
        yield
    finally:
        their_log.set_verbosity(level)
        if bars:
            their_log.enable_progress_bar()
