"""``opweave migrate`` keeps comments, blank lines, docstrings and formatting."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from test_cli import Run, assert_one_line_error
from test_cli import run as run  # the fixture

MODULE = '''\
# Copyright of the module.
"""Custom ops.

Two paragraphs, "quoted".
"""

import torch  # the library

# vLLM's base class
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import (  # one of ours
    SiluAndMul,
)

LIMITS = {
    "low":  0,   # aligned by hand
    "high": 0x10,
}


def  helper( x ):  # odd spacing
    return x [ 0 ]


# A section.

# Scales its input.
@CustomOp.register("scaled")  # its name
class Scaled(CustomOp):
    """Multiply by a factor.

    In two paragraphs.
    """

    # The factor.
    factor_note = 'single quotes'

    def __init__(self, factor: float):  # no default
        super().__init__()
        self.factor = factor  # kept


        self.op = torch.ops.mine.scaled  # the kernel

    # The meaning.
    def forward_native(
        self,
        x: torch.Tensor,  # rows
    ) -> torch.Tensor:
        """Return *x* scaled.

        Not in place.
        """
        # first
        y = (x *
             self.factor)  # multiplied

        return y
        # at the end

    # On NVIDIA's devices.
    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x, (self.factor))  # parentheses kept

    def extra_repr(self) -> str:  # for print
        return f'factor={self.factor}'


class Mine(SiluAndMul):
    """A faster one."""

    # Needs torch_npu.
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        import torch_npu  # here

        return torch_npu.npu_swiglu(x)


# Registered here.
TABLE = {
    "SiluAndMul": Mine,
    # Not of this file.
    "QuickGELU": Other,  # comes later
}
for name, cls in TABLE.items():
    CustomOp.register_oot(_decorated_op_cls=cls, name=name)  # both

# The end.
'''

MIGRATED = '''\
# Copyright of the module.
"""Custom ops.

Two paragraphs, "quoted".
"""

from __future__ import annotations

import torch  # the library

# vLLM's base class
from opweave.layers import CustomOp
from opweave import ir
from opweave.ir import rules

LIMITS = {
    "low":  0,   # aligned by hand
    "high": 0x10,
}


def  helper( x ):  # odd spacing
    return x [ 0 ]


# The meaning.
@ir.register_op(name="scaled")
def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return *x* scaled.

    Not in place.
    """
    # first
    y = (x *
         factor)  # multiplied

    return y
    # at the end


# On NVIDIA's devices.
@ir.ops.scaled.register_impl("mine", supports_args=rules.cuda("x"))
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.ops.mine.scaled(x, (factor))  # parentheses kept


# A section.

# Scales its input.
@CustomOp.register("scaled")  # its name
class Scaled(CustomOp):
    """Multiply by a factor.

    In two paragraphs.
    """

    # The factor.
    factor_note = 'single quotes'

    def __init__(self, factor: float):  # no default
        super().__init__()
        self.factor = factor  # kept

    def forward_native(
        self,
        x: torch.Tensor,  # rows
    ) -> torch.Tensor:
        return ir.ops.scaled.native(x, self.factor)

    def forward_cuda(
        self,
        x: torch.Tensor,  # rows
    ) -> torch.Tensor:
        return ir.ops.scaled(x, self.factor)

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def extra_repr(self) -> str:  # for print
        return f'factor={self.factor}'


# Needs torch_npu.
@ir.ops.silu_and_mul.register_impl("torch_npu", supports_args=rules.device("npu", "x"))
def _(x: torch.Tensor) -> torch.Tensor:
    """A faster one."""
    import torch_npu  # here

    return torch_npu.npu_swiglu(x)


# Registered here.
TABLE = {
    # Not of this file.
    "QuickGELU": Other,  # comes later
}
for name, cls in TABLE.items():
    CustomOp.register_oot(_decorated_op_cls=cls, name=name)  # both

# The end.
'''


def migrated(run: Run, path: Path) -> str:
    text: str = json.loads(run("migrate", path, "--json").stdout)["sketch"]
    return text


def comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sorted(token.string for token in tokens if token.type == tokenize.COMMENT)


def test_only_what_changes_is_rewritten(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "my_ops.py"
    path.write_text(MODULE)
    text = migrated(run, path)
    assert text == MIGRATED
    # Dropped with their statements; the signature's comment is there twice.
    dropped = {"# one of ours", "# the kernel"}
    assert set(comments(MODULE)) - set(comments(text)) == dropped
    assert comments(text).count("# rows") == 2


def test_other_layouts_are_kept(run: Run, tmp_path: Path) -> None:
    tabs = MODULE.replace("    ", "\t").replace("             self", "\t\t self")
    path = tmp_path / "my_ops.py"
    path.write_text(tabs)
    assert "\tdef extra_repr(self) -> str:  # for print\n\t\treturn" in migrated(run, path)
    path.write_bytes(MODULE.replace("\n", "\r\n").encode())
    text = migrated(run, path)
    assert "# first\r\n" in text
    compile(text, "my_ops.py", "exec")


def test_the_text_is_utf_8_and_does_not_say_otherwise(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "my_ops.py"
    path.write_text("# -*- coding: gbk -*-\n# 算子\n" + MODULE, encoding="gbk")
    text = migrated(run, path)
    assert text.startswith("# 算子\n# Copyright of the module.\n")


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_without_libcst_the_error_names_the_extra(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "my_ops.py"
    path.write_text(MODULE)
    program = (
        "import sys; sys.modules['libcst'] = None; from opweave_cli import main; "
        f"sys.argv = ['opweave', 'migrate', {str(path)!r}, *{arguments!r}]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert_one_line_error(done, "libcst", "pip install 'opweave-vllm[migrate]'")
