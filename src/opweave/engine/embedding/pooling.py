"""Pooling of token vectors, as configured in sentence-transformers checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from opweave.engine.embedding.pooling_params import PoolingParams
from opweave.engine.errors import CheckpointError
from opweave.engine.loading.checkpoint import Checkpoint

_DEFAULTS = PoolingParams()
_PREFIX, _NORMALIZE = "pooling_mode_", "Normalize"
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
        modules = checkpoint.json_list("modules.json")
        if modules is None:
            return cls()
        modes: tuple[str, ...] = ()
        normalizes = False
        for module in modules:
            kind = str(module.get("type", "")).rpartition(".")[2]
            if kind == "Pooling":
                modes = _modes(checkpoint, f"{module.get('path', '')}/config.json")
            elif kind == _NORMALIZE:
                normalizes = True
            elif kind != "Transformer":
                raise CheckpointError(
                    f"{checkpoint.path / 'modules.json'} has a module of type {kind!r}. Supported: "
                    f"Transformer, Pooling, {_NORMALIZE}."
                )
        return cls(modes or cls.modes, normalizes)

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


def _modes(checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
    config = checkpoint.json(name)
    if config is None:
        raise CheckpointError(f"{checkpoint.path} has no {name}, which modules.json names.")
    given = config.get("pooling_mode")
    if given is not None:
        modes = given if isinstance(given, list) else [given]
    else:
        by_flag = {flag: mode for mode, flag in _MODES.items()}
        flags = [
            key.removeprefix(_PREFIX)
            for key, value in config.items()
            if key.startswith(_PREFIX) and value is True
        ]
        modes = [by_flag.get(flag, flag) for flag in flags]
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
