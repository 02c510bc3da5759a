"""torch.compile(..., backend="opweave").aot_compile: graphs that are saved and loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import opweave.compile
from opweave import ir

pytestmark = pytest.mark.timeout(300)


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
    """,
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
    """,
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
    """,
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
