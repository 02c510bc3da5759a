"""Compiled kernels are launched directly, and only for arguments that they were compiled for."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import combinations_with_replacement
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.kernels.triton import launch as module
from opweave.kernels.triton.launch import INTERPRETED, Kernel, key_of, launch

from .fake_driver import DEVICE, LAUNCHED, Launched, SilentLauncher, fake_driver

triton: Any = pytest.importorskip("triton")

MEMORY = torch.zeros(64, dtype=torch.float32)
VALUES: list[Any] = [
    *(-(2**63), -(2**31) - 1, -(2**31), -16, -1, 0, 1, 2, 16, 17, 2**31 - 16, 2**31 - 1),
    *(2**31, 2**31 + 1, 2**63 - 16, 2**63 - 1, 2**63, 2**64 - 1),
    *(None, True, False, 0.0, 1.0, 16.5, float("inf")),
    *(MEMORY[i:] for i in range(5)),
    *(MEMORY.to(torch.bfloat16)[i:] for i in (0, 7, 8)),
    torch.nn.Parameter(MEMORY[4:]),
]


def backend_of(name: str, arch: int | str) -> Any:
    return triton.compiler.make_backend(triton.backends.compiler.GPUTarget(name, arch, 32))


@pytest.mark.parametrize(("name", "arch"), [("cuda", 90), ("hip", "gfx942")])
def test_keys_are_equal_where_triton_compiles_one_kernel(
    name: str, arch: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HAS_RANGES", name == "hip")
    specialize = triton.runtime.jit.native_specialize_impl
    backend = backend_of(name, arch)
    large = torch.empty(2**31 + 16, dtype=torch.int8)
    values = [*VALUES, large, large[:16], torch.empty(16, dtype=torch.int8)]
    for one, other in combinations_with_replacement(values, 2):
        expected = specialize(backend, one, False, True, True) == specialize(
            backend, other, False, True, True
        )
        assert (key_of(0, [one], {}) == key_of(0, [other], {})) == expected, (one, other)


def test_keys_differ_by_device_and_constants() -> None:
    constants = [{}, {"A": 1}, {"A": 2}, {"B": 1}, {"A": 1, "B": 2}, {"A": 2, "B": 1}]
    keys = {key_of(device, [MEMORY, 3], each) for device in (0, 1) for each in constants}
    assert len(keys) == 12


class FakeLauncher(SilentLauncher):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(
        self,
        gridX: int,  # noqa: N803 (as in Triton)
        gridY: int,  # noqa: N803
        gridZ: int,  # noqa: N803
        stream: int,
        function: int,
        *args: Any,
    ) -> None:
        self.calls.append((gridX, gridY, gridZ, stream, function, *args))


class FakeCompiled(triton.compiler.CompiledKernel):  # type: ignore[misc]
    run: Any = None
    module, function, packed_metadata = None, "handle", (4, 1, 0)

    def __init__(self, launcher: object) -> None:
        self.run = launcher


class FakeFunction:
    """A kernel ``(out, x, width, SECOND, BLOCK)`` of Triton, and the launches by Triton itself."""

    arg_names = ("out", "x", "width", "SECOND", "BLOCK")
    run = triton.runtime.jit.JITFunction.run

    def __init__(self, launcher: object, results: Any = None) -> None:
        self.compiled, self.calls = FakeCompiled(launcher), []  # type: ignore[var-annotated]
        self.results = iter(results) if results else None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Any:
            self.calls.append((grid, arguments, constants))
            return next(self.results) if self.results else self.compiled

        return run


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let CPU tensors be on the current device, 7 its stream, and Triton no interpreter."""
    monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(module, "_current_device", lambda: DEVICE)
    active = SimpleNamespace(get_current_stream=lambda device: 7)
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    module._is_known.cache_clear()
    yield
    module._is_known.cache_clear()


OUT, X = MEMORY[:16], MEMORY[16:]
CONSTANTS = {"num_warps": 4, "BLOCK": 8, "SECOND": True}


@pytest.mark.usefixtures("plain")
def test_the_second_launch_is_direct() -> None:
    function = FakeFunction(launcher := FakeLauncher())
    kernel = Kernel(function)
    for x, width in ((X, 5), (MEMORY[20:], 7), (MEMORY[24:], 9)):
        launch(kernel, (3,), OUT, x, width, **CONSTANTS)
    assert function.calls == [((3,), (OUT, X, 5), CONSTANTS)]
    assert len(launcher.calls) == 2
    *head, out, x, width, second, block = launcher.calls[0]
    assert head == [3, 1, 1, 7, "handle", (4, 1, 0), None, None, None]
    assert out is OUT
    assert x.data_ptr() == MEMORY[20:].data_ptr()
    assert (width, second, block) == (7, True, 8)
    launch(kernel, (3, 4, 5), OUT, X, 5, **CONSTANTS)
    launch(kernel, (3, 4), OUT, X, 5, **CONSTANTS)
    assert [call[:3] for call in launcher.calls[2:]] == [(3, 4, 5), (3, 4, 1)]
    launch(kernel, (3, 0), OUT, X, 5, **CONSTANTS)  # nothing to do
    assert len(function.calls) == 1
    assert len(launcher.calls) == 4


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("x", "width", "constants"),
    [
        (MEMORY[17:], 5, {}),  # begins between multiples of 16 bytes
        (X, 16, {}),
        (X, 1, {}),
        (X, 2**31, {}),
        (X, 5.0, {}),
        (None, 5, {}),
        (X.to(torch.float16), 5, {}),
        (X, 5, {"BLOCK": 16}),
        (X, 5, {"num_warps": 8}),
    ],
)
def test_other_arguments_are_compiled_for(
    x: Tensor | None, width: float, constants: dict[str, int]
) -> None:
    function = FakeFunction(launcher := FakeLauncher())
    kernel = Kernel(function)
    launch(kernel, (3,), OUT, X, 5, **CONSTANTS)
    launch(kernel, (3,), OUT, x, width, **(CONSTANTS | constants))
    assert len(function.calls) == 2
    assert not launcher.calls
    launch(kernel, (3,), OUT, x, width, **(CONSTANTS | constants))
    launch(kernel, (3,), OUT, X, 5, **CONSTANTS)
    assert len(function.calls) == len(launcher.calls) == 2


@pytest.mark.usefixtures("plain")
def test_hooks_of_profilers_run() -> None:
    function = FakeFunction(launcher := FakeLauncher())
    kernel, hook = Kernel(function), lambda metadata: None
    launch(kernel, (3,), OUT, X, 5, **CONSTANTS)
    for chain in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        chain.add(hook)
        try:
            launch(kernel, (3,), OUT, X, 5, **CONSTANTS)
        finally:
            chain.remove(hook)
    assert len(function.calls) == 3
    assert not launcher.calls
    launch(kernel, (3,), OUT, X, 5, **CONSTANTS)
    assert len(launcher.calls) == 1


class OtherFunction(FakeFunction):
    """Of a Triton that launches in another way."""

    def run(self, *arguments: Any) -> None:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.usefixtures("plain")
def test_an_unknown_triton_launches_itself(caplog: pytest.LogCaptureFixture) -> None:
    function = OtherFunction(launcher := FakeLauncher())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            launch(Kernel(function), (3,), OUT, X, 5, **CONSTANTS)
    assert len(function.calls) == 3
    assert not launcher.calls
    [record] = caplog.records
    assert "OtherFunction.run does not launch kernels as in Triton 3.6 to 3.9" in record.message


@pytest.mark.usefixtures("plain")
def test_kernels_that_are_not_compiled_yet_are_left_to_triton() -> None:
    launcher = FakeLauncher()
    function = FakeFunction(launcher, [None, object(), FakeCompiled(launcher)])
    kernel = Kernel(function)
    for _ in range(4):
        launch(kernel, (3,), OUT, X, 5, **CONSTANTS)
    assert len(function.calls) == 3
    assert len(launcher.calls) == 1


@pytest.mark.usefixtures("plain")
def test_launches_are_on_the_device_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    monkeypatch.setattr(module, "_current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext(entered.append(index)))
    function = FakeFunction(launcher := FakeLauncher())
    kernel = Kernel(function)
    for _ in range(2):
        launch(kernel, (3,), OUT, X, 5, **CONSTANTS)
    assert entered == [DEVICE, DEVICE]
    assert len(function.calls) == len(launcher.calls) == 1


def check_assumptions(launched: Launched) -> None:
    """Check that the arguments are those that the kernel was compiled for."""
    source, arguments = launched.source, launched.arguments
    assert len(arguments) == len(source.fn.arg_names)
    for (i,), value in source.constants.items():
        assert arguments[i] is value or arguments[i] == value
    for (i,), attributes in source.attrs.items():
        value = arguments[i].data_ptr() if isinstance(arguments[i], Tensor) else arguments[i]
        for name, number in attributes:
            assert name == "tt.divisibility"
            assert value % number == 0
    types = {"*bf16": torch.bfloat16, "*fp32": torch.float32}
    for kind, value in zip(source.signature.values(), arguments, strict=True):
        if isinstance(value, Tensor):
            assert types[kind] is value.dtype
        elif type(value) is int and kind != "constexpr":
            assert kind == ("i32" if -(2**31) <= value < 2**31 else "i64")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1: kernels are not compiled")
def test_kernels_run_only_on_what_they_were_compiled_for() -> None:
    choose = random.Random(0)
    norm, act = (ir.ops.rms_norm.impls["triton"], ir.ops.silu_and_mul.impls["triton"])
    LAUNCHED.clear()
    with fake_driver():
        for _ in range(60):
            dtype = choose.choice([torch.float32, torch.bfloat16])
            width, offset = choose.choice([1, 3, 16]), choose.choice([0, 1, 8])
            x = torch.zeros(1000, dtype=dtype)[offset:]
            rows = x[: 2 * 64 * choose.choice([1, 2])].view(-1, 64)
            norm.plain_fn(rows[:, :width], None, 1e-6)
            act.plain_fn(rows[:, : 2 * width])
    assert len(LAUNCHED) == 120
    for launched in LAUNCHED:
        check_assumptions(launched)
    bound = {id(launched.source) for launched in LAUNCHED}
    assert 10 < len(bound) < 60  # most launches were direct
