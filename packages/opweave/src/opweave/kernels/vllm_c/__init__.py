"""Provider ``vllm_c``: the CPU kernels of an installed vLLM.

The library of kernels is loaded at the first call, without importing vLLM. Only its functions with
the meaning of one of opweave's ops are here.
"""

from opweave.kernels.vllm_c import activation, experts, norm, quant, rotary, state_space

__all__ = ["activation", "experts", "norm", "quant", "rotary", "state_space"]
