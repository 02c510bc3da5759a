"""Constants of attention backends."""

from opweave_vllm.vllm_api.v1.attention.backends.utils import PAD_SLOT_ID

__all__ = ["PAD_SLOT_ID"]
