"""Provider ``liger`` on the real package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from opweave.conformance import Subject, subjects
from opweave.kernels.triton.launch import INTERPRETED
from support.adapter_certificates import verify_adapter

LIGER = subjects(providers=["liger"])
CHECKS = ["values", "none", "dtypes", "empty", "extremes"]


@pytest.fixture(autouse=True)
def _interpreted_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Triton's interpreter what it lacks of a GPU.

    It passes floats to kernels as Python's, which have no ``.to()``, and cannot call CUDA's library
    of mathematical functions.
    """
    if not INTERPRETED:
        return
    import numpy
    from liger_kernel.ops import fused_add_rms_norm, layer_norm, rms_norm
    from triton.language import float32, math, tensor
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        array = numpy.array([value], dtype=numpy.float32)
        return tensor(interpreter.TensorHandle(array, float32), float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)

    def rsqrt(x: Any) -> Any:
        return math.rsqrt(x)  # looked up at each call, because the interpreter replaces it

    for module in (fused_add_rms_norm, layer_norm, rms_norm):
        monkeypatch.setattr(module, "rsqrt", rsqrt)


def test_every_wrapped_function_is_registered() -> None:
    assert len(LIGER) == 4


@pytest.mark.adapter
@pytest.mark.parametrize("subject", LIGER, ids=str)
def test_it_computes_what_native_computes(subject: Subject, device: str) -> None:
    verify_adapter(replace(subject, device=device), CHECKS)
