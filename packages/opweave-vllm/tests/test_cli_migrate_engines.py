"""``opweave migrate`` on classes in the style of several engines and of their forks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fixtures import FreshPython
from test_cli import Run
from test_cli import run as run  # the fixture
from test_cli_migrate import HEAD, Migrate, becomes, notes
from test_cli_migrate import migrate as migrate  # the fixture

SGLANG = """
import torch
from torch import Tensor, nn
from sglang.srt.layers.utils import MultiPlatformOp

_is_amx = False

class SiluAndMul(MultiPlatformOp):
    def __init__(self, *args):
        super().__init__(*args)
        self.calls = 0
    def forward_native(self, x: Tensor) -> Tensor:
        d = x.shape[-1] // 2
        return nn.functional.silu(x[..., :d]) * x[..., d:]
    def forward_cpu(self, x: Tensor) -> Tensor:
        if _is_amx:
            return torch.ops.sgl_kernel.silu_and_mul_cpu(x)
        return self.forward_native(x)
    def forward_npu(self, x: Tensor) -> Tensor:
        import torch_npu
        return torch_npu.npu_swiglu(x)
    def forward_musa(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.forward_native(x)

class Mixin:
    pass

class ShiftedNorm(Mixin, MultiPlatformOp):
    def __init__(self, size: int, eps: float = 0.5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    def forward_native(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self._norm(x.float()) * (1.0 + self.weight) * scale
    def forward_cuda(self, *args, **kwargs):
        return self.forward_native(*args, **kwargs)
    def forward_cpu(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if x.stride(-1) != 1:
            return torch.ops.sgl_kernel.norm_cpu(x, self.weight, self.eps)
        return self.forward_native(x, scale=scale)
    def forward_hpu(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.ops.hpu.norm(self._norm(x), scale)
"""


def test_sglangs_layers_are_layers(migrate: Migrate, fresh_python: FreshPython) -> None:
    found = migrate(SGLANG, head="")
    assert becomes(found, "SiluAndMul") == [
        ("register_impl", "my_sgl_kernel"),  # opweave has a provider sgl_kernel for its own ops
        ("register_impl", "torch_npu"),
        ("layer", "SiluAndMul"),
    ]
    assert "forward_musa needs manual work: it assigns self.calls" in notes(found, "SiluAndMul")
    assert becomes(found, "ShiftedNorm") == [
        ("op", "shifted_norm"),
        ("register_impl", "sgl_kernel"),
        ("register_impl", "hpu"),
        ("layer", "ShiftedNorm"),
    ]
    assert found["imports_left"] == []
    assert "from opweave.layers import CustomOp as MultiPlatformOp" in found["sketch"]
    fresh_python(
        """
        import torch
        from opweave import ir
        import my_ops

        x = torch.randn(3, 8)
        expected = torch.nn.functional.silu(x[:, :4]) * x[:, 4:]
        layer, norm = my_ops.SiluAndMul(), my_ops.ShiftedNorm(8)
        norm.requires_grad_(False)
        with ir.priority(silu_and_mul=["my_sgl_kernel"], shifted_norm=["sgl_kernel"]):
            assert ir.ops.silu_and_mul.dispatch(x).provider == "my_sgl_kernel"
            for name in "native", "cuda", "cpu", "npu", "musa":
                torch.testing.assert_close(getattr(layer, "forward_" + name)(x), expected)
            assert layer.calls == 1
            expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.5) * 2.0 * 3.0
            assert ir.ops.shifted_norm.dispatch(x, norm.weight, 0.5, 3.0).provider == "sgl_kernel"
            for name in "native", "cuda", "cpu", "hpu":
                result = getattr(norm, "forward_" + name)(x, scale=3.0)
                torch.testing.assert_close(result, expected)
            torch.testing.assert_close(norm._norm(x), expected / 6)
        """
    )


def test_aphrodites_modules_are_vllms(migrate: Migrate) -> None:
    found = migrate(
        "class Mine(SiluAndMul):\n    def forward_oot(self, x):\n"
        "        return ops.mine(x) if current_platform.is_cuda() else x * 1\n",
        head="from aphrodite import _custom_ops as ops\n"
        "from aphrodite.model_executor.layers.activation import SiluAndMul\n"
        "from aphrodite.platforms import current_platform\n",
    )
    assert becomes(found, "Mine") == [("register_impl", "my_vllm_c")]
    assert "from opweave_vllm.vllm_api.platforms import current_platform" in found["sketch"]
    assert found["imports_left"] == ["aphrodite"]


@pytest.mark.parametrize(
    "imported",
    [
        "from vllm import _custom_ops as ops",
        "import vllm._custom_ops as ops",
        "from vllm._custom_ops import silu_and_mul",
    ],
)
def test_kernels_stay_the_engines(imported: str, migrate: Migrate) -> None:
    """opweave's functions of these names would call the op, and the op its implementation."""
    called = "silu_and_mul" if imported.endswith("silu_and_mul") else "ops.silu_and_mul"
    found = migrate(
        "@SiluAndMul.register_oot\nclass Mine(SiluAndMul):\n    def forward_oot(self, x):\n"
        f"        out = torch.empty_like(x)\n        {called}(out, x)\n        return out\n",
        head=HEAD + imported + "\n",
    )
    assert becomes(found, "Mine") == [("register_impl", "my_vllm_c")]
    assert imported in found["sketch"]


KERNELS = """
from vllm.platforms import current_platform

@CustomOp.register("gated")
class Gated(CustomOp):
    def __init__(self, mode: str = "none"):
        super().__init__()
        self.mode = mode
        if current_platform.is_cuda_alike() or current_platform.is_cpu():
            if mode == "none":
                self.op = torch.ops._C.gated
            elif mode == "tanh":
                self.op = torch.ops._C.gated_tanh
        elif current_platform.is_xpu():
            from vllm._ipex_ops import ipex_ops
            self.op = ipex_ops.gated
    def forward_native(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if self.mode == "tanh" else x * 1
    def forward_cuda(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.op(out, x)
        return out
    def forward_xpu(self, x: Tensor) -> Tensor:
        return self.op(x)

@CustomOp.register("maybe")
class Maybe(CustomOp):
    def __init__(self, lut: bool):
        super().__init__()
        if current_platform.is_cpu() and hasattr(torch.ops._C, "lut"):
            self.op = torch.ops._C.lut
        else:
            self.op = None
        self.late = torch.ops._C.late
        local = torch.ops._C.a if lut else torch.ops._C.b
        self.other = local
    def set(self):
        self.late = torch.ops._C.later
    def forward_native(self, x: Tensor) -> Tensor:
        return x * 1
    def forward_cpu(self, x: Tensor) -> Tensor:
        return self.op(x) if self.op else x * 1
    def forward_cuda(self, x: Tensor) -> Tensor:
        return self.late(x)
    def forward_xpu(self, x: Tensor) -> Tensor:
        return self.other(x)

@CustomOp.register("written")
class Written(CustomOp):
    def forward_native(self, x: Tensor) -> Tensor:
        return x * 2
    def forward_cuda(self, x: Tensor) -> Tensor:
        torch.ops._C.written(x)
        return x
"""


def test_kernels_that_depend_on_the_platform(migrate: Migrate, fresh_python: FreshPython) -> None:
    found = migrate(KERNELS)
    choice = "(torch.ops._C.gated if mode == 'none' else torch.ops._C.gated_tanh)(out, x)"
    assert choice in found["sketch"]
    assert (
        "    from vllm._ipex_ops import ipex_ops\n    return ipex_ops.gated(x)" in found["sketch"]
    )
    assert becomes(found, "Gated") == [
        ("op", "gated"),
        ("register_impl", "vllm_c"),
        ("register_impl", "ipex"),
        ("layer", "gated"),
    ]
    # Not known when the module is read: whether there is a kernel, or which.
    assert becomes(found, "Maybe") == [("op", "maybe"), ("layer", "maybe")]
    for method, attribute in {"cpu": "op", "cuda": "late", "xpu": "other"}.items():
        note = notes(found, "Maybe").partition(f"forward_{method} needs manual work: ")[2]
        assert note.partition(".  ")[0].startswith(("it calls", "it reads"))
        assert f"self.{attribute}" in note.partition(" forward_")[0]
    # An op returns new tensors.
    assert "forward_cuda needs manual work: it writes to its argument x" in notes(found, "Written")
    fresh_python(
        """
        import torch, my_ops
        x = torch.randn(3)
        for mode, expected in ("none", x), ("tanh", x.tanh()):
            layer = my_ops.Gated(mode)
            torch.testing.assert_close(layer(x), expected)
            torch.testing.assert_close(layer.forward_cuda(x), expected)
        """
    )


def test_a_replacement_that_stays_as_it_is_does_not_count(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "my_ops.py"
    path.write_text(
        HEAD + "@SiluAndMul.register_oot\nclass Mine(SiluAndMul):\n"
        "    def forward_oot(self, x, extra: int = 0):\n        return x * extra\n"
    )
    assert run("migrate", path).stderr.splitlines()[-1] == "0 of 1 classes converted"


def test_a_layer_with_another_default_is_not_replaced(
    migrate: Migrate, fresh_python: FreshPython
) -> None:
    found = migrate(
        '@CustomOp.register("gelu_and_mul")\nclass GeluAndMul(CustomOp):\n'
        '    def __init__(self, approximate: str = "tanh"):\n        super().__init__()\n'
        "        self.approximate = approximate\n"
        "    def forward_native(self, x: Tensor) -> Tensor:\n        d = x.shape[-1] // 2\n"
        "        gate = nn.functional.gelu(x[..., :d], approximate=self.approximate)\n"
        "        return gate * x[..., d:]\n"
    )
    assert "does not replace it: it takes another approximate" in notes(found, "GeluAndMul")
    assert found["kept"] == ["GeluAndMul"]
    fresh_python(
        """
        import torch, my_ops
        x = torch.randn(3, 8)
        expected = torch.nn.functional.gelu(x[:, :4], approximate="tanh") * x[:, 4:]
        torch.testing.assert_close(my_ops.GeluAndMul()(x), expected)
        """
    )


def test_methods_that_another_class_overrides_are_not_written_into_an_op(
    migrate: Migrate, fresh_python: FreshPython
) -> None:
    found = migrate(
        '@CustomOp.register("plus")\nclass Plus(CustomOp):\n'
        "    def amount(self):\n        return 1\n"
        "    def forward_native(self, x: Tensor) -> Tensor:\n        return x + self.amount()\n"
        "class Two(Plus):\n    def amount(self):\n        return 2\n"
        '@CustomOp.register("minus")\nclass Minus(CustomOp):\n'
        "    def forward_native(self, x: Tensor) -> Tensor:\n        return x - 1\n"
        "    def forward_cuda(self, x: Tensor) -> Tensor:\n        return self.forward_native(x)\n"
        "class MinusTwo(Minus):\n"
        "    def forward_native(self, x: Tensor, y: object = 2) -> Tensor:\n        return x - y\n"
    )
    assert "it calls self.amount" in notes(found, "Plus")
    assert "another class of the file overrides it" in notes(found, "Minus")
    fresh_python(
        """
        import torch, my_ops
        assert my_ops.Two()(torch.zeros(1)).item() == 2
        assert my_ops.MinusTwo().forward_cuda(torch.zeros(1)).item() == -2
        """
    )
