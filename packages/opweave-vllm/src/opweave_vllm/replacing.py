"""Replacement of vLLM's layers."""

from typing import Any


def replace(base: Any, layer: Any) -> None:
    """Let vLLM build *layer* where it builds *base*, under the same name in ``custom_ops``.

    ``register_oot`` would rename the layer, and ``+rms_norm`` would no longer enable it.
    """
    name = getattr(base, "name", None)
    base.register_oot(layer, name=base.__name__)
    if name is not None:
        layer.name = name
