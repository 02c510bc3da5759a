"""Conformance of platforms: verifies a platform on its device.

>>> from opweave.conformance.platform import find_platform, verify_platform
>>> verify_platform(find_platform("cpu"), ["contract", "seed"]).status
'passed'

In pytest, use ``pytest --pyargs opweave.conformance.platform --platform acme``.
"""

from opweave.conformance.platform.checks import CHECKS, PlatformResult, verify_platform
from opweave.conformance.platform.subject import PlatformCheck, PlatformSubject, find_platform

__all__ = [
    "CHECKS", "PlatformCheck", "PlatformResult", "PlatformSubject", "find_platform",
    "verify_platform",
]  # fmt: skip
