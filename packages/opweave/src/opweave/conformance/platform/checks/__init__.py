"""The table of checks: what a platform must do, one row for each."""

from __future__ import annotations

from opweave.conformance.platform.check import PlatformCheck
from opweave.conformance.platform.checks import (
    capabilities,
    children,
    claim,
    configuration,
    contract,
    device,
    kernels,
    priorities,
    references,
    seed,
)

CHECKS: dict[str, PlatformCheck] = {
    check.name: check
    for check in (
        contract.CHECK,
        claim.CHECK,
        configuration.CHECK,
        device.CHECK,
        capabilities.CHECK,
        seed.CHECK,
        priorities.CHECK,
        references.CHECK,
        kernels.CHECK,
        children.CHECK,
    )
}
