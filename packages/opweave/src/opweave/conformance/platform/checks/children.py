"""Processes that an engine starts find the same platform."""

from __future__ import annotations

from opweave.conformance.check import Findings
from opweave.conformance.platform.check import PlatformCheck
from opweave.conformance.platform.processes import ask
from opweave.conformance.platform.subject import PlatformSubject
from opweave.platforms import resolution
from opweave.platforms.handover import VARIABLE

_CODE = """
import json
from opweave.platforms import resolution
print(json.dumps(resolution().qualname))
"""


def _run(subject: PlatformSubject) -> Findings:
    if subject.claimant is None:
        return
    told = [{"OPWEAVE_PLATFORM": subject.claimant}]
    if subject.current:  # by themselves, and as an engine starts its workers
        told += [{}, {VARIABLE: resolution().to_json()}]
    for environment, found in zip(told, ask(_CODE, *told), strict=True):
        how = " and ".join(f"{name} is set" for name in environment) or "nothing is set"
        same = _name(found) == _name(subject.qualname)
        yield None if same else f"a child process where {how} runs on {found}"


def _name(qualname: str) -> str:
    return qualname.replace(":", ".")


CHECK = PlatformCheck("children", "child processes run on the same platform", _run)
