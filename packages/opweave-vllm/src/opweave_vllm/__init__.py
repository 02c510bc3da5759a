"""opweave's kernels in an unpatched vLLM, as a ``vllm.general_plugins`` plugin."""

from opweave_vllm.plugin import register
from opweave_vllm.reporting import report

__all__ = ["register", "report"]
