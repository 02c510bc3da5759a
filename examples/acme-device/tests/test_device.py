"""acme as a device of torch: creation, views, copies, memory, seeds."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable

import acme_device
import pytest
import torch
from torch import Tensor, nn


def test_names_itself_everywhere() -> None:
    x = torch.ones(2, 3, device="acme")
    assert x.device == torch.device("acme", 0)
    assert str(x.device) == "acme:0"
    assert torch.accelerator.current_accelerator() == torch.device("acme")
    assert "device='acme:0'" in repr(x)
    assert x.new_empty(1).device == torch.zeros_like(x).device == x.device


def test_init_may_be_called_again() -> None:
    acme_device.init()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_round_trip(dtype: torch.dtype) -> None:
    x = torch.randn(5, 7).to(dtype)
    assert torch.equal(x.to("acme").cpu(), x)
    assert torch.equal(x.t().to("acme").cpu(), x.t())
    assert torch.equal(x.to("acme").to(torch.float64).cpu(), x.to(torch.float64))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[1:, ::2],
    "select": lambda x: x[1],
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "view": lambda x: x.view(6, 4),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "expand": lambda x: x[:, :1].expand(2, 5, 4),
    "split": lambda x: x.split([1, 3], dim=2)[1],
    "chunk": lambda x: x.chunk(2, dim=2)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "squeeze": lambda x: x[:1].squeeze(0),
    "as_strided": lambda x: x.as_strided((2, 2), (3, 1), 5),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "view_dtype": lambda x: x.view(torch.int32),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_memory(name: str) -> None:
    host = torch.arange(24.0).view(2, 3, 4)
    x, y = host.clone(), host.to("acme")
    expected, view = VIEWS[name](x), VIEWS[name](y)
    assert view.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert (view.shape, view.stride()) == (expected.shape, expected.stride())
    assert torch.equal(view.cpu(), expected)
    view.fill_(7)
    expected.fill_(7)
    assert torch.equal(y.cpu(), x)
    assert acme_device.fallbacks() == {}


def test_writes() -> None:
    x = torch.zeros(3, 4, device="acme")
    x[1] = 5
    x[:, 2] += 1
    x[0, 0].copy_(torch.tensor(9.0))
    assert x.tolist() == [[9, 0, 1, 0], [5, 5, 6, 5], [0, 0, 1, 0]]
    assert x[1, 2].item() == 6


def test_resize_and_set() -> None:
    x = torch.arange(4.0).to("acme")
    assert x.resize_(2, 5)[0, :4].tolist() == [0, 1, 2, 3]
    empty = torch.empty(0, device="acme")
    assert empty.set_(x.untyped_storage(), 1, (2,), (2,)).tolist() == [1, 3]
    assert empty.set_(x).shape == (2, 5)
    assert empty.set_().numel() == 0


def test_copy_pickle_and_modules() -> None:
    x = torch.randn(3, 4).to("acme")
    assert torch.equal(copy.deepcopy(x).cpu(), x.cpu())
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.device == x.device
    assert torch.equal(loaded.cpu(), x.cpu())
    module = nn.Linear(4, 2)
    expected = module(x.cpu())
    assert torch.allclose(module.to("acme")(x).cpu(), expected)


def test_fallback_is_right_and_counted() -> None:
    x = torch.randn(4, 5)
    assert torch.equal(torch.sort(x.to("acme"))[1].cpu(), torch.sort(x)[1])
    assert torch.cat([x.to("acme")] * 2).device.type == "acme"
    y = x.to("acme")
    y.mul_(2)  # what the host changes comes back
    assert torch.equal(y.cpu(), x * 2)
    assert acme_device.fallbacks()["aten::cat.out"] == 1
    assert acme_device.fallbacks()["aten::mul.out"] == 1


def test_seeds_give_the_hosts_numbers() -> None:
    torch.manual_seed(3)
    first = torch.randn(5, device="acme")
    torch.manual_seed(3)
    assert torch.equal(first.cpu(), torch.randn(5))
    with torch.random.fork_rng():
        torch.acme.manual_seed_all(3)
        assert torch.equal(first.cpu(), torch.randn(5, device="acme").cpu())


def test_memory_is_counted_and_limited() -> None:
    before = torch.acme.memory_allocated()
    x = torch.empty(1000, device="acme")
    assert torch.acme.memory_allocated() - before == 4000
    del x
    assert torch.acme.memory_allocated() == before
    free, total = torch.acme.mem_get_info()
    assert (free, total) == (total - before, 4 << 30)
    with pytest.raises(torch.OutOfMemoryError, match="acme:0 is out of memory"):
        torch.empty(1 << 40, device="acme")


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no such device": (lambda: torch.empty(1, device="acme:5"), "no acme:5"),
    "set_device": (lambda: torch.acme.set_device(5), "no acme:5"),
    "pinned": (lambda: torch.empty(1, device="acme", pin_memory=True), "only tensors on the host"),
    "generator": (lambda: torch.Generator("acme"), "draws on the host"),
    "an unsupported view": (
        lambda: torch.view_as_complex(torch.zeros(2, 2, device="acme")),
        "view operator",
    ),
    "mixed devices": (
        lambda: torch.zeros(2, device="acme") + torch.zeros(2),
        "same device",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(RuntimeError, match=message):
        call()


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", f"import acme_device, torch; acme_device.init()\n{code}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_two_devices() -> None:
    code = """
x, y = torch.ones(2, device="acme:0"), torch.arange(2, device="acme:1")
assert (y.device.index, torch.acme.current_device()) == (1, 0)
with torch.acme.device(1):
    assert torch.empty(1, device="acme").device.index == 1
assert x.to("acme:1").device.index == 1 and x.to("acme:1").resize_(9).device.index == 1
assert torch.acme.memory_allocated(1) == 16, torch.acme.memory_allocated(1)
try:
    x + y
except RuntimeError as error:
    assert "acme:0 and acme:1" in str(error), error
else:
    raise SystemExit("no error")
"""
    done = run(code, ACME_DEVICES="2")
    assert done.returncode == 0, done.stderr


def test_a_write_behind_a_block_ends_the_process() -> None:
    done = run(
        "import ctypes; x = torch.zeros(10, device='acme')\n"
        "ctypes.memset(x.data_ptr() + 41, 0, 1); del x; print('lived')"
    )
    assert done.returncode != 0
    assert "lived" not in done.stdout
    assert "byte 1 behind a block of 40 bytes was overwritten" in done.stderr


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from acme_device import driver

    monkeypatch.setattr(driver, "_loaded", False)
    with pytest.raises(acme_device.AcmeError, match="'acme' has taken it"):
        acme_device.init()
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "privateuseone")
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(acme_device.AcmeError, match=r"built for torch 2\.\d+\.\*; this is 2.99.0"):
        acme_device.init()
