"""What the platform changes in a configuration is possible, and final."""

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
        yield "it wants other values when it is given a configuration that it has fitted itself"


CHECK = PlatformCheck(
    "configuration",
    "what it changes in a configuration exists, has a reason and a legal value, and is final",
    _run,
)
