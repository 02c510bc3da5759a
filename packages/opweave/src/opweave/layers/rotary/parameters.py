"""Parse the rotary parameters of a Hugging Face configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opweave.layers.errors import LayerArgumentError
from opweave.layers.rotary.scaling import (
    AlphaNTKScaling,
    DynamicNTKScaling,
    FixedNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Scaling,
    YarnScaling,
)


@dataclass(frozen=True)
class RopeContext:
    """Inputs of a scaling other than its own parameters.

    Attributes:
        max_position: ``max_position_embeddings`` of the configuration.
        longest: the maximum sequence length.
    """

    max_position: int
    longest: int


def read_scaling(parameters: Mapping[str, Any], context: RopeContext) -> Scaling:
    """Return the scaling for ``rope_parameters`` (formerly ``rope_scaling``).

    Raises:
        LayerArgumentError: the type is unknown, or a parameter is missing or invalid.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _READERS:
        raise LayerArgumentError(
            f"rope_parameters: rope_type={kind!r} is not one of {', '.join(_READERS)}."
        )
    return _READERS[kind](parameters, context)


def number(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive number; required if there is no default.

    Raises:
        LayerArgumentError: it is missing, or is not a positive number.
    """
    found = parameters.get(key)
    if found is None:
        found = default
    if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        raise LayerArgumentError(
            f"rope_parameters of type {kind!r}: {key} must be a positive number, found {found!r}."
        )
    return found


def flag(parameters: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a boolean.

    Raises:
        LayerArgumentError: it is not a boolean.
    """
    found = parameters.get(key, default)
    if not isinstance(found, bool):
        raise LayerArgumentError(f"rope_parameters: {key} must be true or false, found {found!r}.")
    return found


def sections(parameters: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return ``mrope_section``, the number of pairs per axis, or None if it is missing or null.

    Raises:
        LayerArgumentError: it is not a list of integers.
    """
    found = parameters.get("mrope_section")
    if found is None:
        return None
    if not isinstance(found, list | tuple) or not all(type(size) is int for size in found):
        raise LayerArgumentError(
            f"rope_parameters: mrope_section must be a list of integers, found {found!r}."
        )
    return tuple(found)


def _number_or_none(parameters: Mapping[str, Any], key: str) -> float | None:
    return None if parameters.get(key) is None else number(parameters, key)


def _number_or(parameters: Mapping[str, Any], key: str, default: float) -> float:
    """Return a positive number; null and zero mean *default*, as in transformers."""
    found = parameters.get(key)
    absent = found is None or (found == 0 and found is not False)
    return default if absent else number(parameters, key)


def _default(parameters: Mapping[str, Any], context: RopeContext) -> Scaling:
    return Scaling()


def _linear(parameters: Mapping[str, Any], context: RopeContext) -> Scaling:
    return LinearScaling(number(parameters, "factor"))


def _proportional(parameters: Mapping[str, Any], context: RopeContext) -> Scaling:
    return ProportionalScaling(
        _number_or(parameters, "factor", 1.0), number(parameters, "partial_rotary_factor", 1.0)
    )


def _dynamic(parameters: Mapping[str, Any], context: RopeContext) -> Scaling:
    if "alpha" in parameters:
        return AlphaNTKScaling(number(parameters, "alpha"))
    trained = int(number(parameters, "max_trained_positions", context.max_position))
    longest = max(context.longest, context.max_position)
    return DynamicNTKScaling(number(parameters, "factor"), trained, longest)


def _ntk(parameters: Mapping[str, Any], context: RopeContext) -> Scaling:
    return FixedNTKScaling(number(parameters, "factor"), _number_or_none(parameters, "mixed_b"))


def _original(parameters: Mapping[str, Any], context: RopeContext) -> int:
    return int(number(parameters, "original_max_position_embeddings", context.max_position))


def _llama3(parameters: Mapping[str, Any], context: RopeContext) -> Scaling:
    low, high = number(parameters, "low_freq_factor"), number(parameters, "high_freq_factor")
    if not low < high:
        raise LayerArgumentError(
            f"rope_parameters of type 'llama3': low_freq_factor={low} must be less than "
            f"high_freq_factor={high}."
        )
    factor = number(parameters, "factor")
    return Llama3Scaling(factor, low, high, _original(parameters, context))


def _yarn(parameters: Mapping[str, Any], context: RopeContext) -> Scaling:
    original = int(number(parameters, "original_max_position_embeddings"))
    return YarnScaling(
        number(parameters, "factor", context.max_position / original),
        original,
        _number_or(parameters, "beta_fast", 32.0),
        _number_or(parameters, "beta_slow", 1.0),
        _number_or_none(parameters, "attention_factor"),
        _number_or(parameters, "mscale", 0.0),
        _number_or(parameters, "mscale_all_dim", 0.0),
        flag(parameters, "truncate", True),
    )


def _deepseek_yarn(parameters: Mapping[str, Any], context: RopeContext) -> Scaling:
    """YaRN whose magnitude is the quotient of those for the two weights, 1 and 0 by default."""
    factor = number(parameters, "factor")
    log = math.log(max(factor, 1.0)) / 10
    weights = (parameters.get("mscale", 1.0), parameters.get("mscale_all_dim", 0.0))
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise LayerArgumentError(
                f"rope_parameters of type 'deepseek_yarn': mscale and mscale_all_dim must be "
                f"numbers, found {weight!r}."
            )
    magnitude, all_dim = (weight * log + 1 for weight in weights)
    return YarnScaling(
        factor,
        int(number(parameters, "original_max_position_embeddings")),
        _number_or(parameters, "beta_fast", 32.0),
        _number_or(parameters, "beta_slow", 1.0),
        magnitude / all_dim,
    )


def _longrope(parameters: Mapping[str, Any], context: RopeContext) -> Scaling:
    original = _original(parameters, context)
    length = "long" if context.longest > original else "short"
    factors = parameters.get(f"{length}_factor")
    if not isinstance(factors, list | tuple):
        raise LayerArgumentError(
            f"rope_parameters of type 'longrope': {length}_factor must be a list of numbers, found "
            f"{factors!r}."
        )
    return LongRopeScaling(
        tuple(factors),
        number(parameters, "factor", context.max_position / original),
        original,
        _number_or_none(parameters, f"{length}_mscale")
        or _number_or_none(parameters, "attention_factor"),
    )


_READERS: dict[str, Callable[[Mapping[str, Any], RopeContext], Scaling]] = {
    "deepseek_llama_scaling": _deepseek_yarn,
    "deepseek_yarn": _deepseek_yarn,
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "mrope": _default,
    "ntk": _ntk,
    "proportional": _proportional,
    "yarn": _yarn,
}
ROPE_TYPES = tuple(_READERS)
"""Supported values of ``rope_type``."""
