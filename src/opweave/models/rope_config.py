"""The parameters of rotary embedding in a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opweave.layers.errors import LayerArgumentError
from opweave.layers.rotary.parameters import Context, read_scaling, sections
from opweave.layers.rotary.scaling import Scaling
from opweave.models.errors import InvalidConfigError, UnsupportedModelError
from opweave.models.fields import Fields

# What is computed as transformers computes it. By the length of a sequence, that takes another base
# for "dynamic" and other factors for "longrope": keys in a cache cannot follow.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_TRAINED = "original_max_position_embeddings"
_STRETCHED = ("llama3", "yarn")
_PAIR = 2  # dimensions: what no frequency can be made of is as wrong for one pair as for all
_MOST = 2**24  # positions: float32, in which their angles are computed, tells no more apart


def rope_parameters(fields: Fields, positions: int, theta: float = 10000.0) -> dict[str, Any]:
    """Return ``rope_parameters``, or what the older ``rope_scaling`` and ``rope_theta`` say.

    Args:
        fields: the configuration.
        positions: its ``max_position_embeddings``.
        theta: the base of configurations that name none.

    Raises:
        UnsupportedModelError: another rope type, or heads that are rotated in part.
        InvalidConfigError: a parameter is missing or wrong.
    """
    rope = fields.nested("rope_scaling" if "rope_scaling" in fields else "rope_parameters")
    if _TRAINED in fields:  # some checkpoints have it beside the others
        rope = Fields({**rope.values, _TRAINED: fields.count(_TRAINED)}, rope.name)
    require_whole_heads(fields)
    return read_rope(rope, fields.number("rope_theta", theta), positions)


def read_rope(rope: Fields, theta: float, positions: int) -> dict[str, Any]:
    """Return the parameters in *rope*, with ``rope_type`` and ``rope_theta``.

    Arguments and errors as those of :func:`rope_parameters`; *theta* is what an absent
    ``rope_theta`` means.
    """
    kind = rope.text("rope_type", rope.text("type", "default"))
    rope.require("rope_type", kind, *_ROPE_TYPES)
    require_whole_heads(rope)
    theta = rope.number("rope_theta", theta)
    rope.require_finite()
    parameters = {**rope.values, "rope_theta": theta, "rope_type": kind}
    if kind == "yarn" and "factor" not in rope:
        parameters["factor"] = _implied_factor(rope, positions)
    if kind in _STRETCHED:
        parameters.setdefault(_TRAINED, positions)
    try:
        scaling = _scaling(parameters, positions)
        rows = scaling.rows(positions)
        _ = scaling.frequencies(_PAIR, theta) * scaling.magnitude
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


def _implied_factor(rope: Fields, positions: int) -> float:
    """Return by how much YaRN stretches the context of training if no factor says so."""
    if _TRAINED not in rope:
        raise InvalidConfigError(
            f"{rope.name} of type 'yarn' has neither 'factor' nor {_TRAINED!r}; one of them must "
            "say how far the context is stretched."
        )
    return positions / rope.number(_TRAINED)


def max_positions(rope: Mapping[str, Any], positions: int) -> int:
    """Return the longest sequence that *rope*, which was checked, has positions for.

    Args:
        rope: ``rope_parameters``.
        positions: ``max_position_embeddings``, which may be what a stretched model was trained on.
    """
    return _scaling(rope, positions).rows(positions)


def require_whole_heads(fields: Fields) -> None:
    """Raise UnsupportedModelError if *fields* ask for a rotation of a part of every head."""
    share = "partial_rotary_factor"
    fields.require(share, fields.number(share, 1.0), 1.0)
    if "rope_dim" in fields:  # which means nothing to transformers
        raise UnsupportedModelError(
            f"{fields.name} has 'rope_dim', which is not supported: heads are rotated whole."
        )


def _scaling(rope: Mapping[str, Any], positions: int) -> Scaling:
    return read_scaling(rope, Context(positions, positions))
