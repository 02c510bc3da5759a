"""``opweave migrate`` on modules written as packages for vLLM write them."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from support.fixtures import FreshPython
from test_cli import Run
from test_cli import run as run  # the fixture
from test_cli_migrate import HEAD, Migrate, becomes, notes
from test_cli_migrate import migrate as migrate  # the fixture


def parameters_of(found: dict[str, Any], function: str) -> dict[str, str]:
    """Return the annotations of a function of the new module."""
    for node in ast.parse(found["sketch"]).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            arguments = [each for each in node.args.args if each.annotation]
            return {a.arg: ast.unparse(a.annotation) for a in arguments if a.annotation}
    raise AssertionError(f"no function {function} in:\n{found['sketch']}")


def test_attributes_have_the_types_of_their_annotations_and_values(migrate: Migrate) -> None:
    found = migrate("""
@CustomOp.register("typed")
class Typed(CustomOp):
    eps: float
    def __init__(self, groups, ratio: float, scale=None, limit=0.5, on=False):
        super().__init__()
        self.eps = groups.eps
        self.beta: float | None = scale
        self.tp = get_tensor_model_parallel_world_size()
        self.group_size = groups
        self.half = self.tp // 2
        self.part = self.tp / 2
        self.mean = ratio * 2
        self.limit = limit
        self.off = not on
        self.use_bias = groups.bias
    def forward_native(self, x: Tensor) -> Tensor:
        y = x * self.eps * self.tp * self.half * self.part * self.mean * self.limit
        if self.off or self.use_bias:
            y = y * self.group_size
        return y if self.beta is None else y * self.beta
""")
    types = parameters_of(found, "_typed")
    assert types == {
        "x": "Tensor",
        **dict.fromkeys(("eps", "part", "mean", "limit"), "float"),
        **dict.fromkeys(("tp", "half", "group_size"), "int"),
        **dict.fromkeys(("off", "use_bias"), "bool"),
        "beta": "float | None",
    }
    guesses = [each for each in found["classes"][0]["notes"] if "is a guess" in each]
    assert len(guesses) == 2  # group_size and use_bias, by their names


def test_an_argument_of_another_type_is_not_an_op(migrate: Migrate) -> None:
    found = migrate("""
@CustomOp.register("typed")
class Typed(CustomOp):
    def forward_native(self, x: Tensor, metadata: object | None = None) -> Tensor:
        return x * 2
""")
    assert "the type of metadata is object | None" in notes(found, "Typed")
    assert "register_op" not in found["sketch"]


def test_a_static_forward_native_is_an_op(migrate: Migrate, fresh_python: FreshPython) -> None:
    found = migrate("""
@CustomOp.register("doubled")
class Doubled(CustomOp):
    @staticmethod
    def forward_native(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by
    def forward_cuda(self, x: Tensor, by: float = 2.0) -> Tensor:
        return torch.mul(x, by)
""")
    assert becomes(found, "Doubled")[0] == ("op", "doubled")
    assert parameters_of(found, "_doubled") == {"x": "Tensor", "by": "float"}
    fresh_python(
        """
        import torch, my_ops
        assert my_ops.Doubled()(torch.ones(1), 3.0).item() == 3.0
        assert my_ops.Doubled().forward_native(torch.ones(1)).item() == 2.0
        """
    )


def test_other_registries_and_other_classes_are_not_layers(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("""
from vllm.third_party.norms import RMSNorm
from vllm.multimodal.video import VIDEO_REGISTRY
from vllm.model_executor.custom_op import CustomOp

@VIDEO_REGISTRY.register("fast")
class Backend:
    pass

class Mine(RMSNorm):
    pass

@CustomOp.register("layer")
class Layer(CustomOp):
    pass
""")
    found = json.loads(run("migrate", tmp_path / "a.py", "--json").stdout)
    assert [each["class"] for each in found["classes"]] == ["Layer"]


def test_a_layer_of_opweaves_name_is_not_registered(migrate: Migrate) -> None:
    found = migrate(
        """
# A fork of vLLM's.
@PluggableLayer.register("replicated_linear")
@final
class ReplicatedLinear(PluggableLayer):
    pass
""",
        head=HEAD + "from vllm.model_executor.custom_op import PluggableLayer\n"
        "from typing import final\n",
    )
    assert ".register(" not in found["sketch"]
    assert "# A fork of vLLM's.\n@final\nclass ReplicatedLinear" in found["sketch"]
    assert "opweave registers opweave.layers.ReplicatedLinear" in notes(found, "ReplicatedLinear")


TABLE = """
from vllm.model_executor.custom_op import CustomOp

def register():
    from .ops.activation import Silu
    from my_package.ops.activation import Gelu, Sigmoid as Other
    OPS = {"SiluAndMul": Silu}
    OPS.update({"QuickGELU": Gelu})
    OPS["FatreluAndMul"] = Other
    for name, cls in OPS.items():
        CustomOp.register_oot(_decorated_op_cls=cls, name=name)
"""
LAYERS = """
import torch_npu
from vllm.model_executor.layers.activation import FatreluAndMul, QuickGELU, SiluAndMul

class Silu(SiluAndMul):
    def forward_oot(self, x):
        # fused
        return torch_npu.npu_swiglu(x)

class Gelu(QuickGELU):
    def forward_oot(self, x):
        return torch_npu.npu_fast_gelu(x)

class Sigmoid(FatreluAndMul):
    def __init__(self):
        super().__init__(threshold=0.5)
    def forward_oot(self, x):
        return torch_npu.npu_sigmoid(x)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "my_package"
    (folder / "ops").mkdir(parents=True)
    for each in (folder, folder / "ops"):
        (each / "__init__.py").touch()
    (folder / "utils.py").write_text(TABLE)
    (folder / "broken.py").write_text("register_oot(\n")
    (folder / "ops" / "activation.py").write_text(LAYERS)
    return folder


def test_registrations_in_another_file_are_followed(run: Run, package: Path) -> None:
    found = json.loads(run("migrate", package / "ops" / "activation.py", "--json").stdout)
    assert becomes(found, "Silu") == [("register_impl", "torch_npu")]
    assert becomes(found, "Gelu") == [("register_impl", "torch_npu")]
    assert becomes(found, "Sigmoid") == [
        ("register_impl", "torch_npu"),
        ("replacement", "FatreluAndMul"),
    ]
    assert "my_package/utils.py registers it: adapt that file." in notes(found, "Silu")
    assert "class Silu" not in found["sketch"]
    assert "    # fused\n    return torch_npu.npu_swiglu(x)" in found["sketch"]
    assert "class Sigmoid(FatreluAndMul)" in found["sketch"]


def test_a_replacement_that_only_forwards_is_dropped(migrate: Migrate) -> None:
    found = migrate("""
@SiluAndMul.register_oot
class Mine(SiluAndMul):
    def forward_oot(self, x):
        return self.forward_cuda(x)
""")
    assert becomes(found, "Mine") == []
    assert "class Mine" not in found["sketch"]


def test_imports_that_split_over_modules_are_rewritten(migrate: Migrate) -> None:
    head = """
import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,  # of opweave
    SomethingOfTheirs,
)
from vllm.model_executor.custom_op import PluggableLayer
"""
    found = migrate(
        "class Mine(PluggableLayer):\n    parts = ColumnParallelLinear, SomethingOfTheirs\n",
        head=head,
    )
    assert "from opweave.layers import ColumnParallelLinear\n" in found["sketch"]
    assert "from vllm.model_executor.layers.linear import SomethingOfTheirs\n" in found["sketch"]
