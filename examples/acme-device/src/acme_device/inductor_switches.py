"""What Inductor must know of acme before it compiles; :mod:`acme_device.inductor` comes later.

It asks these switches for every device that it does not know, and the host has others. They say:
C++ is generated, and loops stay in the order that they are generated for.
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
