"""The native module: C++ kernels and the two doors to them.

Importing this package loads nothing; `load` does, and the others call it.
"""

from opweave.native.guard import plain_check
from opweave.native.loader import NativeStatus, available, load, status

__all__ = ["NativeStatus", "available", "load", "plain_check", "status"]
