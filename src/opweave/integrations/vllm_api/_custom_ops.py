"""Native ops as functions."""

from opweave._custom_ops import advance_step_flashattn, fused_add_rms_norm, rms_norm

__all__ = ["advance_step_flashattn", "fused_add_rms_norm", "rms_norm"]
