"""Inductor settings for acme, needed before :mod:`acme_device.inductor` is imported.

Inductor reads these settings for every unknown device. They select C++ code generation, and keep
the order of loops.
"""

from __future__ import annotations

from torch._inductor import config

_SWITCHES = {
    "cuda_backend": "cpp",
    "loop_ordering_after_fusion": False,
    "loop_reindexing_after_fusion": False,
}

for _name, _value in _SWITCHES.items():
    if hasattr(config, _name):  # not every version of torch has each
        setattr(config, _name, _value)
