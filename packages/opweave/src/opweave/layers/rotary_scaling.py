"""Scalings of rotary embedding, and the rotary parameters of a Hugging Face configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opweave.layers.registry import LayerArgumentError

# Scalings of rotary embedding to more positions than a model was trained on.
#
# A scaling defines the frequencies, the number of positions they cover, and a factor on cosines
# and sines.


@dataclass(frozen=True)
class Scaling:
    """No scaling: the frequencies ``theta ** (-2 * i / size)``.

    Source: Su et al., "RoFormer", arXiv:2104.09864.
    """

    @property
    def magnitude(self) -> float:
        """The factor on cosines and sines."""
        return 1.0

    def frequencies(self, size: int, theta: float) -> Tensor:
        """Return each pair's angle per position: ``(size / 2,)``, float32, on the CPU.

        Args:
            size: the number of rotated dimensions of a head.
            theta: the base of the frequencies.
        """
        return 1.0 / _powers(size, theta)

    def rows(self, max_positions: int) -> int:
        """Return the number of positions of a model with *max_positions* in its configuration."""
        return max_positions


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Divides all frequencies by *factor*.

    Source: Chen et al., "Extending Context Window via Positional Interpolation", arXiv:2306.15595.
    """

    factor: float

    def frequencies(self, size: int, theta: float) -> Tensor:
        return super().frequencies(size, theta) / self.factor

    def rows(self, max_positions: int) -> int:
        return int(max_positions * self.factor)


@dataclass(frozen=True)
class ProportionalScaling(Scaling):
    """Rotates only the fastest pairs, with the frequencies of the whole head, divided by *factor*.

    Args:
        factor: the divisor of the frequencies.
        share: the fraction of the pairs that are rotated.

    Source: transformers' rope type ``"proportional"``, used by Gemma 4.
    """

    factor: float
    share: float

    def frequencies(self, size: int, theta: float) -> Tensor:
        frequencies = super().frequencies(size, theta) / self.factor
        frequencies[int(self.share * size // 2) :] = 0.0
        return frequencies


@dataclass(frozen=True)
class DynamicNTKScaling(Scaling):
    """Increases the base for sequences that are longer than those in training.

    The base is that of the longest sequence, and fixed, because cached keys were rotated with it.
    Up to the length in training, nothing changes.

    Args:
        factor: the strength of the scaling.
        trained: the length in training.
        longest: the length of the longest sequence.

    Source: the NTK-aware scaling described in section 3.1 of YaRN, arXiv:2309.00071.
    """

    factor: float
    trained: int
    longest: int

    def frequencies(self, size: int, theta: float) -> Tensor:
        length = max(self.longest, self.trained)
        growth = self.factor * length / self.trained - (self.factor - 1)
        return super().frequencies(size, _grown(theta, growth, size))

    def rows(self, max_positions: int) -> int:
        return max(max_positions, self.longest)


@dataclass(frozen=True)
class AlphaNTKScaling(Scaling):
    """Increases the base by a given factor, as Hunyuan's models do.

    Source: the NTK-aware scaling described in section 3.1 of YaRN, arXiv:2309.00071.
    """

    alpha: float

    def frequencies(self, size: int, theta: float) -> Tensor:
        return super().frequencies(size, _grown(theta, self.alpha, size))


@dataclass(frozen=True)
class FixedNTKScaling(Scaling):
    """Divides slow frequencies more than fast ones, with a fixed factor.

    Args:
        factor: the factor by which the context grows.
        mixed: the exponent of mixed scaling; None: the base is multiplied by *factor*.

    Source: Su, "NTK-aware scaled RoPE", the rope type ``"ntk"`` of vLLM.
    """

    factor: float
    mixed: float | None = None

    def frequencies(self, size: int, theta: float) -> Tensor:
        if self.mixed is None:
            growth = float(self.factor ** (2 / size))
            return super().frequencies(size, theta * self.factor) / growth
        pairs = torch.arange(1, size // 2 + 1, dtype=torch.float32, device="cpu")
        exponents = math.log(self.factor) * (pairs / (size / 2)) ** self.mixed
        return super().frequencies(size, theta) / exponents.exp()


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Stretches long wavelengths by *factor*, keeps short ones, and interpolates between them.

    Wavelengths above ``original_max_positions / low_freq_factor`` are long, those below
    ``original_max_positions / high_freq_factor`` short.

    Source: The Llama 3 Herd of Models, arXiv:2407.21783.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def frequencies(self, size: int, theta: float) -> Tensor:
        inverse = super().frequencies(size, theta)
        turns = self.original_max_positions * inverse / (2 * math.pi)  # within the original context
        span = self.high_freq_factor - self.low_freq_factor
        keep = ((turns - self.low_freq_factor) / span).clamp(0.0, 1.0)
        return (1 - keep) * inverse / self.factor + keep * inverse


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """Stretches slow dimensions by *factor*, keeps fast ones, and uses a ramp between them.

    Args:
        factor: the factor by which the context grows.
        original_max_positions: the context length in training.
        beta_fast, beta_slow: the ramp goes from dimensions with *beta_fast* rotations in that
            context to those with *beta_slow* rotations.
        attention_factor: the magnitude; None: computed from the others.
        mscale, mscale_all_dim: DeepSeek's parameters: the magnitude is the quotient of the
            magnitudes for these two weights.
        truncate: round the ends of the ramp to whole dimensions.

    Source: Peng et al., "YaRN", arXiv:2309.00071; DeepSeek-V2, arXiv:2405.04434.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    def frequencies(self, size: int, theta: float) -> Tensor:
        powers = _powers(size, theta)
        low, high = (
            self._dimension(beta, size, theta) for beta in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        if low == high:
            high += 0.001  # a step
        places = torch.arange(size // 2, dtype=torch.float32, device="cpu")
        stretch = ((places - low) / (high - low)).clamp(0.0, 1.0)
        return stretch / (self.factor * powers) + (1 - stretch) / powers

    def _dimension(self, turns: float, size: int, theta: float) -> float:
        """Return the pair, as a real number, that rotates *turns* times in the original context."""
        wavelength = self.original_max_positions / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(theta))

    def rows(self, max_positions: int) -> int:
        return max(max_positions, int(self.original_max_positions * self.factor))


@dataclass(frozen=True)
class LongRopeScaling(Scaling):
    """Divides the frequency of each pair by its own factor: LongRoPE.

    The choice between the factors for short and for long sequences is made once, and does not
    depend on the batch, because cached keys were rotated with them.

    Args:
        factors: the divisors of the frequencies, one per pair.
        factor: the factor by which the context grows.
        original_max_positions: the context length in training.
        attention_factor: the magnitude; None: computed from *factor* and *original_max_positions*.

    Source: Ding et al., "LongRoPE", arXiv:2402.13753.
    """

    factors: tuple[float, ...]
    factor: float
    original_max_positions: int
    attention_factor: float | None = None

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))

    def frequencies(self, size: int, theta: float) -> Tensor:
        if len(self.factors) != size // 2:
            raise LayerArgumentError(
                f"longrope: {len(self.factors)} factors for {size} rotated dimensions; it takes "
                f"one for each pair, {size // 2}."
            )
        factors = torch.tensor(self.factors, dtype=torch.float32, device="cpu")
        return 1.0 / (factors * _powers(size, theta))


def _grown(theta: float, growth: float, size: int) -> float:
    """Return the base with which the slowest pair rotates *growth* times slower."""
    if size <= 2:
        raise LayerArgumentError(
            f"dynamic rotary scaling needs more than 2 rotated dimensions, found {size}."
        )
    return float(theta * growth ** (size / (size - 2)))


def _powers(size: int, theta: float) -> Tensor:
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    powers: Tensor = theta**exponents
    return powers


def cos_sin_table(frequencies: Tensor, rows: int, magnitude: float = 1.0) -> Tensor:
    """Return cosines and sines of the first positions: ``(rows, 2 * n)``, float32, on the CPU.

    Each row holds ``n`` cosines, then ``n`` sines.

    Args:
        frequencies: ``(n,)``, the angle per position.
        rows: the number of positions.
        magnitude: the factor on cosines and sines.
    """
    angles = torch.outer(torch.arange(rows, dtype=torch.float32, device="cpu"), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude


# Parse the rotary parameters of a Hugging Face configuration.


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
    value = parameters.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        raise LayerArgumentError(
            f"rope_parameters of type {kind!r}: {key} must be a positive number, found {value!r}."
        )
    return value


def flag(parameters: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a boolean.

    Raises:
        LayerArgumentError: it is not a boolean.
    """
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise LayerArgumentError(f"rope_parameters: {key} must be true or false, found {value!r}.")
    return value


def sections(parameters: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return ``mrope_section``, the number of pairs per axis, or None if it is missing or null.

    Raises:
        LayerArgumentError: it is not a list of integers.
    """
    section = parameters.get("mrope_section")
    if section is None:
        return None
    if not isinstance(section, list | tuple) or not all(type(size) is int for size in section):
        raise LayerArgumentError(
            f"rope_parameters: mrope_section must be a list of integers, found {section!r}."
        )
    return tuple(section)


def _number_or_none(parameters: Mapping[str, Any], key: str) -> float | None:
    return None if parameters.get(key) is None else number(parameters, key)


def _number_or(parameters: Mapping[str, Any], key: str, default: float) -> float:
    """Return a positive number; null and zero mean *default*, as in transformers."""
    value = parameters.get(key)
    absent = value is None or (value == 0 and value is not False)
    return default if absent else number(parameters, key)


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
    "default": lambda parameters, context: Scaling(),
    "dynamic": _dynamic,
    "linear": lambda parameters, context: LinearScaling(number(parameters, "factor")),
    "llama3": _llama3,
    "longrope": _longrope,
    "mrope": lambda parameters, context: Scaling(),
    "ntk": _ntk,
    "proportional": _proportional,
    "yarn": _yarn,
}
ROPE_TYPES = tuple(_READERS)
"""Supported values of ``rope_type``."""
