"""The default priorities name ops and providers that exist."""

from __future__ import annotations

from opweave.config import EngineConfig
from opweave.conformance.check import Findings
from opweave.conformance.platform.check import PlatformCheck
from opweave.conformance.platform.subject import PlatformSubject
from opweave.ir import IrError, current_registry
from opweave.ir.priority import parse


def _run(subject: PlatformSubject) -> Findings:
    for config in (None, EngineConfig()):
        for op, providers in subject.platform.get_default_ir_op_priority(config).items():
            yield _problem(op, providers)


def _problem(op: str, providers: list[str]) -> str | None:
    try:
        current_registry().op(op).check_providers(parse(providers, "platform default"))
    except IrError as error:
        return str(error)
    return None


CHECK = PlatformCheck(
    "priorities", "the default priorities name registered ops and providers", _run
)
