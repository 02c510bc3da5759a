"""Pooling of token vectors, as configured in sentence-transformers checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opweave_engine.embedding.pooling_params import PoolingParams
from opweave_engine.embedding.sentence_config import check_keys
from opweave_engine.errors import CheckpointError
from opweave_engine.loading.checkpoint import Checkpoint

_log = logging.getLogger(__name__)

_DEFAULTS = PoolingParams()
_MODULES, _PACKAGE = "modules.json", "sentence_transformers"
_PREFIX, _POOLING, _NORMALIZE = "pooling_mode_", "Pooling", "Normalize"
_KINDS = ("Transformer", _POOLING, _NORMALIZE)
_VECTOR = ("sentence_embedding",)
_NORMALIZE_KEYS = {"module_input_name": _VECTOR, "module_output_name": _VECTOR}
# Pooling mode -> its flag in older checkpoints; in the order of concatenation.
_MODES = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class Pooling:
    """Pools the hidden states of a text into one vector.

    Attributes:
        modes: one or more of ``cls`` (the first token), ``max``, ``mean``, ``mean_sqrt_len_tokens``
            (the sum divided by the square root of the length), ``weightedmean`` (with weights 1, 2,
            3, ...) and ``lasttoken``; the results are concatenated.
        normalizes: whether the vector is divided by its length.
    """

    modes: tuple[str, ...] = ("mean",)
    normalizes: bool = False

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Pooling:
        """Read ``modules.json`` and the files it names; without it, use the mean.

        Raises:
            CheckpointError: a file is damaged, or asks for unsupported pooling.
        """
        modules = checkpoint.json_list(_MODULES)
        if modules is None:
            return cls()
        modes: tuple[str, ...] = ()
        file = checkpoint.path / _MODULES
        kinds = [_kind(module) for module in modules]
        for kind, module in zip(kinds, modules, strict=True):
            if kind not in _KINDS:
                raise CheckpointError(
                    f"{file} has a module of type {kind!r}. Supported: {', '.join(_KINDS)}."
                )
            check_keys(module, file, {}, "idx", "name", "path", "type", "kwargs")
            path = str(module.get("path") or "")
            checkpoint.inside(path, _MODULES)
            if kind == _POOLING:
                modes = _modes(checkpoint, f"{path}/config.json")
            elif kind == _NORMALIZE:
                settings = checkpoint.json(f"{path}/config.json") if path else None
                check_keys(settings or {}, checkpoint.path / path / "config.json", _NORMALIZE_KEYS)
        order = [_KINDS.index(kind) for kind in kinds]
        if order != sorted(set(order)):
            raise CheckpointError(
                f"{file} has the modules {', '.join(kinds)}. Supported: {', '.join(_KINDS)}, in "
                "this order."
            )
        return cls(modes or cls.modes, _NORMALIZE in kinds)

    def __call__(self, hidden: Tensor, params: PoolingParams = _DEFAULTS) -> Tensor:
        """Return a vector from the hidden states of one text, ``(tokens, size)``.

        It has ``modes * size`` numbers, or the first *dimensions* of them.
        """
        # Sums over many tokens are taken in float32.
        states = hidden.float()
        pooled = torch.cat([_pool(states, mode) for mode in self.modes])
        pooled = pooled[: params.dimensions]
        normalizes = self.normalizes if params.normalize is None else params.normalize
        return functional.normalize(pooled, dim=0) if normalizes else pooled


def _kind(module: Mapping[str, Any]) -> str:
    """Return the class of a module; with its path, if it is not one of the library's."""
    path = str(module.get("type", ""))
    package, _, _ = path.partition(".")
    return path.rpartition(".")[2] if package == _PACKAGE else path


def _modes(checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
    config = checkpoint.json(name)
    if config is None:
        raise CheckpointError(f"{checkpoint.path} has no {name}, which modules.json names.")
    flags = [key for key in config if key.startswith(_PREFIX)]
    sizes = ("word_embedding_dimension", "embedding_dimension")
    check_keys(config, checkpoint.path / name, {}, "pooling_mode", "include_prompt", *sizes, *flags)
    if config.get("include_prompt") is False:
        _log.warning(
            "%s: include_prompt=False is not followed: the tokens of a prompt before the text are "
            "pooled, too",
            checkpoint.path / name,
        )
    given = config.get("pooling_mode")
    if given is not None:
        modes = given if isinstance(given, list) else [given]
    else:
        by_flag = {flag: mode for mode, flag in _MODES.items()}
        names = [key.removeprefix(_PREFIX) for key in flags if config[key] is True]
        modes = [by_flag.get(flag, flag) for flag in names]
    unknown = [mode for mode in modes if mode not in _MODES]
    if unknown or not modes:
        raise CheckpointError(
            f"{checkpoint.path / name} asks for pooling by {unknown or 'nothing'}. Supported: "
            f"{', '.join(_MODES)}."
        )
    return tuple(mode for mode in _MODES if mode in modes)


def _pool(states: Tensor, mode: str) -> Tensor:
    count = len(states)
    if mode in ("cls", "lasttoken"):
        return states[0 if mode == "cls" else -1]
    if mode == "max":
        return states.amax(0)
    if mode == "mean_sqrt_len_tokens":
        return states.sum(0) / float(count**0.5)
    weights = torch.ones(count, device=states.device)
    if mode == "weightedmean":
        weights = weights.cumsum(0)
    return (weights / weights.sum()) @ states
