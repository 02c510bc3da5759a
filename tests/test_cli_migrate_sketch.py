"""``opweave migrate``: sketches of modules that are not as plain as the one in test_cli_migrate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from test_cli import Run
from test_cli import run as run  # the fixture
from test_cli_migrate import notes

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


@pytest.mark.parametrize(
    ("body", "argument"),
    [
        ("torch.mul(x, 2, out=y); return y + 1", "y"),
        ("z = x; z.mul_(2); return z + 1", "x"),
        ("return x.view(-1)", "x"),
        ("return x[..., :2].T", "x"),
        ("a, b = x.chunk(2); a += 1; return b * 2", "x"),
        ("torch.relu_(x); return x * 2", "x"),
        ("return torch.nn.functional.relu(x, inplace=True) * 2", "x"),
        ("a, b = y, x; return a * b", None),
        ("z = x; z = z * 2; z.mul_(2); return z", None),
        ("return x[y]", None),
        ("def inner(a):\n            return x\n        return inner(1) * 2", None),
    ],
)
def test_views_and_other_names_are_the_argument(
    body: str, argument: str | None, migrate: Migrate
) -> None:
    found = migrate(
        '@CustomOp.register("a")\nclass A(CustomOp):\n'
        f"    def forward_native(self, x: Tensor, y: Tensor) -> Tensor:\n        {body}\n"
    )
    told = f"it writes to its argument {argument}, or returns it"
    assert (told in notes(found, "A")) is (argument is not None)
    assert ("is no op" in notes(found, "A")) is (argument is not None)
