"""The parameters of rotary embedding in a ``config.json``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from opweave.layers.errors import LayerArgumentError
from opweave.layers.rotary.parameters import RopeContext, read_scaling, sections
from opweave.layers.rotary.scaling import LongRopeScaling, Scaling
from opweave_engine.models.errors import InvalidConfigError, UnsupportedModelError
from opweave_engine.models.fields import Fields

_log = logging.getLogger(__name__)

# Above the length of training, transformers changes the base of "dynamic" and the factors of
# "longrope" with the length of a sequence: keys in a cache cannot follow. These types are therefore
# limited to that length, within which nothing changes.
_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
_TRAINED, _SHARE = "original_max_position_embeddings", "partial_rotary_factor"
_COMMON_KEYS = (
    *("rope_type", "type", "rope_theta", _SHARE, "rope_dim", "mrope_section", "mrope_interleaved"),
    *(_TRAINED, "finetuned"),  # the length of training, which some types do not need
)
_YARN_WEIGHTS = ("mscale", "mscale_all_dim")
# Parameters that the types read.
_KEYS = {
    "default": _YARN_WEIGHTS,  # which change nothing without a factor
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
_PAIR = 2  # dimensions: what no frequency can be made of is as wrong for one pair as for all
_MOST = 2**24  # positions: float32, in which their angles are computed, tells no more apart


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
    if _TRAINED in fields:  # some checkpoints have it outside rope_parameters
        rope = Fields({**rope.values, _TRAINED: fields.count(_TRAINED)}, rope.name)
    return read_rope(rope, fields.number("rope_theta", theta), positions, outer=fields)


def warn_unread_rope_keys(config: Mapping[str, Any]) -> None:
    """Log the keys of a configuration's rope parameters that mean nothing to its rope type.

    Args:
        config: the object in a ``config.json``, which may have parameters by type of layer.
    """
    fields = Fields(config)
    scaled, current = (config.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
    if not all(isinstance(rope, Mapping) for rope in (scaled, current)):
        return  # which is an error for the model
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
            named.warn_unread(*_COMMON_KEYS, *_KEYS.get(kind, ()))


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
    rope.require("rope_type", kind, *_ROPE_TYPES)
    share = _share(rope, outer, kind)
    if kind == "dynamic":  # which changes nothing up to the length of training
        rope.number("factor")
        kind = "default"
    theta = rope.number("rope_theta", theta)
    rope.require_finite()
    parameters = {**rope.values, "rope_theta": theta, "rope_type": kind}
    parameters.pop(_SHARE, None)
    if kind == "proportional":
        parameters[_SHARE] = share
    if kind == "yarn" and "factor" not in rope:
        parameters["factor"] = _implied_factor(rope, positions)
    if kind in _STRETCHED:
        parameters.setdefault(_TRAINED, positions)
    if kind == "longrope":
        rope.count(_TRAINED, positions)
    try:
        scaling = _scaling(parameters, positions)
        rows = scaling.rows(positions)
        pairs = len(scaling.factors) if isinstance(scaling, LongRopeScaling) else 1
        _ = scaling.frequencies(_PAIR * pairs, theta) * scaling.magnitude
        sections(parameters)
    except LayerArgumentError as error:
        raise InvalidConfigError(f"{rope.name}: {error}") from error
    except (ArithmeticError, ValueError) as error:
        raise InvalidConfigError(f"{rope.name} makes no table: {error}.") from error
    if rows > _MOST:
        raise InvalidConfigError(
            f"max_position_embeddings={positions}, with rope_type {kind!r}, asks for a table of "
            f"{rows:.9g} positions; there can be {_MOST}. Lower it, or the factor."
        )
    return parameters


def _share(rope: Fields, outer: Fields, kind: str) -> float:
    """Return the fraction of a head that is rotated.

    Raises:
        UnsupportedModelError: transformers does not support that fraction for this type.
    """
    for fields in (rope, outer):
        if "rope_dim" in fields:  # which means nothing to transformers
            raise UnsupportedModelError(
                f"{fields.name} has 'rope_dim', which is not supported: heads are rotated whole."
            )
    named = rope if _SHARE in rope else outer
    share = named.number(_SHARE, 1.0)
    if kind == "default" and share != 1:
        _log.warning(
            "%s has %r: %g, which is ignored, as in transformers: heads are rotated whole",
            named.name, _SHARE, share,
        )  # fmt: skip
    elif kind != "proportional":
        named.require(_SHARE, share, 1.0)
    elif share > 1:
        raise InvalidConfigError(f"{named.name} has {_SHARE!r}: {share:g}; it must be at most 1.")
    return share


def _implied_factor(rope: Fields, positions: int) -> float:
    """Return YaRN's factor for configurations without one."""
    if _TRAINED not in rope:
        raise InvalidConfigError(
            f"{rope.name} of type 'yarn' has neither 'factor' nor {_TRAINED!r}; one of them must "
            "say how far the context is stretched."
        )
    return positions / rope.number(_TRAINED)


def max_positions(rope: Mapping[str, Any], positions: int) -> int:
    """Return the number of positions that *rope* supports.

    Args:
        rope: valid ``rope_parameters``.
        positions: ``max_position_embeddings``, which may be the context length in training.
    """
    longest = _scaling(rope, positions).rows(positions)
    return min(longest, int(rope[_TRAINED])) if rope["rope_type"] == "longrope" else longest


def _scaling(rope: Mapping[str, Any], positions: int) -> Scaling:
    # Within the length of training, "longrope" takes its short factors.
    longest = rope[_TRAINED] if rope["rope_type"] == "longrope" else positions
    return read_scaling(rope, RopeContext(positions, longest))
