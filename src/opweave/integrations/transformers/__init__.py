"""Causal language models of transformers in opweave's engine.

transformers is imported when such a model is loaded, and not before.
"""

from opweave.integrations.transformers.loading import (
    check_transformers_ranks,
    is_available,
    is_causal_lm,
    load_transformers_model,
)
from opweave.integrations.transformers.model import TransformersModel

__all__ = [
    "TransformersModel",
    "check_transformers_ranks",
    "is_available",
    "is_causal_lm",
    "load_transformers_model",
]
