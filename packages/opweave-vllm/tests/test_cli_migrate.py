"""``opweave migrate``: what a module of custom ops becomes, and that the sketch runs."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import ROOT
from support.fixtures import FreshPython
from test_cli import Run, assert_one_line_error
from test_cli import run as run  # the fixture

EXAMPLE = ROOT / "examples" / "vllm_custom_op.py"

MODULE = '''
"""Custom ops, as a package for vLLM writes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform

LIMIT = 7.0


def halves(x):
    return x.chunk(2, dim=-1)


@CustomOp.register("scaled_relu")
class ScaledReLU(CustomOp):
    def __init__(self, scale: float = 2.0, *, bias: bool = False) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.ones(1)) if bias else None
        if current_platform.is_cuda_alike():
            self.op = torch.ops._C.scaled_relu

    def forward_native(self, x: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
        y = F.relu(x) * self.scale + offset
        return y if self.weight is None else y * self.weight

    def forward_cuda(self, x: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
        out = torch.empty_like(x)
        self.op(out, x, self.weight, self.scale, offset)
        return out

    def forward_hip(self, x: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
        return self.forward_cuda(x, offset)

    def forward_xpu(self, x, offset=0.0):
        from vllm._ipex_ops import ipex_ops as ops

        return ops.scaled_relu(x, self.weight, self.scale, offset)

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


@CustomOp.register("clamped_product")
class ClampedProduct(CustomOp):
    @staticmethod
    def forward_static(x, limit):
        gate, up = halves(x)
        return gate.clamp(max=limit) * up

    def forward_native(self, x):
        return self.forward_static(x, LIMIT)

    def forward_cpu(self, x):
        return self.forward_native(x)


@CustomOp.register("norm_or_pair")
class NormOrPair(CustomOp):
    def forward_native(self, x, residual=None):
        if residual is None:
            return x
        return x + residual, residual


@CustomOp.register("counting")
class Counting(CustomOp):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward_native(self, x):
        self.count += 1
        return x


@CustomOp.register_oot("SiluAndMul")
class NpuSiluAndMul(SiluAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        import torch_npu

        return torch_npu.npu_swiglu(x)


class NpuRMSNorm(RMSNorm):
    def __init__(self, hidden_size, eps=1e-6, **kwargs):
        super().__init__(hidden_size, eps, **kwargs)
        self.bias = None

    def forward_oot(self, x, residual=None):
        import torch_npu

        return torch_npu.npu_rms_norm(x, self.weight, self.variance_epsilon)[0]


REGISTERED_CUSTOM_OPS = {"RMSNorm": NpuRMSNorm}

for op_name, op_cls in REGISTERED_CUSTOM_OPS.items():
    CustomOp.register_oot(_decorated_op_cls=op_cls, name=op_name)
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "my_ops.py"
    path.write_text(MODULE)
    return path


HEAD = """
import torch
from torch import Tensor, nn
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul
"""

Migrate = Callable[..., dict[str, Any]]


@pytest.fixture
def migrate(run: Run, tmp_path: Path) -> Migrate:
    """Write a module, which starts with HEAD, and return what ``--json`` says of it."""

    def migrated(text: str, *, head: str = HEAD, name: str = "my_ops.py") -> dict[str, Any]:
        (tmp_path / name).write_text(head + text)
        found: dict[str, Any] = json.loads(run("migrate", tmp_path / name, "--json").stdout)
        (tmp_path / name).write_text(found["sketch"])
        return found

    return migrated


def becomes(found: dict[str, Any], name: str) -> list[tuple[str, str]]:
    (described,) = (each for each in found["classes"] if each["class"] == name)
    return [(item["what"], item["name"]) for item in described["becomes"]]


def notes(found: dict[str, Any], name: str) -> str:
    (described,) = (each for each in found["classes"] if each["class"] == name)
    return " ".join(described["notes"])


def test_the_example_of_the_readme(run: Run) -> None:
    found = json.loads(run("migrate", EXAMPLE, "--json").stdout)
    assert [each["class"] for each in found["classes"]] == ["SoftCappedGelu"]
    compile(found["sketch"], "sketch", "exec")


def test_what_each_class_becomes(run: Run, module: Path) -> None:
    found = json.loads(run("migrate", module, "--json").stdout)
    assert becomes(found, "ScaledReLU") == [
        ("op", "scaled_relu"),
        ("register_impl", "vllm_c"),
        ("register_impl", "ipex"),
        ("layer", "scaled_relu"),
    ]
    assert becomes(found, "ClampedProduct") == [
        ("op", "clamped_product"),
        ("layer", "clamped_product"),
    ]
    assert becomes(found, "NormOrPair") == [("layer", "norm_or_pair")]
    assert "a tensor or a tuple" in notes(found, "NormOrPair")
    assert becomes(found, "Counting") == [("layer", "counting")]
    assert "assigns self.count" in notes(found, "Counting")
    assert becomes(found, "NpuSiluAndMul") == [("register_impl", "torch_npu")]
    assert becomes(found, "NpuRMSNorm") == [("replacement", "RMSNorm")]
    assert "residual is not an argument of ir.ops.rms_norm" in notes(found, "NpuRMSNorm")
    assert found["imports_left"] == ["vllm._ipex_ops"]


def test_the_report_goes_to_standard_error(run: Run, module: Path, tmp_path: Path) -> None:
    printed = run("migrate", module)
    found = json.loads(run("migrate", module, "--json").stdout)
    assert printed.stdout == found["sketch"] + "\n"
    for described in found["classes"]:
        assert f"{described['class']}, line {described['line']}" in printed.stderr
        for note in described["notes"]:
            assert note in printed.stderr
    last = printed.stderr.splitlines()[-1]
    assert last == "3 of 6 classes converted; still imports vllm._ipex_ops"
    written = run("migrate", module, "-o", tmp_path / "new.py")
    assert (tmp_path / "new.py").read_text() == found["sketch"]
    assert written.stdout == ""


def test_the_sketch_runs_and_computes_the_same(
    run: Run, module: Path, fresh_python: FreshPython
) -> None:
    sketch = json.loads(run("migrate", module, "--json").stdout)["sketch"]
    module.write_text(sketch)
    fresh_python(
        """
        import torch
        from opweave import ir
        from opweave.layers import RMSNorm, op_registry_oot
        import my_ops

        x = torch.randn(3, 8)
        for enabled in (True, False):
            layer = my_ops.ScaledReLU(3.0, bias=True)
            layer.weight.data.fill_(2.0)
            run = layer if enabled else layer.forward_native
            torch.testing.assert_close(run(x, 1.0), (x.relu() * 3 + 1) * 2)
            run = my_ops.ClampedProduct()
            run = run if enabled else run.forward_native
            torch.testing.assert_close(run(x), x[:, :4].clamp(max=7.0) * x[:, 4:])
        torch.testing.assert_close(ir.ops.scaled_relu(x, 3.0, None, 1.0), x.relu() * 3 + 1)
        assert set(ir.ops.scaled_relu.impls) == {"native", "vllm_c", "ipex"}
        assert "torch_npu" in ir.ops.silu_and_mul.impls
        assert ir.ops.silu_and_mul.dispatch(x).provider != "torch_npu"
        with ir.priority(scaled_relu=["vllm_c", "ipex"]):
            explained = str(ir.explain(ir.ops.scaled_relu, x, 3.0, None))
            assert explained.count("x: on cpu") == 2, explained
        assert my_ops.NormOrPair()(x) is x
        assert type(RMSNorm(8)) is my_ops.NpuRMSNorm is op_registry_oot["RMSNorm"]
        """
    )


def test_the_packages_own_layers_are_ours(migrate: Migrate) -> None:
    found = migrate(
        '@CustomOp.register("silu_and_mul")\n'
        "class SiluAndMul(CustomOp):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.op = torch.ops._C.silu_and_mul\n"
        "    def forward_native(self, x):\n"
        "        d = x.shape[-1] // 2\n"
        "        return torch.nn.functional.silu(x[..., :d]) * x[..., d:]\n"
        "    def forward_cuda(self, x):\n"
        "        out = torch.empty_like(x[..., : x.shape[-1] // 2])\n"
        "        self.op(out, x)\n"
        "        return out\n",
        head="import torch\nfrom vllm.model_executor.custom_op import CustomOp\n",
    )
    assert becomes(found, "SiluAndMul") == [("register_impl", "my_vllm_c")]
    assert "opweave.layers.SiluAndMul" in notes(found, "SiluAndMul")
    assert "ir.ops.silu_and_mul" in notes(found, "SiluAndMul")
    assert found["imports_left"] == []
    ast.parse(found["sketch"])
    assert "from opweave.layers import SiluAndMul" in found["sketch"]
    assert "torch.ops._C.silu_and_mul(out, x)" in found["sketch"]


GATED = """
raise RuntimeError("the module is not imported")

HALVES = 2

def halves(x):
    d = x.shape[-1] // HALVES
    return x[..., :d], x[..., d:]

@CustomOp.register("silu_and_mul")
class SiluAndMul(CustomOp):
    @staticmethod
    def product(a, b):
        return a * b

    def forward_native(self, x: Tensor) -> Tensor:
        gate, up = halves(x)
        return self.product(%s)

    def forward_cuda(self, x: Tensor) -> Tensor:
        return torch.ops._C.silu_and_mul(x)
"""
HEAD_WITHOUT_LAYERS = HEAD.rpartition("from")[0]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("nn.functional.silu(gate), up", ""),
        ("gate, nn.functional.silu(up)", "it computes something else: output 0: "),
        ("cdiv(gate, 1), up", "it cannot be compared, NameError: name 'cdiv' is not defined"),
    ],
)
def test_a_layer_of_opweave_replaces_a_class_that_computes_the_same(
    run: Run, tmp_path: Path, body: str, reason: str
) -> None:
    path = tmp_path / "my_ops.py"
    path.write_text(f"from vllm.utils import cdiv{HEAD_WITHOUT_LAYERS}{GATED % body}")
    done = run("migrate", path)
    summary = done.stderr.splitlines()[-1]
    if not reason:
        assert done.returncode == 0
        assert "ir.ops.silu_and_mul of opweave computes the same on drawn inputs" in done.stderr
        assert "from opweave.layers import SiluAndMul" in done.stdout
        assert 'ir.ops.silu_and_mul.register_impl("my_vllm_c"' in done.stdout
        assert "1 of 1 classes converted" in summary
        return
    assert done.returncode == 1
    assert reason in done.stderr
    assert "class SiluAndMul(CustomOp):" in done.stdout
    assert 'ir.ops.my_ops_silu_and_mul.register_impl("vllm_c"' in done.stdout
    assert "ir.ops.silu_and_mul" not in done.stdout
    assert "; not the same as opweave's layers: SiluAndMul" in summary


NORM = """
@CustomOp.register("rms_norm")
class RMSNorm(CustomOp):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward_native(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * %s

    def forward_cuda(self, x: Tensor) -> Tensor:
        return torch.ops._C.norm(x, self.weight, self.eps)
"""


def test_arguments_of_other_names_are_compared_in_their_order(migrate: Migrate) -> None:
    same = migrate(NORM % "self.weight", head=HEAD_WITHOUT_LAYERS)
    assert same["kept"] == []
    assert becomes(same, "RMSNorm") == [("register_impl", "my_vllm_c")]
    assert "torch.ops._C.norm(x, weight, epsilon)" in same["sketch"]
    other = migrate(NORM % "(1 + self.weight)", head=HEAD_WITHOUT_LAYERS)
    assert other["kept"] == ["RMSNorm"]
    assert "class RMSNorm(CustomOp)" in other["sketch"]


def writes(argument: str) -> str:
    return f"it writes to its argument {argument}, or returns it"


@pytest.mark.parametrize(
    ("rest", "body", "problem"),
    [
        (", *rest)", "return x", "it takes *args or **kwargs"),
        (", *, k=1)", "return x", "keyword-only"),
        (")", "return self.helper(x)", "calls self.helper"),
        (")", "return self.forward_cuda(x)", "self.forward_cuda"),
        (")", "return super().forward_native(x)", "super as a whole"),
        # The arguments that it changes or returns, also by other names or through views.
        (")", "x.add_(1)\n        return x * 2", writes("x")),
        (")", "return x if len(x) else x * 2", writes("x")),
        (")", "x[0][1] = 3\n        return x * 2", writes("x")),
        (")", "x += 1\n        return x * 2", writes("x")),
        (")", "x = x * 1; x.add_(1); return x", ""),
        (", y)", "x = x * 1; return x * 2, y", writes("y")),
        (", y)", "torch.mul(x, 2, out=y); return y + 1", writes("y")),
        (")", "z = x; z.mul_(2); return z + 1", writes("x")),
        (")", "return x.view(-1)", writes("x")),
        (")", "return x[..., :2].T", writes("x")),
        (")", "a, b = x.chunk(2); a += 1; return b * 2", writes("x")),
        (")", "torch.relu_(x); return x * 2", writes("x")),
        (")", "return torch.nn.functional.relu(x, inplace=True) * 2", writes("x")),
        (", y)", "a, b = y, x; return a * b", ""),
        (")", "z = x; z = z * 2; z.mul_(2); return z", ""),
        (", y)", "return x[y]", ""),
        (")", "def inner(a):\n            return x\n        return inner(1) * 2", ""),
        # Outputs
        (")", "def pair():\n            return 1, 2\n        return x * pair()[0]", ""),
        (", out) -> None", "out.copy_(x)", "it returns nothing"),
        (") -> tuple[Tensor, Tensor | None]", "return x * 2, None", "outputs may be None"),
        (") -> Tensor | tuple[Tensor, Tensor]", "return f(x)", "a tensor or a tuple"),
    ],
)
def test_why_a_method_is_not_an_op(rest: str, body: str, problem: str, migrate: Migrate) -> None:
    found = migrate(
        '@CustomOp.register("a")\nclass A(CustomOp):\n'
        f"    def forward_native(self, x{rest}:\n        {body}\n"
    )
    assert problem in notes(found, "A")
    assert ("is not an op" in notes(found, "A")) is bool(problem)
    ast.parse(found["sketch"])


def test_a_layer_without_a_registered_name_is_noted(migrate: Migrate) -> None:
    found = migrate("class A(CustomOp):\n    def forward_native(self, x):\n        return x * 2\n")
    assert "no registered name" in notes(found, "A")


def test_a_pluggable_layer_stays_one(migrate: Migrate) -> None:
    found = migrate(
        "from vllm.model_executor.custom_op import PluggableLayer\n"
        '@PluggableLayer.register("my_block")\n'
        "class Block(PluggableLayer):\n    def forward(self, x):\n        return x\n",
        head="",
    )
    assert becomes(found, "Block") == [("layer", "my_block")]
    assert "from opweave.layers import PluggableLayer" in found["sketch"]


def test_locals_do_not_hide_attributes(migrate: Migrate) -> None:
    found = migrate(
        '@CustomOp.register("plus_one")\n'
        "class PlusOne(CustomOp):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.ones(4))\n"
        "        self.eps: float = 5.0\n"
        "    def forward_native(self, x: Tensor) -> Tensor:\n"
        "        weight = self.weight + 1\n"
        "        return [x * weight + self.weight for eps in [1]][0] + self.eps\n"
        "    def forward_cuda(self, x: Tensor) -> Tensor:\n"
        "        return torch.ops.mine.plus_one(x, self.weight, self.eps)\n"
        '@CustomOp.register_oot("plus_one")\n'
        "class Mine(PlusOne):\n"
        "    def forward_oot(self, x: Tensor) -> Tensor:\n"
        "        weight_ = self.weight + 1\n"
        "        return x + weight_\n"
    )
    sketch = found["sketch"]
    assert "def _plus_one(x: Tensor, weight_: torch.Tensor, eps_: float) -> Tensor:" in sketch
    assert "weight = weight_ + 1" in sketch
    assert "return [x * weight + weight_ for eps in [1]][0] + eps_" in sketch
    assert "plus_one(x, weight_, eps_)" in sketch
    assert "its own weight_ would hide an argument" in notes(found, "Mine")


def test_a_name_that_is_a_constant(migrate: Migrate) -> None:
    found = migrate(
        'NAME, OTHER = "x", "y"\nBLOCK: str = "my_block"\nREPLACED = "silu_and_mul"\n'
        "@PluggableLayer.register(BLOCK)\n"
        "class Block(PluggableLayer):\n    def forward(self, x):\n        return x\n"
        "@CustomOp.register(name=NAME)\n"
        "class Unknown(CustomOp):\n    def forward_native(self, x):\n        return x\n"
        "@CustomOp.register_oot(REPLACED)\n"
        "class Mine(SiluAndMul):\n    def forward_oot(self, x):\n        return x\n"
    )
    assert [(c["registered"], c["replaces"]) for c in found["classes"]] == [
        ("my_block", None),
        (None, None),
        (None, "silu_and_mul"),
    ]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "Cannot read"),
        (b"def f(:", "is not Python"),
        (b"\xff\xfe\x00", "is not Python"),
        (b"a = 1\x00", "is not Python"),
        (b"(" * 500, "is not Python"),
        (b"x = " + b"-" * 20_000 + b"1", "is nested too deeply"),
        (b"", "defines no layer"),
        (b"class A:\n    pass\n", "defines no layer"),
        (b"def f(:", "(bad.py, line 1)"),
        (b"class A(CustomOp):\n    pass\n" * 2, "two layers called A, in lines 1 and 3. Rename"),
    ],
)
def test_bad_input_is_one_line(content: bytes | None, part: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    if content is not None:
        path.write_bytes(content)
    assert_one_line_error(run("migrate", path), part, "bad.py")
    assert_one_line_error(run("migrate", tmp_path), "Cannot read")
