"""Provider ``flag_gems`` on the real package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from opweave import ir
from opweave.conformance import Subject, subjects
from opweave.kernels.triton.launch import INTERPRETED
from support.adapter_certificates import verify_adapter

FLAG_GEMS = subjects(providers=["flag_gems"])
CHECKS = ["values", "none", "dtypes", "empty", "extremes"]
SLOW = {"rotary_embedding": ("values", "extremes")}  # minutes in the interpreter
# Triton code is generated for these from pieces that must be compiled.
GENERATED = ("silu_and_mul", "gelu_and_mul")


class FirstConfig:
    """A kernel with the first of the configurations that autotuning would choose from."""

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel = kernel
        self.constants = constants

    def __getitem__(self, grid: Any) -> Any:
        launch = self.kernel[grid]
        return lambda *values, **named: launch(*values, **{**self.constants, **named})


@pytest.fixture(autouse=True, scope="module")
def _interpreted_as_compiled() -> Iterator[None]:
    """Give Triton's interpreter what FlagGems expects of a GPU.

    Its packages ask for the GPU and load all kernels when they are imported; without theirs, only
    the modules of the wrapped functions are. Its launcher caches compiled kernels, and autotuning
    times them.
    """
    if not INTERPRETED:
        yield
        return
    import triton

    def autotune(configs: list[Any], key: object, **options: object) -> Any:
        return lambda kernel: FirstConfig(kernel, configs[0].kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEMS_VENDOR", "nvidia")
        patch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(triton, "autotune", autotune)
        spec = find_spec("flag_gems")
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
        modules: dict[str, Any] = {}
        for name in ("flag_gems", "flag_gems.ops", "flag_gems.fused", "flag_gems.utils"):
            modules[name] = ModuleType(name)
            modules[name].__spec__ = ModuleSpec(name, None, is_package=True)
            modules[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            patch.setitem(sys.modules, name, modules[name])
        modules["flag_gems.utils"].libentry = lambda: lambda kernel: kernel
        for owner, name in (
            ("flag_gems", "runtime"),
            ("flag_gems.utils", "triton_lang_extension"),
            ("flag_gems.utils", "type_utils"),
        ):
            setattr(modules[owner], name, importlib.import_module(f"{owner}.{name}"))
        yield
    for name in [*sys.modules]:
        if name.startswith("flag_gems."):
            del sys.modules[name]


def test_every_wrapped_function_is_registered() -> None:
    assert len(FLAG_GEMS) == 6


@pytest.mark.adapter
@pytest.mark.parametrize("subject", FLAG_GEMS, ids=str)
def test_it_computes_what_native_computes(subject: Subject, device: str) -> None:
    if INTERPRETED and subject.op.name in GENERATED:
        pytest.skip("FlagGems generates code for compiled kernels only")
    slow = SLOW.get(subject.op.name, ()) if INTERPRETED else ()
    verify_adapter(replace(subject, device=device), [name for name in CHECKS if name not in slow])


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("head_size", [16, 48])
def test_heads_are_rotated(is_neox_style: bool, head_size: int, device: str) -> None:
    *arguments, _ = ir.ops.rotary_embedding.generate_inputs(
        head_size=head_size, split_heads=True, negative_positions=True, device=device
    )
    found = ir.ops.rotary_embedding.using("flag_gems!")(*arguments, is_neox_style)
    torch.testing.assert_close(found, ir.ops.rotary_embedding.native(*arguments, is_neox_style))
