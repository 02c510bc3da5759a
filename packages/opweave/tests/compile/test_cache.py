"""Caches: a second process runs no pass and has the report; a cache never changes meaning."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import opweave.compile
from opweave import ir
from opweave.compile import Report, fingerprint
from support.warm_python import warm_python

PROGRAM = """
    import json, sys
    import torch
    import opweave.compile
    from opweave import ir
    from opweave.compile import pipeline
    from torch._dynamo.utils import counters
    import kernels

    ran = []
    original = pipeline.run
    def counted(stage, graph, context):
        if stage is not pipeline.Stage.DYNAMO:
            ran.append(stage.value)
        return original(stage, graph, context)
    pipeline.run = counted

    W = torch.ones(8)
    def donating(x, r):
        y, s = ir.ops.fused_add_rms_norm.maybe_inplace(x * 1, r, W, 1e-5)
        return y * 2, s
    def functional(x, r):
        y, s = ir.ops.fused_add_rms_norm(x * 1, r, W, 1e-5)
        return y * 2, s

    torch.manual_seed(0)
    x, r = torch.randn(4, 8), torch.randn(4, 8)
    kept = r.clone()
    function = {"donating": donating, "functional": functional}[sys.argv[1]]
    with torch.no_grad():
        expected = functional(x, r.clone())
        found = torch.compile(function, backend=opweave.compile.backend, fullgraph=True)(x, r)
    torch.testing.assert_close(tuple(found), tuple(expected))
    report = opweave.compile.report()
    print(json.dumps({
        "passes": ran,
        "changed": not torch.equal(r, kept),
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "aot_hits": counters["aot_autograd"]["autograd_cache_hit"],
        "from_cache": report.from_cache,
        "chosen": [node.chosen for node in report.nodes],
        "reused": [reuse.reused for node in report.nodes for reuse in node.reuse],
    }))
"""
KERNELS = """
    import torch
    from opweave import ir
    import helper

    @ir.ops.fused_add_rms_norm.register_impl("ours", inplace=True)
    def _(x, x_residual, weight, epsilon, variance_size=None):
        x_residual.add_(x)
        x.copy_(helper.norm(x_residual, weight, epsilon))
        return x, x_residual

    ir.ops.fused_add_rms_norm.set_default(["ours"])
"""
HELPER = """
    import torch

    def norm(x, weight, epsilon):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, epsilon)
"""


# The program puts a function of its own into opweave, so that its file is in the keys.
SAVE = """
    import torch
    from pathlib import Path
    import program
    Path("artifacts").write_bytes(torch.compiler.save_cache_artifacts()[0])
"""
LOAD = """
    import torch
    from pathlib import Path
    assert torch.compiler.load_cache_artifacts(Path("artifacts").read_bytes()) is not None
    import program
"""


class Process:
    """Runs the program in new processes that share one cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("program.py", PROGRAM)
        self.write("kernels.py", KERNELS)
        self.write("helper.py", HELPER)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(text))

    def __call__(self, function: str, *, program: str = "program.py", **env: str) -> Any:
        done = warm_python().run(
            "-c",
            f"import runpy; runpy.run_path({program!r}, run_name='__main__')",
            function,
            cwd=self.folder,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"), **env},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


def test_a_hit_runs_no_pass_and_carries_the_report(process: Process) -> None:
    first, second = process("donating"), process("donating")
    assert first["passes"] == ["joint", "post grad"]
    assert first["from_cache"] is False
    assert second["passes"] == []
    assert second["hits"] + second["aot_hits"] >= 1
    assert second["aot_hits"] == 1
    assert second["from_cache"] is True
    assert second["chosen"] == first["chosen"] == ["ours"]
    assert second["reused"] == first["reused"] == [True, True]
    assert second["changed"] is True


def test_a_program_that_does_not_donate_gets_no_artifact_of_one_that_does(process: Process) -> None:
    assert process("donating")["changed"] is True
    other = process("functional")
    assert other["changed"] is False
    assert other["passes"] != []


def norm(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    s = x + r
    return ir.ops.rms_norm(s, None, 1e-5), s


def renamed(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    s = first + second
    return ir.ops.rms_norm(s, None, 1e-5), s


def compile_anew(function: Callable[..., Any]) -> Report:
    torch._dynamo.reset()
    torch.compile(function, backend=opweave.compile.backend)(torch.ones(4, 8), torch.ones(4, 8))
    return opweave.compile.report()


def test_a_hit_after_the_joint_stage_has_the_report() -> None:
    first = compile_anew(norm)
    assert (first.complete, first.from_cache) == (True, False)
    assert first.nodes
    partial, whole = compile_anew(renamed), compile_anew(renamed)
    assert partial.key == whole.key != first.key
    for report in (partial, whole):
        assert (report.complete, report.from_cache) == (True, True)
        assert (report.nodes, report.fusions) == (first.nodes, first.fusions)


LEARNED = torch.nn.Parameter(torch.ones(8))
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def partly_differentiated(x: Tensor, r: Tensor) -> Tensor:
    y, _ = ir.ops.fused_add_rms_norm(x, r, None, 1e-5)
    with torch.no_grad():
        z = ir.ops.rms_norm(r, LEARNED, 1e-5)
    return ir.ops.silu_and_mul(ir.ops.rms_norm(y * z, LEARNED, 1e-5))


def three_ops(x: Tensor, r: Tensor) -> Tensor:
    y, _ = ir.ops.fused_add_rms_norm(x, r, None, 1e-5)
    return ir.ops.silu_and_mul(ir.ops.rms_norm(y, None, 1e-5))


OPS = {
    partly_differentiated: ["fused_add_rms_norm", "rms_norm", "rms_norm", "silu_and_mul"],
    three_ops: ["fused_add_rms_norm", "rms_norm", "silu_and_mul"],
}


@pytest.mark.parametrize("function", OPS)
@pytest.mark.parametrize("modes", [("grad", "no_grad"), ("inference", "grad")])
def test_the_report_is_complete_after_hits_across_grad_modes(
    function: Callable[..., Any], modes: tuple[str, ...]
) -> None:
    for mode in (*modes, *modes):
        with MODES[mode]():
            report = compile_anew(function)
        assert report.complete
        assert sorted(node.op for node in report.nodes) == OPS[function], mode
        differentiated = [n.op for n in report.nodes if n.stage == "with gradients"]
        expected = mode == "grad" and function is partly_differentiated
        assert differentiated == (["rms_norm", "silu_and_mul"] if expected else [])
    assert report.from_cache


def test_a_backward_graph_does_not_complete_the_report_of_a_forward_from_the_cache() -> None:
    def scaled(by: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, w: Tensor) -> Tensor:
                return w * 2

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * by

        def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return ir.ops.fused_add_rms_norm(x, x + 1, None, 1e-5)[0], Scaled.apply(w)

        return function

    reports = []
    for by in (2.0, 3.0):
        torch._dynamo.reset()
        w = torch.ones(8, requires_grad=True)
        with torch.enable_grad():
            compiled = torch.compile(scaled(by), backend=opweave.compile.backend)
            compiled(torch.ones(4, 8), w)[1].sum().backward()
        assert w.grad is not None
        assert w.grad.tolist() == [by] * 8
        reports.append(opweave.compile.report())
    assert [node.op for node in reports[0].nodes] == ["fused_add_rms_norm"]
    for report in reports:
        assert report.complete == bool(report.nodes)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff"])
def test_a_report_that_is_missing_says_so(tmp_path: Path, content: bytes) -> None:
    compile_anew(norm)
    for file in tmp_path.glob("inductor/opweave/reports/*.json"):
        file.write_bytes(content)
    report = compile_anew(norm)
    assert (report.complete, report.from_cache) == (False, True)
    assert str(report) == "compiled earlier, its report is missing"


@pytest.mark.slow
def test_what_misses(process: Process) -> None:
    process("functional")
    assert process("functional")["passes"] == []
    process.write("helper.py", HELPER.replace("return", "epsilon = epsilon + 0.0\n        return"))
    assert process("functional")["passes"] != [], "a helper of the kernel has changed"
    assert process("functional")["passes"] == []
    other = process("functional", OPWEAVE_IR_OP_PRIORITY__RMS_NORM="native")
    assert other["passes"] != [], "a priority has changed"
    assert process("functional", OPWEAVE_BATCH_INVARIANT="1")["chosen"] != ["ours"]


def test_a_changed_binary_misses(tmp_path: Path) -> None:
    file = tmp_path / "_C_ops.so"
    file.write_bytes(b"one")
    modules = {"mine": str(file)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint.native, "opened_modules", lambda: modules)
        first = fingerprint.of_binaries()
        fingerprint.of_file.cache_clear()
        file.write_bytes(b"two")
        assert fingerprint.of_binaries() != first
        modules.clear()
        assert fingerprint.of_binaries() != first
    fingerprint.of_file.cache_clear()


def test_artifacts_carry_the_report_to_another_cache(process: Process) -> None:
    process.write("saver.py", SAVE)
    process.write("loader.py", LOAD)
    process("donating", program="saver.py")
    elsewhere = str(process.folder / "elsewhere")
    found = process("donating", program="loader.py", TORCHINDUCTOR_CACHE_DIR=elsewhere)
    assert found["passes"] == []
    assert found["from_cache"] is True
    assert found["chosen"] == ["ours"]


# torch.compile(..., backend="opweave").aot_compile: graphs that are saved and loaded.


def program(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y, r = ir.ops.fused_add_rms_norm.maybe_inplace(x * 2, r, w, 1e-5)
    return ir.ops.silu_and_mul(y), r


def given() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)


def compiled_ahead(inputs: tuple[Tensor, ...], **options: Any) -> Any:
    compiled: Any = torch.compile(program, backend="opweave", fullgraph=True, options=options)
    return compiled.aot_compile((inputs, {}))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, tuple[Tensor, ...], Any]:
    """Return the file of a saved graph, inputs, and what it computes from them."""
    inputs = given()
    with ir.priority(silu_and_mul="batch_invariant"):
        compiled = compiled_ahead(inputs)
        expected = program(inputs[0], inputs[1].clone(), inputs[2])
    torch.testing.assert_close(compiled(inputs[0], inputs[1].clone(), inputs[2]), expected)
    compiled.save_compiled_function(str(tmp_path / "program"))
    return tmp_path / "program", inputs, expected


def test_a_saved_graph_runs_in_another_process(saved: Any, fresh_python: Any) -> None:
    code, inputs, expected = saved
    data = str(code.with_suffix(".pt"))
    torch.save((inputs, expected), data)
    fresh_python(
        f"""
        import torch

        inputs, expected = torch.load({data!r})
        with torch.no_grad(), open({str(code)!r}, "rb") as file:
            compiled = torch.compiler.load_compiled_function(file)
            found = compiled(*inputs)
        torch.testing.assert_close(tuple(found), tuple(expected))

        import opweave.compile

        report = opweave.compile.report()
        assert report.from_cache and report.complete
        chosen = {{n.op: n.chosen for n in report.nodes}}
        assert chosen == {{"fused_add_rms_norm": "opweave_c", "silu_and_mul": "batch_invariant"}}
    """
    )


def test_calls_that_a_loaded_graph_refuses(saved: Any) -> None:
    code, inputs, _ = saved
    with open(code, "rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    both = torch.randn(5, 8)
    with pytest.raises(opweave.compile.CompileError, match="shares memory with another input"):
        loaded(both[:4], both[1:], inputs[2])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
        with pytest.raises(opweave.compile.CompileError, match="forward-mode derivatives"):
            loaded(dual, *inputs[1:])


def test_an_engine_can_check_that_a_loaded_graph_fits_the_settings(fresh_python: Any) -> None:
    # In processes of its own: other tests may have registered kernels in this one.
    fresh_python(
        """
        import torch
        import opweave.compile
        from opweave import ir

        def program(x):
            return ir.ops.silu_and_mul(x)

        compiled = torch.compile(program, backend="opweave", fullgraph=True)
        compiled.aot_compile(((torch.randn(4, 8),), {})).save_compiled_function("program")
    """
    )
    fresh_python(
        """
        import torch
        from opweave import ir
        from opweave.compile import CompileError

        with open("program", "rb") as file:
            compiled = torch.compiler.load_compiled_function(file)._artifacts.compiled_fn
        compiled.finalize_loading(None)
        with ir.priority(silu_and_mul="native"):
            try:
                compiled.finalize_loading(None)
            except CompileError as error:
                assert "priorities, kernels or plugins have changed" in str(error)
            else:
                raise AssertionError("not rejected")
    """
    )


def test_a_graph_without_generated_code_cannot_be_saved() -> None:
    with pytest.raises(Exception, match="leave out the option codegen=False"):
        compiled_ahead(given(), codegen=False)


def test_the_backend_inductor_says_which_one_to_use() -> None:
    opweave.compile.install()
    try:
        compiled: Any = torch.compile(program, fullgraph=True)
        with pytest.raises(Exception, match=re.escape("torch.compile(..., backend='opweave')")):
            compiled.aot_compile((given(), {}))
    finally:
        opweave.compile.uninstall()
