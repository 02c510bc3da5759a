"""The parameters of rotary embedding in a ``config.json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opweave.layers.errors import LayerArgumentError
from opweave.layers.rotary import ROPE_TYPES
from opweave.layers.rotary.parameters import Context, read_scaling
from opweave.models.errors import InvalidConfigError
from opweave.models.fields import Fields

_TRAINED = "original_max_position_embeddings"
_STRETCHED = ("llama3", "yarn", "longrope")
_MOST = 2**24  # positions: float32, in which their angles are computed, tells no more apart


def rope_parameters(
    fields: Fields, positions: int, theta: float = 10000.0, supported: Sequence[str] = ROPE_TYPES
) -> dict[str, Any]:
    """Return ``rope_parameters``, or what the older ``rope_scaling`` and ``rope_theta`` say.

    Args:
        fields: the configuration.
        positions: its ``max_position_embeddings``.
        theta: the base of configurations that name none.
        supported: the rope types that the model has.

    Raises:
        UnsupportedModelError: another rope type.
        InvalidConfigError: a parameter is missing or wrong.
    """
    rope = fields.nested("rope_scaling" if "rope_scaling" in fields else "rope_parameters")
    if _TRAINED in fields:  # some checkpoints have it beside the others
        rope = Fields({**rope.values, _TRAINED: fields.count(_TRAINED)}, rope.name)
    return read_rope(rope, fields.number("rope_theta", theta), positions, supported)


def read_rope(
    rope: Fields, theta: float, positions: int, supported: Sequence[str] = ROPE_TYPES
) -> dict[str, Any]:
    """Return the parameters in *rope*, with ``rope_type`` and ``rope_theta``.

    Arguments and errors as those of :func:`rope_parameters`; *theta* is what an absent
    ``rope_theta`` means.
    """
    kind = rope.text("rope_type", rope.text("type", "default"))
    rope.require("rope_type", kind, *supported)
    theta = rope.number("rope_theta", theta)
    rope.require_finite()
    parameters = {**rope.values, "rope_theta": theta, "rope_type": kind}
    if kind in _STRETCHED:
        parameters.setdefault(_TRAINED, positions)
    try:
        rows = read_scaling(parameters, Context(positions, positions)).rows(positions)
    except LayerArgumentError as error:
        raise InvalidConfigError(f"{rope.name}: {error}") from error
    except ArithmeticError as error:
        raise InvalidConfigError(f"{rope.name} makes no table: {error}.") from error
    if rows > _MOST:
        raise InvalidConfigError(
            f"max_position_embeddings={positions}, with rope_type {kind!r}, asks for a table of "
            f"{rows:.9g} positions; there can be {_MOST}. Lower it, or the factor."
        )
    return parameters
