"""Helpers of attention backends."""

import torch

from opweave_vllm.vllm_api.v1.attention.backend import CommonAttentionMetadata

__all__ = ["NULL_BLOCK_ID", "PAD_SLOT_ID", "split_decodes_and_prefills"]

PAD_SLOT_ID = -1
"""The slot of a padding token, which is not written to the cache."""
NULL_BLOCK_ID = 0
"""The block that vLLM never gives to a request."""


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> tuple[int, int, int, int]:
    """Return the numbers of decodes, prefills, tokens of decodes and tokens of prefills.

    The decodes must come first: requests with at most *decode_threshold* tokens.

    Args:
        common_attn_metadata: the batch.
        decode_threshold: the most tokens of a decode.
        require_uniform: all decodes must have the same number of tokens; 0 is padding.
        treat_short_extends_as_decodes: if False, requests with an incomplete prompt are prefills.

    Raises:
        ValueError: short extends are prefills, and ``is_prefilling`` is missing.
    """
    data = common_attn_metadata
    lengths = data.query_start_loc_cpu.diff()
    is_decode = lengths <= decode_threshold
    if require_uniform and decode_threshold > 1:
        is_decode &= (lengths == lengths[:1]) | (lengths == 0)
    if not treat_short_extends_as_decodes:
        if data.is_prefilling is None:
            raise ValueError(
                "treat_short_extends_as_decodes=False needs is_prefilling in the metadata"
            )
        is_decode &= ~data.is_prefilling.to(is_decode.device)
    decodes = int(torch.cumprod(is_decode.int(), 0).sum())
    if decodes == data.num_reqs:
        return decodes, 0, data.num_actual_tokens, 0  # also if there is padding
    tokens = int(data.query_start_loc_cpu[decodes])
    return decodes, data.num_reqs - decodes, tokens, data.num_actual_tokens - tokens
