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
    "configuration patches have an existing key, a valid value and a reason, and are stable",
    _run,
)
