"""Verifying the implementations that come with opweave, and what the kit says of others."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.conformance import (
    CHECKS,
    NonconformingError,
    NothingToVerifyError,
    Subject,
    UnknownPlatformError,
    certificate,
    subjects,
    summary,
    verify,
)
from opweave.conformance.checks import COMPILING
from opweave.ir.errors import UnknownOpError
from opweave.ir.testing import restored
from support.devices import needs_cuda

from .zoo import ZOO

ALL = subjects()
# A family with each provider; tests/native verifies opweave_c, and a slow test all of them.
SOME = [
    subject
    for subject in subjects(["fused_add_rms_norm", "dynamic_per_token_quant_fp8"])
    if subject.provider not in ("opweave_c", "triton")  # tests/triton_kernels
]
OTHERS = [s for s in ALL if s.provider not in ("native", "opweave_c", "triton")]
SLOW = [*COMPILING, "repetition"]  # seconds for each implementation
QUICK = [name for name in CHECKS if name not in SLOW]


@pytest.mark.parametrize("subject", SOME, ids=str)
def test_some_implementations_are_right(subject: Subject) -> None:
    result = verify(subject, QUICK)
    result.raise_if_failed()
    assert result.status == "passed"
    assert result.passed > 50


@pytest.mark.parametrize("subject", OTHERS, ids=str)
def test_other_implementations_are_right_with_the_usual_arguments(subject: Subject) -> None:
    # Large batches of sequences take long: tests/ir/test_batch_invariance.py has small ones.
    invariance = [] if "attention" in subject.op.name else ["batch_invariance"]
    result = verify(subject, ["options", "none", "empty", *invariance])
    result.raise_if_failed()
    assert result.status == "passed" or not subject.impl.supported, result.obstacle


@pytest.mark.parametrize("subject", subjects(["rms_norm"], ["batch_invariant"]), ids=str)
def test_compiled_and_repeated_calls_are_right(subject: Subject) -> None:
    result = verify(subject, SLOW)
    result.raise_if_failed()
    assert all(outcome.status == "passed" for outcome in result.outcomes)


@needs_cuda
@pytest.mark.parametrize("subject", ALL, ids=str)
def test_on_a_gpu(subject: Subject) -> None:
    verify(replace(subject, device="cuda"), QUICK).raise_if_failed()


@needs_cuda
@pytest.mark.parametrize("name", ["varlen_attention", "causal_conv1d", "selective_scan"])
def test_compiled_calls_on_a_gpu_find_their_sequences(name: str) -> None:
    [subject] = subjects([name], ["native"])
    verify(replace(subject, device="cuda"), ["compiled"]).raise_if_failed()


@pytest.mark.parametrize(
    ("op", "provider", "check"),
    [
        ("per_token_group_quant_fp8", "native", "compiled"),  # left out a shorter last group
        ("attention_quant", "opweave_c", "batch_invariance"),  # tokens of it are not independent
        ("fused_experts_quant", "aten", "extremes"),  # the largest scale made products overflow
    ],
)
def test_what_was_wrong_once(op: str, provider: str, check: str) -> None:
    [subject] = subjects([op], [provider])
    verify(subject, [check]).raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize("subject", ALL, ids=str)
def test_every_registered_implementation_is_right(subject: Subject) -> None:
    result = verify(subject)
    result.raise_if_failed()
    assert result.status == "passed" or not subject.impl.supported, result.obstacle


def test_the_sign_of_zero_is_within_every_tolerance() -> None:
    relu2 = ir.ops.relu2
    with restored(relu2):
        relu2.register_impl("signed")(lambda x: _with_negative_zeros(relu2.native(x)))
        verify(Subject(relu2, "signed"), ["values", "extremes"]).raise_if_failed()


def _with_negative_zeros(t: Tensor) -> Tensor:
    return torch.where(t == 0, -0.0, t)


def test_a_finding_names_the_case_and_can_be_had_again() -> None:
    broken = next(specimen for specimen in ZOO if specimen.name == "wrong_last_column")
    with broken.registered() as subject:
        first, second, other = (verify(subject, ["values"], seed=s) for s in (3, 3, 4))
        with pytest.raises(NonconformingError, match=r"silu_and_mul:broken fails:\nvalues: output"):
            first.raise_if_failed()
    problems = first.outcomes[0].problems
    assert problems == second.outcomes[0].problems != other.outcomes[0].problems
    assert "silu_and_mul(float32[1, 128] cpu) [num_tokens=1, dtype=float32]" in problems[0]


def test_verifying_leaves_no_trace() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    verify(SOME[0], ["values", "determinism", "extremes"])
    assert torch.equal(torch.rand(3), expected)
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_cannot_run_here_is_not_called_right() -> None:
    op = ir.ops.silu_and_mul
    with restored(op):
        op.register_impl("absent", supported=False, unsupported_reason="no such device")(op.native)
        op.register_impl("elsewhere", supports_args=ir.rules.cuda("x"))(op.native)
        absent, elsewhere = (verify(Subject(op, name)) for name in ("absent", "elsewhere"))
    assert absent.status == elsewhere.status == "unverified"
    assert absent.obstacle == "no such device"
    assert elsewhere.obstacle is not None
    assert elsewhere.obstacle.startswith(
        "it accepts none of the op's usual arguments on cpu: x: on cpu"
    )
    assert summary([absent, elsewhere]) == {"passed": 0, "failed": 0, "unverified": 2}


def test_sizes_that_a_kernel_accepts_are_found() -> None:
    op = ir.ops.rms_norm
    with restored(op):
        rule = ir.rules.last_dim_multiple_of("x", 256) & ir.rules.dtype("x", torch.float32)
        op.register_impl("wide", supports_args=rule)(op.native)
        found = verify(Subject(op, "wide"), ["values", "mutation", "layouts"])
    assert found.status == "passed"
    assert found.subject.options == (("hidden_size", 256),)
    assert all(outcome.passed for outcome in found.outcomes)
    assert found.outcomes[0].passed > 10


@pytest.mark.parametrize("error", [KeyError, IndexError])
def test_an_input_generator_that_raises_is_not_the_kernels_fault(
    error: type[Exception], registry: ir.Registry
) -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    def generate(num_tokens: int = 8) -> tuple[Tensor]:
        raise error("no such table")

    op = ir.register_op(doubled)
    op.register_input_generator(generate)
    result = verify(Subject(op, "native"))
    assert result.status == "unverified"
    assert result.obstacle.startswith(f"the op's input generator raised {error.__name__}")


def test_what_a_kernel_leaves_changed_is_said_of_each_check() -> None:
    broken = next(specimen for specimen in ZOO if specimen.name == "changes_the_default_dtype")
    with broken.registered() as subject:
        result = verify(subject, ["empty", "global_state"])
    assert torch.get_default_dtype() is torch.float32
    told = {outcome.check: outcome.problems for outcome in result.outcomes}
    assert told["empty"] == ["left changed: torch.get_default_dtype()"]
    assert told["global_state"][0].startswith("changed torch.get_default_dtype(): silu_and_mul(")


def test_a_certificate_is_of_the_whole_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "whole_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from opweave import ir\n"
        "def relu2(x):\n"
        "    from whole_package import kernels\n"
        "    return kernels.relu2(x)\n"
        "ir.ops.relu2.register_impl('whole')(relu2)\n"
    )
    kernels = package / "kernels.py"
    kernels.write_text("from torch import relu\ndef relu2(x):\n    return relu(x).square()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with restored(ir.ops.relu2):
        importlib.import_module("whole_package")
        [subject] = subjects(["relu2"], ["whole"])
        results = [verify(subject, ["values"])]
        before = certificate(results, seed=0)["results"][0]
        kernels.write_text(kernels.read_text() + "# another\n")
        after = certificate(results, seed=0)["results"][0]
    assert before["status"] == "passed"
    assert before["source"] == after["source"]
    assert before["package"] != after["package"]
    assert (before["owner"], before["inputs"]) == (None, {})


def test_a_claim_that_nothing_can_show_is_no_pass(registry: ir.Registry) -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    op = ir.register_op(native_traits={"batch_invariant"})(doubled)
    op.register_input_generator(lambda width=4: (torch.randn(3, width),))
    result = verify(Subject(op, "native"), ["batch_invariance"])
    assert result.status == "failed"
    assert "needs num_tokens" in result.outcomes[0].problems[0]


def test_an_op_without_inputs_is_unverified(registry: ir.Registry) -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    result = verify(Subject(ir.register_op(doubled), "native"))
    assert (result.status, result.obstacle) == ("unverified", "the op has no input generator")


@pytest.mark.parametrize(("factor", "status"), [(1.0, "passed"), (1.02, "failed")])
def test_gradients_may_differ_by_the_rounding_of_16_bits(
    registry: ir.Registry, factor: float, status: str
) -> None:
    """Native rounds to bfloat16 twice, the kernel once: both gradients are right."""

    def scaled_sum(x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale.to(x.dtype)).sum(-1)

    def rounded_once(x: Tensor, scale: Tensor) -> Tensor:
        exact = (x.double() * scale.double()).sum(-1)
        return (factor * exact + (1 - factor) * exact.detach()).to(x.dtype)

    op = ir.register_op(scaled_sum)
    op.register_impl("kernel", traits={"differentiable"})(rounded_once)
    op.register_input_generator(
        lambda num_tokens=8, dtype=torch.bfloat16: (
            torch.randn(num_tokens, 64, dtype=dtype), torch.randn(64)
        )
    )  # fmt: skip
    result = verify(Subject(op, "kernel"), ["gradients"])
    assert result.status == status
    assert result.passed + len(result.outcomes[0].problems) >= 3


def test_subjects() -> None:
    assert {str(s) for s in subjects(["silu-and-mul"])} >= {"silu_and_mul:native"}
    found = {s.provider for s in subjects(providers=["aten"])}
    assert "aten" in found
    assert {provider.partition("[")[0] for provider in found} == {"aten"}  # and variants of it
    assert len(ALL) == sum(len(op.impls) for op in ir.current_registry().ops.values())


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"ops": ["silu_and_mull"]}, UnknownOpError, "silu_and_mul"),
        ({"providers": ["opweave-c"]}, NothingToVerifyError, "Did you mean 'opweave_c'"),
        ({"ops": ["embedding"], "providers": ["aten"]}, NothingToVerifyError, "for embedding"),
        ({"platform": "cpuu"}, UnknownPlatformError, "Did you mean 'cpu'"),
    ],
)
def test_what_does_not_exist(arguments: dict[str, Any], error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        subjects(**arguments)


def test_a_certificate_says_what_was_verified() -> None:
    chosen = subjects(["rms_norm"], ["native", "opweave_c"])
    results = [verify(subject, ["values", "mutation"]) for subject in chosen]
    issued = json.loads(json.dumps(certificate(results, seed=0)))
    assert issued["summary"] == {"passed": 2, "failed": 0, "unverified": 0}
    assert issued["versions"]["torch"] == torch.__version__
    native, other = issued["results"]
    assert (native["op"], native["provider"]) == ("rms_norm", "native")
    assert native["source"] == other["definition"] != other["source"]
    [values] = [check for check in other["checks"] if check["check"] == "values"]
    assert values["cases"] > 50
    assert values["problems"] == []
    assert all(check["promise"] for check in other["checks"])
