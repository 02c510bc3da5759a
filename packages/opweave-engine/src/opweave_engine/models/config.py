"""Configurations of models, read from a checkpoint's ``config.json``."""

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from opweave.errors import shown
from opweave.ir.errors import OpweaveError, UnknownError
from opweave.layers import get_act_and_mul_fn, get_act_fn, rotary_scaling
from opweave.layers.registry import LayerArgumentError

# Errors of model configurations.


class ModelError(OpweaveError):
    """Base class of the errors of :mod:`opweave_engine.models`."""


class InvalidConfigError(ModelError, ValueError):
    """A value in a checkpoint's ``config.json`` is missing, of the wrong type, or impossible."""


class UnsupportedModelError(UnknownError, ModelError, ValueError):
    """The configuration has an unsupported architecture or feature."""


class WeightsError(ModelError, ValueError):
    """A checkpoint's tensors are missing, unexpected, or have the wrong shape."""


class DuplicateModelError(ModelError, ValueError):
    """An architecture already has a model."""


class InvalidModelError(ModelError, TypeError):
    """A registered model cannot be imported, or is not a model."""


# Typed access to the JSON object of a ``config.json``.


T = TypeVar("T")

_log = logging.getLogger(__name__)

_COUNT = "a positive integer below 2**63"  # torch's sizes are int64
_NATURAL = "an integer from 0, below 2**63"
_NUMBER = "a finite positive number"


class Fields:
    """A JSON object whose values are checked when they are read.

    A missing or null key takes the default; without a default it is an error. *name* is the name of
    the object in error messages.
    """

    def __init__(self, values: object, name: str = "config.json") -> None:
        if not isinstance(values, Mapping):
            raise InvalidConfigError(f"{name} must hold a JSON object, not {shown(values)}.")
        self.values, self.name = values, name

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        return self._integer(key, default, 1, _COUNT)

    def size(self, key: str, default: int | None) -> int:
        """Return a positive integer; an absent key takes the default, and null is an error."""
        return self.count(key, None if key in self.values else default)

    def natural(self, key: str, default: int | None = None) -> int:
        """Return an integer from 0."""
        return self._integer(key, default, 0, _NATURAL)

    def _integer(self, key: str, default: int | None, least: int, kind: str) -> int:
        value: int = self._value(key, default, kind, int)
        if not least <= value < 2**63:
            raise self.wrong(key, value, kind)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._value(key, default, _NUMBER, int, float)
        if not 0 < value <= sys.float_info.max:
            raise self.wrong(key, value, _NUMBER)
        return float(value)

    def optional_number(self, key: str, default: None = None) -> float | None:
        """Return a positive number, or None if the key is absent."""
        return self.number(key) if key in self else default

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value: bool = self._value(key, default, "true or false", bool)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value: str = self._value(key, default, "a string", str)
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings; empty if the key is absent."""
        kind = "a list of strings"
        value = self._value(key, [], kind, list)
        if not all(isinstance(item, str) for item in value):
            raise self.wrong(key, value, kind)
        return [*value]

    def nested(self, key: str) -> Self:
        """Return a nested JSON object; empty if the key is absent."""
        return type(self)(self._value(key, {}, "an object"), f"{key!r} in {self.name}")

    def is_null(self, key: str) -> bool:
        """Return whether the value of *key* is null, which an absent key is not."""
        return key in self.values and self.values[key] is None

    def dtype(self) -> str | None:
        """Return the name of the checkpoint's dtype; None if it does not say."""
        key = "dtype" if "dtype" in self else "torch_dtype"
        return self.text(key).removeprefix("torch.") if key in self else None

    def require(self, key: str, value: T, *supported: T) -> T:
        """Return *value* if it is supported; say what is, if not."""
        if value not in supported:
            raise UnsupportedModelError(
                f"{self.name} has {key!r}: {shown(value)}, which is not supported. "
                f"Supported: {', '.join(map(str, supported))}."
            )
        return value

    def require_multiple(self, key: str, value: int, of: str, divisor: int) -> None:
        """Raise InvalidConfigError unless the *value* of *key* is a multiple of that of *of*."""
        if value % divisor:
            raise InvalidConfigError(
                f"{self.name} has {key!r}: {value}, which is not a multiple of {of!r}: {divisor}."
            )

    def require_finite(self) -> None:
        """Raise InvalidConfigError if a number, in a list too, is not a finite float."""
        for key, value in self.values.items():
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int | float) and not abs(number) <= sys.float_info.max:
                    raise self.wrong(key, value, "finite")

    def warn_unread(self, *read: str) -> None:
        """Log the keys, other than null ones, that are not in *read*: they have no effect."""
        unread = sorted(str(key) for key in self.values if key in self and key not in read)
        if unread:
            _log.warning("%s: unknown keys are ignored: %s", self.name, shown(", ".join(unread)))

    def refuse_quantized(self) -> None:
        """Raise UnsupportedModelError if the checkpoint is quantized."""
        key = "quantization_config"
        value = self.values.get(key)
        if value in (None, {}):
            return
        method = value.get("quant_method") if isinstance(value, Mapping) else value
        raise UnsupportedModelError(
            f"{self.name} has {key!r}: quantized checkpoints (quant_method {shown(method)}) are "
            "not supported; use unquantized weights."
        )

    def _value(self, key: str, default: object, kind: str, *types: type) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise InvalidConfigError(f"{self.name} lacks {key!r}; it must be {kind}.")
        is_other = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        if types and is_other:
            raise self.wrong(key, value, kind)
        return value

    def wrong(self, key: str, value: object, kind: str) -> InvalidConfigError:
        """Return the error for the *value* of *key*, which must be *kind*."""
        return InvalidConfigError(f"{self.name} has {key!r}: {shown(value)}; it must be {kind}.")


# Configurations as dataclasses, whose fields say how their keys are read.


_LIKE_ABSENT = object()


def key(read: Callable[..., Any], default: object = None, *, null: object = _LIKE_ABSENT) -> Any:
    """Declare a field of a :class:`ModelConfig` that has the name of its key in ``config.json``.

    Args:
        read: a method of :class:`Fields`, or a function with the same arguments.
        default: the value of an absent key; None: it is an error.
        null: the value of null; by default, what *read* takes it for.
    """
    return dataclasses.field(metadata={"read": (read, default, null)})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Base class of configurations. Keys that are absent mean the same as in transformers.

    Attributes:
        dtype: the name of the checkpoint's dtype; None if it does not say.
    """

    dtype: str | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Read the object in a ``config.json``, as transformers 4 or 5 writes it.

        Raises:
            UnsupportedModelError: an architecture, activation, rope, quantization or another
                feature that is not supported; the message lists the supported ones.
            InvalidConfigError: a value is missing, of the wrong type, or does not fit the others.
        """
        fields = Fields(config)
        fields.refuse_quantized()
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        """Read the object in a ``config.json``, which is not quantized; see :meth:`from_hf`."""
        return cls.read(fields)

    @classmethod
    def read(
        cls, fields: Fields, defaults: Mapping[str, Any] = MappingProxyType({}), **values: Any
    ) -> Self:
        """Read the keys of all fields but those in *values*.

        Args:
            fields: the object in ``config.json``.
            defaults: the values of absent keys, in place of those that fields declare.
            values: fields that are not a key of their own.
        """
        for field in dataclasses.fields(cls):
            name = field.name
            if name in values or "read" not in field.metadata:
                continue
            read, default, null = field.metadata["read"]
            if null is not _LIKE_ABSENT and fields.is_null(name):
                values[name] = null
            else:
                values[name] = read(fields, name, defaults.get(name, default))
        return cls(**values, dtype=fields.dtype())


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """The common part of the configurations of decoders. Sizes are named as in ``config.json``.

    Attributes:
        rope: ``rope_parameters``, including ``rope_theta``.
    """

    vocab_size: int = key(Fields.size)
    hidden_size: int = key(Fields.size, 4096)
    intermediate_size: int = key(Fields.size)
    num_hidden_layers: int = key(Fields.size, 32)
    num_attention_heads: int = key(Fields.size, 32)
    max_position_embeddings: int = key(Fields.count)
    rms_norm_eps: float = key(Fields.number, 1e-6)
    tie_word_embeddings: bool = key(Fields.flag, False)
    rope: Mapping[str, Any]

    @property
    def max_positions(self) -> int:
        """The number of positions that the rope supports."""
        return max_positions(self.rope, self.max_position_embeddings)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(DecoderConfig):
    """The configuration of decoders with :class:`~opweave_engine.models.SelfAttention`."""

    num_key_value_heads: int = key(Fields.size)
    head_dim: int = key(Fields.count)


# The kinds of attention layers in configurations.


FULL, SLIDING = "full_attention", "sliding_attention"


def check_layer_types(fields: Fields, types: Sequence[str], layers: int) -> None:
    """Check that there is a supported type of attention for each layer.

    Raises:
        InvalidConfigError: there are more or fewer types than *layers*.
        UnsupportedModelError: a type is not supported.
    """
    if len(types) != layers:
        raise InvalidConfigError(
            f"{fields.name} has {len(types)} 'layer_types' for {layers} layers."
        )
    for kind in types:
        fields.require("layer_types", kind, FULL, SLIDING)


# The activations of MLPs by their names in configurations.


# With a kernel of their own for ``activation(gate) * up``.
_GATED = ("gelu", "gelu_pytorch_tanh", "silu", "swish")
ACTIVATIONS = (
    *_GATED, "gelu_fast", "gelu_new", "quick_gelu", "relu", "relu2", "sigmoid", "tanh",
)  # fmt: skip
# Those of experts -> their names in FusedMoE.
EXPERT_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    **dict.fromkeys(("silu", "swish"), "silu"),
}


class ActivationAndMul(nn.Module):
    """``activation(gate) * up`` of ``[gate | up]``.

    Args:
        activation: an elementwise activation.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.chunk(x, 2, -1)
        activated: Tensor = self.activation(gate)
        return activated * up


def gated_activation(name: str) -> nn.Module:
    """Return a new module for ``activation(gate) * up``; *name* is one of ``ACTIVATIONS``."""
    return get_act_and_mul_fn(name) if name in _GATED else ActivationAndMul(get_act_fn(name))


def read_activation(fields: Fields, key: str, default: str) -> str:
    """Return the activation of an MLP.

    Raises:
        UnsupportedModelError: it is not supported.
    """
    return fields.require(key, fields.text(key, default), *ACTIVATIONS)


def read_expert_activation(fields: Fields, key: str, default: str) -> str:
    """Return the activation of experts; errors as those of :func:`read_activation`."""
    return fields.require(key, fields.text(key, default), *EXPERT_ACTIVATIONS)


# The parameters of rotary embedding in a ``config.json``.


_ORIGINAL_CONTEXT, _ROTARY_FRACTION = "original_max_position_embeddings", "partial_rotary_factor"
_COMMON_KEYS = (
    *("rope_type", "type", "rope_theta", _ROTARY_FRACTION, "rope_dim"),
    *("mrope_section", "mrope_interleaved", "finetuned"),
    _ORIGINAL_CONTEXT,  # some types do not need it
)
_YARN_WEIGHTS = ("mscale", "mscale_all_dim")
# The supported types, and the parameters that they read. Above the original context length,
# transformers recomputes the base of "dynamic" and the factors of "longrope" for each sequence
# length, which would invalidate cached keys. These types are therefore limited to that length.
_ROPE_KEYS = {
    "default": _YARN_WEIGHTS,  # they have no effect without a factor
    "dynamic": ("factor", *_YARN_WEIGHTS),  # DeepSeek's scores follow them
    "linear": ("factor", *_YARN_WEIGHTS),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": (
        *("factor", "short_factor", "long_factor", "short_mscale", "long_mscale"),
        "attention_factor",
    ),
    "proportional": ("factor",),
    "yarn": (
        *("factor", "attention_factor", "beta_fast", "beta_slow", "truncate", *_YARN_WEIGHTS),
    ),
}
_STRETCHED = ("llama3", "longrope", "yarn")
_PAIR_SIZE = 2  # dimensions; a base that is invalid for one pair is invalid for all
_MAX_POSITIONS = 2**24  # float32 cannot represent larger positions exactly


def rope_parameters(fields: Fields, positions: int, theta: float = 10000.0) -> dict[str, Any]:
    """Return ``rope_parameters``, or the equivalent of the older ``rope_scaling``, ``rope_theta``.

    Args:
        fields: the configuration.
        positions: its ``max_position_embeddings``.
        theta: the default base.

    Raises:
        UnsupportedModelError: the rope type or a partial rotation is not supported.
        InvalidConfigError: a parameter is missing or invalid.
    """
    rope = _nested(fields)
    if _ORIGINAL_CONTEXT in fields:  # some checkpoints have it outside rope_parameters
        length = fields.count(_ORIGINAL_CONTEXT)
        rope = Fields({**rope.values, _ORIGINAL_CONTEXT: length}, rope.name)
    return read_rope(rope, fields.number("rope_theta", theta), positions, outer=fields)


def warn_unread_rope_keys(config: Mapping[str, Any]) -> None:
    """Log the keys of a configuration's rope parameters that mean nothing to its rope type.

    Args:
        config: the object in a ``config.json``, which may have parameters by type of layer.
    """
    fields = Fields(config)
    scaled, current = (config.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
    if not all(isinstance(rope, Mapping) for rope in (scaled, current)):
        return  # building the model raises the error
    if scaled and not any(isinstance(value, Mapping) for value in current.values()):
        if unread := sorted(current.keys() - scaled.keys()):
            _log.warning(
                "%s: 'rope_scaling' replaces 'rope_parameters', as in transformers; ignored: %s",
                fields.name, ", ".join(unread),
            )  # fmt: skip
        current = {}
    for key, rope in (("rope_scaling", scaled), ("rope_parameters", current)):
        layers = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
        for name, parameters in (layers or {"": rope}).items():
            named = Fields(parameters, f"{name or key!r} in {fields.name}")
            kind = named.text("rope_type", named.text("type", "default"))
            named.warn_unread(*_COMMON_KEYS, *_ROPE_KEYS.get(kind, ()))


def rope_type(fields: Fields) -> str:
    """Return the ``rope_type`` that the configuration names."""
    rope = _nested(fields)
    return rope.text("rope_type", rope.text("type", "default"))


def _nested(fields: Fields) -> Fields:
    # As to transformers, an empty object is an absent one.
    return fields.nested("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")


def read_rope(rope: Fields, theta: float, positions: int, *, outer: Fields) -> dict[str, Any]:
    """Return the parameters in *rope*, with ``rope_type`` and ``rope_theta``.

    Arguments and errors are those of :func:`rope_parameters`. *theta* is the default of
    ``rope_theta``; *outer* is the configuration, which may have keys that *rope* lacks.
    """
    kind = rope.text("rope_type", rope.text("type", "default"))
    rope.require("rope_type", kind, *_ROPE_KEYS)
    share = _share(rope, outer, kind)
    if kind == "dynamic":  # up to the original context length, it is the same as "default"
        rope.number("factor")
        kind = "default"
    theta = rope.number("rope_theta", theta)
    rope.require_finite()
    parameters = {**rope.values, "rope_theta": theta, "rope_type": kind}
    parameters.pop(_ROTARY_FRACTION, None)
    if kind == "proportional":
        parameters[_ROTARY_FRACTION] = share
    if kind == "yarn" and "factor" not in rope:
        parameters["factor"] = _implied_factor(rope, positions)
    if kind in _STRETCHED:
        parameters.setdefault(_ORIGINAL_CONTEXT, positions)
    if kind == "longrope":
        rope.count(_ORIGINAL_CONTEXT, positions)
    try:
        scaling = _scaling(parameters, positions)
        rows = scaling.rows(positions)
        pairs = len(scaling.factors) if isinstance(scaling, rotary_scaling.LongRopeScaling) else 1
        _ = scaling.frequencies(_PAIR_SIZE * pairs, theta) * scaling.magnitude
        rotary_scaling.sections(parameters)
    except LayerArgumentError as error:
        raise InvalidConfigError(f"{rope.name}: {error}") from error
    except (ArithmeticError, ValueError) as error:
        raise InvalidConfigError(f"{rope.name} makes no table: {error}.") from error
    if rows > _MAX_POSITIONS:
        raise InvalidConfigError(
            f"max_position_embeddings={positions}, with rope_type {kind!r}, asks for a table of "
            f"{rows:.9g} positions; there can be {_MAX_POSITIONS}. Lower it, or the factor."
        )
    return parameters


def _share(rope: Fields, outer: Fields, kind: str) -> float:
    """Return the fraction of a head that is rotated.

    Raises:
        UnsupportedModelError: transformers does not support that fraction for this type.
    """
    for fields in (rope, outer):
        if "rope_dim" in fields:  # transformers ignores this key
            raise UnsupportedModelError(
                f"{fields.name} has 'rope_dim', which is not supported: heads are rotated whole."
            )
    named = rope if _ROTARY_FRACTION in rope else outer
    share = named.number(_ROTARY_FRACTION, 1.0)
    if kind == "default" and share != 1:
        _log.warning(
            "%s has %r: %g, which is ignored, as in transformers: heads are rotated whole",
            named.name, _ROTARY_FRACTION, share,
        )  # fmt: skip
    elif kind != "proportional":
        named.require(_ROTARY_FRACTION, share, 1.0)
    elif share > 1:
        raise named.wrong(_ROTARY_FRACTION, share, "at most 1")
    return share


def _implied_factor(rope: Fields, positions: int) -> float:
    """Return YaRN's factor for configurations without one."""
    if _ORIGINAL_CONTEXT not in rope:
        raise InvalidConfigError(
            f"{rope.name} of type 'yarn' has neither 'factor' nor {_ORIGINAL_CONTEXT!r}; one of "
            "them must say how far the context is stretched."
        )
    return positions / rope.number(_ORIGINAL_CONTEXT)


def max_positions(rope: Mapping[str, Any], positions: int) -> int:
    """Return the number of positions that *rope* supports.

    Args:
        rope: valid ``rope_parameters``.
        positions: ``max_position_embeddings``, which may be the context length in training.
    """
    longest = _scaling(rope, positions).rows(positions)
    return (
        min(longest, int(rope[_ORIGINAL_CONTEXT])) if rope["rope_type"] == "longrope" else longest
    )


def _scaling(rope: Mapping[str, Any], positions: int) -> rotary_scaling.Scaling:
    # Within the original context length, "longrope" takes its short factors.
    longest = rope[_ORIGINAL_CONTEXT] if rope["rope_type"] == "longrope" else positions
    return rotary_scaling.read_scaling(rope, rotary_scaling.RopeContext(positions, longest))
