"""Which method runs: by platform, configuration and options, decided when an op is built."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from opweave import ir, platforms
from opweave.config import CompilationConfig, compilation_config
from opweave.layers import CustomOp, InvalidLayerError, RMSNorm, SiluAndMul
from opweave.layers.custom_op import _compiled

from .conftest import Named

pytestmark = pytest.mark.usefixtures("registries")


class Scale(CustomOp):
    factor = 2.0

    def forward_native(self, x: Tensor) -> Tensor:
        return x * self.factor


METHODS = {
    "cuda": "forward_cuda",
    "rocm": "forward_hip",
    "cpu": "forward_cpu",
    "tpu": "forward_tpu",
    "xpu": "forward_xpu",
    "oot": "forward_oot",
    "unspecified": "forward_native",
}
EVERY = sorted({*METHODS.values()})


def op_with(*methods: str) -> type[CustomOp]:
    """Return a class that has these methods, each of which returns its name."""
    own = {name: (lambda self, *_, name=name: name) for name in methods}
    return CustomOp.register("probe")(type("Probe", (CustomOp,), own))


each_platform = pytest.mark.parametrize("platform", METHODS, indirect=True)


@each_platform
def test_each_platform_has_its_method(platform: str) -> None:
    op = op_with(*EVERY)
    assert op()() == METHODS[platform]
    with compilation_config(CompilationConfig(custom_ops="none")):
        assert op()() == "forward_native"
    only_native = type("Native", (CustomOp,), {"forward_native": lambda self: "native"})
    assert only_native()() == "native"


@pytest.mark.parametrize("platform", ["my_npu"], indirect=True)
def test_any_other_name_is_out_of_tree(platform: str) -> None:
    assert op_with(*EVERY)()() == "forward_oot"


def test_a_platform_may_name_methods_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "current_platform", Named("acme"))
    platforms.current_platform.dispatch_tags = ("acme", "oot", "cpu")
    every = ("forward_native", "forward_cpu", "forward_oot", "forward_acme")
    for last in range(1, len(every) + 1):
        op = type("Probe", (CustomOp,), {n: (lambda self, n=n: n) for n in every[:last]})
        assert op()() == every[last - 1]


@pytest.mark.parametrize("platform", ["rocm"], indirect=True)
def test_rocm_falls_back_on_cuda(platform: str) -> None:
    assert op_with("forward_native", "forward_cuda")()() == "forward_cuda"


@pytest.mark.parametrize(
    ("platform", "other"), [("cuda", "forward_hip"), ("rocm", "forward_cpu")], indirect=["platform"]
)
def test_a_gpu_without_a_method_is_noted_once(
    platform: str, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    op = op_with("forward_native", other)
    with caplog.at_level(logging.INFO, "opweave"):
        assert [op()() for _ in range(2)] == ["forward_native"] * 2
    assert len(caplog.messages) == 1
    assert f"Probe is enabled, but has no {METHODS[platform]}" in caplog.messages[0]


# On another package's platform


@pytest.mark.parametrize("platform", ["acme"], indirect=True)
def test_layers_call_ops_on_another_packages_platform(platform: str) -> None:
    with ir.record() as record, torch.no_grad():
        SiluAndMul()(torch.randn(2, 8))
        RMSNorm(8)(torch.randn(2, 8))
    assert record.selected_impls.keys() == {"silu_and_mul", "rms_norm"}


@pytest.mark.parametrize("platform", ["acme"], indirect=True)
def test_what_overrides_a_layer_in_part_is_what_runs(platform: str) -> None:
    class Native(SiluAndMul):
        def forward_native(self, x: Tensor) -> Tensor:
            return x + 1

    class Cuda(SiluAndMul):
        def forward_cuda(self, x: Tensor) -> Tensor:
            return x + 2

    class Deeper(Native):
        pass

    x = torch.zeros(2, 8)
    assert Native()(x).sum() == Deeper()(x).sum() == 16
    assert torch.equal(Cuda()(x), x[:, :4])  # it says nothing of this platform: native runs
    platforms.current_platform.dispatch_tags = ("oot", "cuda")
    assert Cuda()(x).sum() == 32


# Options


def test_enforce_enable(config: CompilationConfig) -> None:
    op = op_with("forward_native", "forward_cpu")
    with compilation_config(CompilationConfig(custom_ops="none,-probe")) as none:
        assert op(enforce_enable=True)() == "forward_cpu"
        assert op()() == "forward_native"
    assert none.enabled_custom_ops == none.disabled_custom_ops == {"probe": 1}


def test_a_class_may_decide_for_itself() -> None:
    class Always(CustomOp):
        @classmethod
        def enabled(cls) -> bool:
            return True

        def forward_cpu(self) -> str:
            return "cpu"

    with compilation_config(CompilationConfig(custom_ops="none")) as config:
        assert Always()() == "cpu"
    assert config.enabled_custom_ops == {"Always": 1}


# When it is decided


def test_it_is_decided_when_an_op_is_built() -> None:
    op = op_with("forward_native", "forward_cpu")
    enabled = op()
    with compilation_config(CompilationConfig(custom_ops="none")):
        disabled = op()
        assert enabled() == "forward_cpu"
    assert disabled() == "forward_native"


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle", "replica"])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_copy_runs_with_what_it_has(way: str, compiles: bool) -> None:
    config = CompilationConfig(custom_ops="none" if compiles else "all")
    with compilation_config(config):
        op = Scale(compile_native=compiles)
    made: Scale = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda op: pickle.loads(pickle.dumps(op)),
        "replica": lambda op: op._replicate_for_data_parallel(),
    }[way](op)
    made.factor = 9.0
    assert (made(torch.ones(1)).item(), op(torch.ones(1)).item()) == (9, 2)


def test_each_config_counts_what_is_built_under_it(config: CompilationConfig) -> None:
    op = op_with("forward_native")
    op()
    with compilation_config(CompilationConfig(custom_ops="-probe")) as inner:
        op()
        op()
    op()
    assert (config.enabled_custom_ops, config.disabled_custom_ops) == ({"probe": 2}, {})
    assert (inner.enabled_custom_ops, inner.disabled_custom_ops) == ({}, {"probe": 2})
    assert config == CompilationConfig()  # counters do not take part in comparisons


def test_importing_does_not_resolve_the_platform(fresh_python: Any) -> None:
    fresh_python(
        """
        import opweave.layers
        from opweave.platforms.resolution import is_resolved
        assert not is_resolved()
        opweave.layers.op_registry["silu_and_mul"]()
        assert is_resolved()
        """
    )


# ``compile_native``: the native method compiled on its own, where the op is disabled.


class Backend(platforms.CpuPlatform):
    """Counts what is compiled, and computes it as it is."""

    simple_compile_backend: Any = "inductor"


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    platform, counter = Backend(), CompileCounter()
    monkeypatch.setattr(platform, "simple_compile_backend", counter)
    monkeypatch.setattr(platforms, "current_platform", platform)
    torch.compiler.reset()
    yield counter
    torch.compiler.reset()
    _compiled.cache_clear()


def make(dims: Any = None, **options: Any) -> Any:
    @CustomOp.register("shift", dynamic_arg_dims=dims)
    class Shift(CustomOp):
        def __init__(self) -> None:
            super().__init__(**options)
            self.by = torch.nn.Parameter(torch.ones(1), requires_grad=False)

        def forward_native(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return x + self.by if bias is None else x + self.by + bias

    return Shift


def under(backend: str, mode: int, custom_ops: str, op: Any) -> Any:
    with compilation_config(CompilationConfig(backend, mode, custom_ops)):
        return op()


@pytest.mark.parametrize(
    ("compile_native", "backend", "mode", "custom_ops", "compiles"),
    [
        (True, "inductor", 3, "none", True),
        (True, "inductor", 1, "all,-shift", True),
        (False, "inductor", 3, "none", False),
        (True, "inductor", 3, "all", False),
        (True, "inductor", 0, "none", False),
        (True, "eager", 3, "none", False),
    ],
)
def test_when_it_compiles(
    compile_native: bool,
    backend: str,
    mode: int,
    custom_ops: str,
    compiles: bool,
    counter: CompileCounter,
) -> None:
    op = under(backend, mode, custom_ops, make(compile_native=compile_native))
    assert torch.equal(op(torch.ones(4)), torch.full((4,), 2.0))
    assert counter.frame_count == int(compiles)


def test_no_size_is_compiled_twice(counter: CompileCounter) -> None:
    op = under("inductor", 3, "none", make(compile_native=True))
    for size in (3, 5, 8):
        op(torch.ones(size, size + 1))
    assert counter.frame_count == 1


def test_a_copy_computes_with_its_own_parameters(counter: CompileCounter) -> None:
    first = under("inductor", 3, "none", make(compile_native=True))
    second = copy.deepcopy(first)
    second.by.fill_(5.0)
    assert first(torch.zeros(3)).tolist() == [1.0] * 3
    assert second(torch.zeros(3)).tolist() == [5.0] * 3
    assert counter.frame_count == 1


@pytest.mark.parametrize("dims", [{"x": 0, "bias": 0}, {"x": [0], "bias": -2}, {"x": -2}])
def test_named_dimensions_vary_and_the_others_do_not(dims: Any, counter: CompileCounter) -> None:
    op = under("inductor", 3, "none", make(dims, compile_native=True))
    for size in (3, 5, 8):
        x = torch.ones(size, 4)
        assert torch.equal(op(x), x + 1)
    assert counter.frame_count == 1
    op(torch.ones(3, 6))  # a size that was taken for fixed
    assert counter.frame_count == 2


def test_dimensions_of_keywords(counter: CompileCounter) -> None:
    op = under("inductor", 3, "none", make({"x": 0, "bias": 0}, compile_native=True))
    for size in (3, 5, 8):
        x = torch.ones(size, 4)
        assert torch.equal(op(bias=x, x=x), x + 2)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dims", [None, {"x": 0}])
def test_inside_a_larger_graph(dims: Any, counter: CompileCounter) -> None:
    op = under("inductor", 3, "none", make(dims, compile_native=True))
    outer = CompileCounter()
    run = torch.compile(lambda x: op(x) * 2, backend=outer, fullgraph=True, dynamic=True)
    for size in (3, 5):
        assert torch.equal(run(torch.ones(size, 4)), torch.full((size, 4), 4.0))
    assert (outer.frame_count, counter.frame_count) == (1, 0)


def test_dimensions_name_arguments(counter: CompileCounter) -> None:
    with pytest.raises(InvalidLayerError, match=r"names 'y', which .* It takes x, bias"):
        under("inductor", 3, "none", make({"y": 0}, compile_native=True))
