"""Which method of a ``CustomOp`` runs on which platform."""

from __future__ import annotations

_METHODS = {
    "cpu": "forward_cpu",
    "cuda": "forward_cuda",
    "rocm": "forward_hip",
    "tpu": "forward_tpu",
    "unspecified": "forward_native",
    "xpu": "forward_xpu",
}


def method_for(platform: str) -> str:
    """Return the name of the method for the platform of that name.

    A platform that opweave does not bring comes from another package: it is out of tree.

    >>> method_for("rocm"), method_for("my_npu")
    ('forward_hip', 'forward_oot')
    """
    return _METHODS.get(platform, "forward_oot")
