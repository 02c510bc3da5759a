"""Selected implementations compute the op's definition on the platform's device."""

from __future__ import annotations

from opweave.conformance.check import Findings
from opweave.conformance.platform.check import PlatformCheck
from opweave.conformance.platform.subject import PlatformSubject
from opweave.conformance.subject import Subject
from opweave.conformance.verify import verify
from opweave.ir import current_registry
from opweave.ir.priority import EVERY_OP, NATIVE, parse

_CHECKS = ("values", "mutation")  # `opweave verify --platform` runs all


def _run(subject: PlatformSubject) -> Findings:
    ops = current_registry().ops
    lists = subject.platform.get_default_ir_op_priority()
    for name, op in ops.items():
        providers = lists.get(name, lists.get(EVERY_OP))
        for entry in parse(providers, "platform default") if providers else ():
            # (another check reports missing registrations)
            if entry.provider in {*op.impls} - {NATIVE}:
                yield from _verified(Subject(op, entry.provider, subject.platform.device_type))


def _verified(implementation: Subject) -> Findings:
    result = verify(implementation, _CHECKS)
    problems = [f"{result.subject} {o.check}: {p}" for o in result.outcomes for p in o.problems]
    if problems:
        yield problems[0]
    elif not result.obstacle:
        yield None


CHECK = PlatformCheck(
    "kernels",
    "each selected implementation matches the op's definition on the device",
    _run,
)
