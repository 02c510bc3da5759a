"""The function that claims the device is quick and pure, and starts nothing."""

from __future__ import annotations

from typing import Any

from opweave.conformance.check import Findings
from opweave.conformance.platform.check import PlatformCheck
from opweave.conformance.platform.processes import ask
from opweave.conformance.platform.subject import PlatformSubject

_SECONDS = 1.0  # it runs in every process, before anything else

# The same question twice in a process. A runtime is started if torch's module of a device says so.
_CODE = """
import json, time, torch
from opweave.plugins import resolve_obj_by_qualname
claim = resolve_obj_by_qualname({reference!r})
start = time.perf_counter()
answers = [repr(claim()) for _ in range(2)]
seconds = time.perf_counter() - start
devices = {{"cuda", "xpu", {device!r}}} - {{"cpu"}}
modules = [(name, getattr(torch, name, None)) for name in sorted(devices)]
started = [name for name, module in modules if getattr(module, "is_initialized", bool)()]
print(json.dumps([answers, seconds, started]))
"""


def _run(subject: PlatformSubject) -> Findings:
    if subject.claim is None:
        return
    code = _CODE.format(reference=subject.claim, device=subject.platform.device_type)
    yield from _problems(ask(code, {}, {}), subject.claim)


def _problems(told: list[Any], reference: str) -> Findings:
    answers = {answer for given, _, _ in told for answer in given}
    seconds = min(seconds for _, seconds, _ in told)
    started = sorted({name for *_, names in told for name in names})
    different = " and ".join(sorted(answers))
    yield f"{reference} gives different answers: {different}" if len(answers) > 1 else None
    yield f"{reference} says that its device is not here" if answers == {"None"} else None
    yield (
        f"{reference} takes {seconds:.1f} s for two calls; at most {_SECONDS:.0f} s is fair"
        if seconds > _SECONDS
        else None
    )
    yield (
        f"{reference} starts the runtime of {', '.join(started)}: processes that fork or choose "
        "a device later could not use it"
        if started
        else None
    )


CHECK = PlatformCheck(
    "claim",
    "the plugin's function is fast and repeatable, and does not start a device runtime",
    _run,
)
