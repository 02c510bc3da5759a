"""rms_norm in MindSpore against its definition in float64."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mindspore
from mindspore import Tensor
from opweave_mindspore import _custom_ops

Array = NDArray[Any]
UNITS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SHAPES = [(1,), (7,), (1, 64), (3, 5), (2, 3, 37), (17, 256), (4, 1000), (1, 1, 1, 33)]


def rounded(values: Array, dtype: str) -> Array:
    """Round float32 values to the nearest value of *dtype*, ties to even."""
    values = values.astype(np.float32)
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float32)
    bits = values.view(np.uint32)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return upper.astype(np.uint32).view(np.float32)


def reference(x: Array, weight: Array | None, epsilon: float, dtypes: tuple[str, str]) -> Array:
    exact = x.astype(np.float64)
    y = (exact / np.sqrt((exact**2).mean(-1, keepdims=True) + epsilon)).astype(np.float32)
    if weight is not None:
        y = rounded(rounded(y, dtypes[1]) * weight, dtypes[1])
    return rounded(y, dtypes[0])


def tensor(values: Array, dtype: str) -> tuple[Tensor, Array]:
    """A tensor and the values that it holds."""
    return Tensor(values, getattr(mindspore, dtype)), rounded(values, dtype)


def as_float32(t: Tensor) -> Array:
    values: Array = t.astype(mindspore.float32).asnumpy()
    return values


def assert_near(found: Tensor, wanted: Array, dtype: str) -> None:
    """Within two units in the last place; in 16 bits, nearly every element is equal."""
    assert str(found.dtype).lower() == dtype
    values = as_float32(found)
    rtol = 1e-5 if dtype == "float32" else 2 * UNITS[dtype]
    np.testing.assert_allclose(values, wanted, rtol=rtol, atol=1e-6)
    if dtype != "float32" and wanted.size >= 1000:
        assert (values == wanted).mean() > 0.99


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("weight_kind", ["none", "same", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(seed: int, dtype: str, weight_kind: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    weight_dtype = dtype if weight_kind == "same" else "float32"
    for epsilon in (1e-6, 0.1):
        x, x_values = tensor(rng.standard_normal(shape).astype("f4"), dtype)
        weight, weight_values = None, None
        if weight_kind != "none":
            row = 1 + 0.5 * rng.standard_normal(shape[-1]).astype("f4")
            weight, weight_values = tensor(row, weight_dtype)
        found = _custom_ops.rms_norm(x, weight, epsilon)
        wanted = reference(x_values, weight_values, epsilon, (dtype, weight_dtype))
        assert_near(found, wanted, dtype)
        np.testing.assert_array_equal(as_float32(x), x_values)


def test_rows_with_gaps(seed: int) -> None:
    wide, values = tensor(
        np.random.default_rng(seed).standard_normal((6, 40)).astype("f4"), "float32"
    )
    found = _custom_ops.rms_norm(wide[::2, 3:36], None, 1e-6)
    assert_near(found, reference(values[::2, 3:36], None, 1e-6, ("float32", "float32")), "float32")


def test_between_other_operators(seed: int) -> None:
    """The operator before has not run yet when the call is made, and another follows at once."""
    rng = np.random.default_rng(seed)
    for _ in range(200):
        x, values = tensor(rng.standard_normal((4, 16)).astype("f4"), "float32")
        found = _custom_ops.rms_norm(x * 2, None, 1e-6) * 2
        wanted = 2 * reference(2 * values, None, 1e-6, ("float32", "float32"))
        assert_near(found, wanted, "float32")


def test_memory_is_given_back() -> None:
    x = Tensor(np.ones((64, 1024), "f4"))
    for _ in range(2000):  # half a gigabyte if every result stayed
        found = _custom_ops.rms_norm(x, None, 0.0)
    assert (found.asnumpy() == 1).all()


def test_errors_at_the_call() -> None:
    """``launch_blocking`` is for debugging: errors are raised by the call itself."""
    code = """
    import mindspore, numpy
    from opweave_mindspore import _custom_ops
    mindspore.runtime.launch_blocking()
    try:
        _custom_ops.rms_norm(mindspore.Tensor(numpy.ones((2, 8))), None, 1e-6)
    except RuntimeError as error:
        assert "rms_norm: x must be float32" in str(error)
    else:
        raise SystemExit("no error")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_empty() -> None:
    assert _custom_ops.rms_norm(mindspore.mint.zeros((0, 8)), None, 1e-6).shape == (0, 8)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (np.ones((2, 8), "f8"), None, "x must be float32 or bfloat16 or float16, found float64"),
        (np.ones((2, 8), "f4"), np.ones(7, "f4"), r"weight must be None or have shape \[8\]"),
        (np.ones((2, 8), "f4"), np.ones(8, "f2"), "weight must be float32"),
    ],
)
def test_refusals(x: Array, weight: Array | None, message: str) -> None:
    found = _custom_ops.rms_norm(Tensor(x), None if weight is None else Tensor(weight), 1e-6)
    with pytest.raises(RuntimeError, match=f"rms_norm: {message}"):
        found.asnumpy()
