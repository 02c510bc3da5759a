"""Programs written against vLLM's names run, with their imports changed and nothing else."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from support.fixtures import Case, FreshCases

PRELUDE = """
    import torch
    from torch import Tensor, nn
    from opweave_vllm.vllm_api import ir
    from opweave_vllm.vllm_api.platforms import current_platform
"""


def read_programs() -> dict[str, str]:
    """Return the code of each program by its name."""
    text = Path(__file__).with_name("vllm_programs.txt").read_text(encoding="utf-8")
    parts = re.split(r"^### (\w+)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


# The requirements of each program, and the conditions that must hold after it.
AROUND = {
    "declare": (
        """
        from opweave.ir import isolated_registry
        scope = isolated_registry()
        scope.__enter__()
        """,
        """
        x, w = torch.randn(3, 8), torch.rand(1)
        torch.testing.assert_close(mean_square(x, w, 0.5), ((x * x).sum(-1, True) / 8 + 0.5) * w)
        torch.testing.assert_close(mean_square(x, None, 0.0, 1), x[:, :1] ** 2)
        assert str(mean_square).endswith(": The mean of the squares of each row")
        assert list(ir.op.IrOp.registry) == ["mean_square"]
        assert mean_square.torch_op(x, w, 1e-6).equal(mean_square(x, w, 1e-6))
        """,
    ),
    "implement": (
        "",
        """
        assert fast_norm is ir.ops.rms_norm.impls["theirs"]
        assert not fast_norm.supported and "theirs" not in ir.ops.rms_norm.supported_providers()
        x, w = torch.ones(1, 4), torch.ones(4)
        assert fast_norm.supports_args(x, w, 1e-6)
        assert not fast_norm.supports_args(x, w, 1e-6, 2)
        """,
    ),
    "layer": (
        "",
        """
        x, residual, layer = torch.randn(3, 8), torch.randn(3, 8), Norm(8)
        added = x + residual
        expected = 2 * torch.nn.functional.rms_norm(added, (8,), None, 1e-6)
        torch.testing.assert_close(layer(added), expected)
        with torch.no_grad():
            y, total = layer(x, residual)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(total, added)
        traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            torch.testing.assert_close(traced(added), expected)
        """,
    ),
    "predicate": (
        "",
        """
        half, full = torch.ones(1, 4).half(), torch.ones(1, 4)
        with ir.ops.rms_norm.set_priority(["halves"]):
            assert ir.ops.rms_norm.get_priority() == ["halves", "native"]
            assert ir.ops.rms_norm.dispatch(half, None, 1e-6).provider == "halves"
            assert ir.ops.rms_norm.dispatch(full, None, 1e-6).provider == "native"
            assert ir.ops.rms_norm(half, None, 1e-6).tolist() == [[2.0] * 4]
        """,
    ),
    "out_of_tree": (
        "",
        """
        with ir.ops.rms_norm.set_priority(["vendor", "native"]):
            assert ir.ops.rms_norm.get_priority() == ["vendor"]
            assert ir.ops.rms_norm(torch.ones(1, 1), None, 1e-6).item() == 42
        """,
    ),
    "replace_many": (
        """
        from opweave_vllm.vllm_api import CustomOp

        def declare(name):
            class Layer(CustomOp):
                def forward_native(self, x):
                    return x

            Layer.__name__ = name
            CustomOp.register(name.lower())(Layer)

            class Theirs(Layer):
                def forward_native(self, x):
                    return x + 1

            return Layer, Theirs

        First, TheirFirst = declare("First")
        Second, TheirSecond = declare("Second")
        """,
        """
        for layer in (First, Second):
            assert layer()(torch.zeros(1)).item() == 1
        assert CustomOp.op_registry_oot == replacements
        """,
    ),
    "entry_point": (
        "",
        """
        from opweave import plugins
        assert plugins.Claim(probe(), api=1).platform == "vendor.device.VendorPlatform"
        """,
    ),
    "ask_platform": (
        "",
        """
        assert name and isinstance(name, str)
        assert capability is None
        assert current_platform.is_cpu() and not current_platform.is_cuda_alike()
        """,
    ),
    "register": (
        "",
        """
        assert CustomOp.op_registry["doubling"] is Doubling and Doubling.name == "doubling"
        assert Doubling()(torch.ones(1)).item() == 2
        """,
    ),
}


def on_opweave(code: str) -> str:
    """Change the imports."""
    return re.sub(r"^from vllm\b", "from opweave_vllm.vllm_api", code, flags=re.MULTILINE)


def test_programs_run(fresh_cases: FreshCases) -> None:
    programs = read_programs()
    assert set(AROUND) == set(programs)
    cases = []
    for name, (before, after) in AROUND.items():
        start, given, checks = map(textwrap.dedent, (PRELUDE, before, after))
        cases.append(Case("\n".join([start, given, on_opweave(programs[name]), checks])))
    fresh_cases(cases)
