"""``opweave migrate``: sketches of modules that are not as plain as the one in test_cli_migrate."""

from __future__ import annotations

import ast
import json
import time
from pathlib import Path

import pytest

from support.fixtures import FreshPython
from test_cli import Run, assert_one_line_error
from test_cli import run as run  # the fixture
from test_cli_migrate import HEAD, Migrate, becomes, notes
from test_cli_migrate import migrate as migrate

SHADOW = """
alpha = 0.5
@CustomOp.register("shadow")
class Shadow(CustomOp):
    def __init__(self, a: float):
        super().__init__()
        self.alpha = a
    def forward_native(self, x: Tensor) -> Tensor:
        return x * alpha * self.alpha
"""


def test_an_argument_hides_no_global(migrate: Migrate, fresh_python: FreshPython) -> None:
    found = migrate(
        SHADOW + '@CustomOp.register_oot("shadow")\nclass Mine(Shadow):\n'
        "    def forward_oot(self, x):\n        return x * alpha_ * self.alpha\n"
    )
    assert "an argument would hide the alpha_ that it reads" in notes(found, "Mine")
    fresh_python(
        """
        import torch, my_ops
        assert my_ops.ir.ops.shadow(torch.ones(2), 3.0).tolist() == [1.5, 1.5]
        """
    )


REGISTERED = """
class Mine(SiluAndMul):
    def forward_oot(self, x: Tensor) -> Tensor:
        import torch_npu
        return torch_npu.npu_swiglu(x)

REGISTERED = {"SiluAndMul": Mine}
for name, cls in REGISTERED.items():
    CustomOp.register_oot(_decorated_op_cls=cls, name=name)
"""


def test_registrations_of_other_classes_stay(migrate: Migrate) -> None:
    found = migrate(
        "from .acts import TABLE, AscendGelu\nseen = []\nfor n, c in TABLE.items():\n"
        "    seen.append(n)\n    CustomOp.register_oot(_decorated_op_cls=c, name=n)\n"
        'CustomOp.register_oot(_decorated_op_cls=AscendGelu, name="QuickGELU")\n' + REGISTERED
    )
    assert "seen.append(n)" in found["sketch"]
    assert 'register_oot(_decorated_op_cls=AscendGelu, name="QuickGELU")' in found["sketch"]
    assert [note.partition(",")[0] for note in found["notes"]] == [
        "Line 8 registers classes",
        "Line 11 registers AscendGelu",
    ]


def test_a_class_that_goes_leaves_its_registrations(migrate: Migrate) -> None:
    found = migrate(REGISTERED)
    assert becomes(found, "Mine") == [("register_impl", "torch_npu")]
    assert "REGISTERED" not in found["sketch"]
    assert "Mine" not in found["sketch"]
    found = migrate(REGISTERED.replace("Mine}", 'Mine, "QuickGELU": Gelu}'))
    assert 'REGISTERED = {"QuickGELU": Gelu}' in found["sketch"]
    assert "for name, cls in REGISTERED.items()" in found["sketch"]
    assert "Line 13 registers Gelu" in found["notes"][0]


def test_a_class_that_the_file_uses_stays(migrate: Migrate) -> None:
    found = migrate(REGISTERED + "class Sub(Mine):\n    pass\n")
    assert becomes(found, "Mine") == [("register_impl", "torch_npu"), ("replacement", "SiluAndMul")]
    assert "the file uses the class" in notes(found, "Mine")
    assert "class Mine(SiluAndMul)" in found["sketch"]
    assert "REGISTERED.items()" in found["sketch"]


def test_registrations_in_functions(migrate: Migrate) -> None:
    found = migrate(
        "class Mine(SiluAndMul):\n    def forward_oot(self, x):\n        return x * 1\n"
        "class Other(SiluAndMul):\n    pass\n"
        "def register():\n"
        '    CustomOp.register_oot(_decorated_op_cls=Mine, name="SiluAndMul")\n'
        "    class Inner(SiluAndMul):\n        pass\n"
        "if True:\n    class Block(CustomOp):\n        pass\n"
    )
    assert becomes(found, "Mine") == [("register_impl", "my_ops")]
    assert becomes(found, "Other") == [("layer", "Other")]
    assert "Mine" not in found["sketch"]
    assert [note.partition(" inside")[0] for note in found["notes"]] == [
        "Line 13 defines Inner",
        "Line 16 defines Block",
    ]


HAND = """
@CustomOp.register("scale_it")
class ScaleIt(CustomOp):
    def __init__(self, k: float):
        super().__init__()
        self.k, self.calls = k, 0
        self.k = k
        self.op = torch.ops.aten.mul
    def forward_native(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * self.k * scale
    def forward_cuda(self, x, scale: float = 1.0):
        self.calls += 1
        return self.op(x, self.k * 100)
    def forward_cpu(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.op(x, self.k * scale)
    def forward_oot(self, x, scale: float = 2.0):
        return x * scale
    forward_xpu = forward_cuda
    forward_tpu = forward_native
"""


def test_what_needs_a_hand_stays(migrate: Migrate, fresh_python: FreshPython) -> None:
    found = migrate(HAND)
    assert "forward_cuda needs manual work: it assigns self.calls" in notes(found, "ScaleIt")
    assert "its default of scale is 2.0, but that of ir.ops.scale_it 1.0" in notes(found, "ScaleIt")
    fresh_python(
        """
        import torch, my_ops
        layer, x = my_ops.ScaleIt(3.0), torch.ones(1)
        methods = ["native", "cuda", "hip", "cpu", "xpu", "tpu", "oot"]
        results = [getattr(layer, "forward_" + each)(x).item() for each in methods]
        assert results == [3, 300, 300, 3, 300, 3, 2], results
        assert layer.calls == 3
        """
    )


def test_a_replacement_keeps_what_needs_a_hand(migrate: Migrate) -> None:
    found = migrate(
        "class Mine(SiluAndMul):\n    def forward_oot(self, x):\n        return x * 1\n"
        "    def forward_cuda(self, x, extra: int = 0):\n        return x * extra\n"
        'CustomOp.register_oot(_decorated_op_cls=Mine, name="SiluAndMul")\n'
    )
    assert becomes(found, "Mine") == [("register_impl", "my_ops"), ("replacement", "SiluAndMul")]
    assert "forward_cuda needs manual work: extra is not an argument" in notes(found, "Mine")
    assert "return x * extra" in found["sketch"]


def test_another_name_of_a_kernel_is_an_implementation(migrate: Migrate) -> None:
    found = migrate(
        '@CustomOp.register("twice")\nclass Twice(CustomOp):\n'
        "    def forward_native(self, x):\n        return x * 2\n"
        "    def forward_cuda(self, x):\n        return torch.ops.mine.twice(x)\n"
        "    forward_xpu = forward_cuda\n"
        "    def forward_hip(self, *a, **k):\n        return self.forward_cuda(*a, **k)\n"
        "    def forward_tpu(self, x):\n        return self.forward_cuda(x)\n"
    )
    assert becomes(found, "Twice") == [
        ("op", "twice"),
        ("register_impl", "mine"),
        ("register_impl", "mine_xpu"),
        ("register_impl", "mine_tpu"),
        ("layer", "twice"),
    ]


def test_a_tensor_that_an_op_makes_is_no_kernel(
    migrate: Migrate, fresh_python: FreshPython
) -> None:
    migrate(
        '@CustomOp.register("packed")\nclass Packed(CustomOp):\n'
        "    def __init__(self, size: int):\n        super().__init__()\n"
        "        self.packed = torch.ops.aten.mul.Tensor(torch.ones(size), torch.ones(size))\n"
        "    def forward_native(self, x: Tensor) -> Tensor:\n        return x * self.packed\n"
    )
    fresh_python("import torch, my_ops; my_ops.Packed(2)(torch.ones(2))")


PARTS = """
from vllm.model_executor.layers import linear
from vllm.platforms import current_platform
from vllm import ir

@VllmCustomOp.register("plus_one")
class PlusOne(VllmCustomOp):
    def __init__(self, has_weight: bool):
        super().__init__()
        if has_weight:
            self.weight = nn.Parameter(torch.ones(1) * 3)
        else:
            self.weight = None
    @staticmethod
    def compute(x):
        return x + 1
    def forward_native(self, x: "Tensor") -> "Tensor":
        y = self.compute(x)
        return y if self.weight is None else y * self.weight
    forward_oot = forward_native
    def twice(self, x):
        return self.compute(self.compute(x))

@VllmCustomOp.register("activated")
class Activated(VllmCustomOp):
    def __init__(self):
        super().__init__()
        self.act = torch.nn.SiLU()
    def forward_native(self, x):
        return self.act(x)

def on_cpu():
    return current_platform.is_cpu() and ir.ops
def with_linear():
    return linear.ReplicatedLinear
"""


def test_the_parts_of_a_class_that_stays(migrate: Migrate, fresh_python: FreshPython) -> None:
    found = migrate(PARTS, head=HEAD.replace("import CustomOp", "import CustomOp as VllmCustomOp"))
    assert "it calls self.act" in notes(found, "Activated")
    assert found["imports_left"] == ["vllm.model_executor.layers"]
    left = "from vllm.model_executor.layers import linear\n"
    Path(found["file"]).write_text(found["sketch"].replace(left, ""))
    fresh_python(
        """
        import torch, my_ops
        x = torch.ones(1)
        for weight, expected in (False, 2), (True, 6):
            layer = my_ops.PlusOne(weight)
            assert layer(x).item() == layer.forward_oot(x).item() == expected
            assert layer.twice(1) == my_ops.PlusOne.compute(2) == 3
        my_ops.Activated()(x)
        my_ops.on_cpu()
        """
    )


def test_a_migrated_file_stays_as_it_is(migrate: Migrate) -> None:
    once = migrate(HAND + SHADOW)
    again = migrate(once["sketch"], head="")
    assert "Its op is ir.ops.scale_it already" in notes(again, "ScaleIt")
    assert ast.dump(ast.parse(again["sketch"])) == ast.dump(ast.parse(once["sketch"]))


def test_a_guess_of_what_is_returned_is_noted(migrate: Migrate) -> None:
    text = '@CustomOp.register("a")\nclass A(CustomOp):\n    def forward_native(self, x)%s:\n'
    guess = "The return type is a guess: torch.Tensor."
    body = "        return torch.topk(x, 2)\n"
    assert guess in notes(migrate(text % "" + body), "A")
    assert guess not in notes(migrate(text % " -> tuple[Tensor, Tensor]" + body), "A")


def test_names_that_are_none(migrate: Migrate, fresh_python: FreshPython) -> None:
    layer = "class {}(CustomOp):\n    def forward_native(self, x: Tensor) -> Tensor:\n"
    layer += "        return x * 1\n    def forward_cpu(self, x):\n        return x.mul(1)\n"
    found = migrate(
        "from vllm.utils import *\n"
        f'@CustomOp.register("my-op")\n{layer.format("A")}'
        f'@CustomOp.register("rms_norm")\n{layer.format("B")}'
        f'@CustomOp.register("lambda")\n{layer.format("C")}',
        name="3d_ops.py",
    )
    assert "'my-op' cannot name a layer: it should be an identifier" in notes(found, "A")
    assert becomes(found, "A")[:2] == [("op", "my_op"), ("register_impl", "_3d_ops")]
    assert becomes(found, "B")[:2] == [("op", "_3d_ops_rms_norm"), ("register_impl", "_3d_ops")]
    assert becomes(found, "C")[0] == ("op", "lambda_op")
    assert "from vllm.utils import *" in found["sketch"]
    assert found["imports_left"] == ["vllm.utils"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "gbk"])
def test_python_in_another_encoding(encoding: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "my_ops.py"
    path.write_text(f"# -*- coding: {encoding} -*-\n# 算子\n{HEAD}{SHADOW}", encoding=encoding)
    assert becomes(json.loads(run("migrate", path, "--json").stdout), "Shadow")


def test_a_notebook_is_said_to_be_one(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "ops.ipynb"
    path.write_text('{"cells": []}')
    assert_one_line_error(run("migrate", path), "is a notebook", "ops.ipynb")


@pytest.mark.timed
def test_a_long_file_takes_no_time_squared(migrate: Migrate) -> None:
    def seconds(count: int) -> float:
        layers = [
            SHADOW.replace("shadow", f"shadow_{i}").replace("Shadow", f"Shadow{i}")
            + "    def forward_cuda(self, x):\n        return torch.ops.mine.f(x, self.alpha)\n"
            for i in range(count)
        ]
        start = time.process_time()
        migrate("".join(layers))
        return time.process_time() - start

    seconds(1)
    assert seconds(120) < 10 * seconds(30)
