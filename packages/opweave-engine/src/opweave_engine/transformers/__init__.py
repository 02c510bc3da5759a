"""Transformers models in opweave's engine.

transformers is imported only when such a model is loaded.
"""

from opweave_engine.transformers.cross_encoder import TransformersCrossEncoder
from opweave_engine.transformers.loading import (
    check_transformers_ranks,
    is_available,
    is_base_model,
    is_causal_lm,
    is_masked_lm,
    is_sequence_classifier,
    load_transformers_encoder,
    load_transformers_model,
)
from opweave_engine.transformers.model import TransformersEncoder, TransformersModel

__all__ = [
    "TransformersCrossEncoder",
    "TransformersEncoder",
    "TransformersModel",
    "check_transformers_ranks",
    "is_available",
    "is_base_model",
    "is_causal_lm",
    "is_masked_lm",
    "is_sequence_classifier",
    "load_transformers_encoder",
    "load_transformers_model",
]
