"""The default priorities name ops and providers that exist."""

from __future__ import annotations

from opweave.config import EngineConfig
from opweave.conformance.check import Findings
from opweave.conformance.platform.check import PlatformCheck
from opweave.conformance.platform.subject import PlatformSubject
from opweave.ir import IrError, current_registry
from opweave.ir.errors import did_you_mean
from opweave.ir.priority import EVERY_OP, parse


def _run(subject: PlatformSubject) -> Findings:
    for config in (None, EngineConfig()):
        for op, providers in subject.platform.get_default_ir_op_priority(config).items():
            yield _problem(op, providers)


def _problem(op: str, providers: list[str]) -> str | None:
    if op == EVERY_OP:
        return _unknown(providers)
    try:
        current_registry().op(op).check_providers(parse(providers, "platform default"))
    except IrError as error:
        return str(error)
    return None


def _unknown(providers: list[str]) -> str | None:
    known = {name for op in current_registry().ops.values() for name in op.impls}
    for entry in parse(providers, "platform default"):
        if entry.provider not in known:
            return f"'*': no op has the provider {entry.provider!r}. " + did_you_mean(
                entry.provider, known
            )
    return None


CHECK = PlatformCheck(
    "priorities", "the default priorities name registered ops and providers", _run
)
