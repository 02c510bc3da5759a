"""The platform's changes to a configuration are valid and final."""

from __future__ import annotations

from opweave.config import EngineConfig
from opweave.conformance.check import Findings
from opweave.conformance.platform.check import PlatformCheck
from opweave.conformance.platform.subject import PlatformSubject
from opweave.platforms import configured


def _run(subject: PlatformSubject) -> Findings:
    config = configured(EngineConfig(), subject.platform)
    yield None
    if configured(config, subject.platform) == config:
        yield None
    else:
        yield "it changes a configuration again that it has already adapted"


CHECK = PlatformCheck(
    "configuration",
    "changes to a configuration have an existing key, a reason and a valid value, and are final",
    _run,
)
