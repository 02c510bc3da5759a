"""The conformance of platforms: sound ones pass, broken ones are found by the check for it."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir, transaction
from opweave.config import EngineConfig
from opweave.conformance import NonconformingError, UnknownCheckError, UnknownPlatformError
from opweave.conformance.platform import CHECKS, PlatformSubject, find_platform, verify_platform
from opweave.conformance.platform import checks as claim
from opweave.conformance.platform.checks import MEMBERS, kernels
from opweave.conformance.platform.subject import ProcessFailedError, ask
from opweave.platforms import CpuPlatform, Platform
from opweave.platforms.base import members

from . import platform_zoo as zoo

OF_PROCESSES = ("claim", "children")
QUICK = [name for name in CHECKS if name not in (*OF_PROCESSES, "kernels")]


def failed(platform: Platform, checks: list[str]) -> dict[str, list[str]]:
    result = verify_platform(PlatformSubject(platform), checks)
    return {o.check: o.problems for o in result.outcomes if o.problems}


@pytest.fixture
def wrong_kernel() -> Iterator[None]:
    with transaction.begin() as entered:

        @ir.ops.silu_and_mul.register_impl("zoo_wrong")
        def _(x: Tensor) -> Tensor:
            return ir.ops.silu_and_mul.native(x) + 1

    yield
    entered.roll_back()


def test_every_method_of_the_contract_is_called() -> None:
    assert set(MEMBERS) == {m for m in members(Platform) if callable(getattr(Platform, m, None))}


@pytest.mark.parametrize("check", QUICK)
def test_the_cpu_conforms(check: str) -> None:
    result = verify_platform(find_platform("cpu"), [check])
    result.raise_if_failed()
    assert result.status == "passed"


@pytest.mark.slow
def test_the_kernels_of_the_cpu_conform() -> None:
    verify_platform(find_platform("cpu"), ["kernels"]).raise_if_failed()


def test_processes_find_the_cpu() -> None:
    result = verify_platform(find_platform("cpu"), OF_PROCESSES)
    result.raise_if_failed()
    assert all(outcome.passed for outcome in result.outcomes)


def test_a_sound_platform_conforms() -> None:
    subject = find_platform(f"{zoo.__name__}.Sound")
    assert (subject.claim, subject.claimant, subject.current) == (None, None, False)
    result = verify_platform(subject)
    result.raise_if_failed()
    nothing_to_check = {outcome.check for outcome in result.outcomes if not outcome.passed}
    assert nothing_to_check == {*OF_PROCESSES, "kernels"}  # no plugin claims it or has kernels
    with pytest.raises(NonconformingError, match="platform sound fails:\ncontract: get_device_nam"):
        verify_platform(PlatformSubject(zoo.Nameless()), ["contract"]).raise_if_failed()


each_broken = pytest.mark.parametrize(
    ("check", "broken"), [(check, cls) for check, broken in zoo.BROKEN.items() for cls in broken]
)


@each_broken
def test_the_zoo(check: str, broken: type[zoo.Sound], wrong_kernel: None) -> None:
    problems = failed(broken(), [check])
    assert set(problems) == {check}
    assert len(problems[check]) in (1, 2) or broken is zoo.Elsewhere


@pytest.mark.slow
@each_broken
def test_no_other_check_fails(check: str, broken: type[zoo.Sound], wrong_kernel: None) -> None:
    if broken is not zoo.Elsewhere:  # tensors that hold nothing are wrong in many ways
        assert set(failed(broken(), [*QUICK, "kernels"])) == {check}


def test_the_kernels_are_those_that_the_package_brings(wrong_kernel: None) -> None:
    class Mixed(zoo.Sound):
        def get_default_ir_op_priority(
            self, config: EngineConfig | None = None
        ) -> Mapping[str, list[str]]:
            return {"silu_and_mul": ["zoo_wrong", "batch_invariant", "native"]}

    assert [str(each) for each in kernels(PlatformSubject(Mixed()))] == ["silu_and_mul:zoo_wrong"]
    assert "silu_and_mul:opweave_c" in map(str, kernels(find_platform("cpu")))


def test_without_an_engine_its_parts_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for broken, check in ((zoo.Choosy, "contract"), (zoo.Inattentive, "references")):
        monkeypatch.undo()
        assert failed(broken(), [check])
        monkeypatch.setattr(claim, "engine_parts", lambda: None)
        assert not failed(broken(), [check])


def in_forks(code: str, *environments: Mapping[str, str]) -> list[Any]:
    """Like ``ask``, in forks of this process, which is faster than new interpreters."""
    answers = []
    for environment in environments:
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.environ.update(environment)
            sys.stdout = io.StringIO()
            exec(code, {})
            os.write(writing, sys.stdout.getvalue().encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            answers.append(json.loads(file.read().splitlines()[-1]))
        os.waitpid(child, 0)
    return answers


@pytest.mark.parametrize(("function", "problem"), [("sound", None), *zoo.CLAIMS.items()])
def test_claims(function: str, problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "ask", in_forks)
    monkeypatch.setattr(zoo.Sound, "device_type", "zoo")
    subject = PlatformSubject(zoo.Sound(), claim=f"{zoo.__name__}:{function}")
    [outcome] = verify_platform(subject, ["claim"]).outcomes
    assert (outcome.problems == []) is (problem is None)
    assert problem is None or problem in outcome.problems[0]


def test_children_on_another_platform_are_found() -> None:
    subject = PlatformSubject(zoo.Sound(), claim="opweave.platforms.builtin:cpu", claimant="cpu")
    [outcome] = verify_platform(subject, ["children"]).outcomes
    [problem] = outcome.problems
    assert "OPWEAVE_PLATFORM is set runs on opweave.platforms.builtin.CpuPlatform" in problem


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(ProcessFailedError, match="NameError: name 'nothing' is not defined"):
        ask("nothing", {})
    with pytest.raises(ProcessFailedError, match="it wrote nothing"):
        ask("pass", {})


def test_what_does_not_exist() -> None:
    with pytest.raises(UnknownPlatformError, match=r"unknown platform 'cpuu'. Did you mean 'cpu'"):
        find_platform("cpuu")
    if not torch.cuda.is_available():
        with pytest.raises(UnknownPlatformError, match="'cuda' says that its device is not here"):
            find_platform("cuda")
    with pytest.raises(UnknownPlatformError, match="not a subclass of"):
        find_platform("opweave.platforms.probes.cpu_name")
    with pytest.raises(UnknownCheckError, match=r"unknown check 'seeds'. Did you mean 'seed'"):
        verify_platform(find_platform("cpu"), ["seeds"])
    assert isinstance(find_platform().platform, CpuPlatform)
