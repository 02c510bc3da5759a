"""CUDA sources: compiled wherever nvcc is, run where there is a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from opweave import native
from opweave.native import NativeBuildError, NativeModule, toolchain
from support.devices import needs_cuda

SOURCE = Path(__file__).parent / "sources" / "twice.cu"


@pytest.fixture(scope="module")
def twice(native_cache: Path) -> NativeModule:
    try:
        toolchain.nvcc()
    except NativeBuildError as error:
        pytest.skip(str(error))
    return native.load("kit_cuda", [SOURCE])


def test_the_module_serves_the_cpu(twice: NativeModule) -> None:
    x, out = torch.randn(5), torch.empty(5)
    twice.twice(out, x)
    assert torch.equal(out, 2 * x)
    with pytest.raises(RuntimeError, match="twice: x must be float32"):
        twice.twice(out, x.double())
    assert torch._C._dispatch_has_kernel_for_dispatch_key("kit_cuda::twice", "CUDA")


@needs_cuda
def test_on_a_gpu(twice: NativeModule) -> None:
    x = torch.randn(1000, device="cuda")
    for call in (twice.twice, twice.twice.direct, torch.ops.kit_cuda.twice):
        out = torch.empty_like(x)
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            call(out, x)
        torch.cuda.synchronize()
        assert torch.equal(out, 2 * x)
        with pytest.raises(RuntimeError, match="on the same device"):
            call(out, x.cpu())
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    x, out = x.to(last), torch.empty_like(x, device=last)
    twice.twice(out, x)
    assert torch.equal(out, 2 * x)
