"""The platforms that come with opweave; the questions to the machine are answered by the test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opweave.ir import current_registry
from opweave.platforms import (
    Capabilities,
    CpuPlatform,
    CudaPlatform,
    Platform,
    RocmPlatform,
    TpuPlatform,
    XpuPlatform,
    builtin,
    probes,
)
from opweave.platforms.builtin import BUILTIN
from opweave.plugins import BUILTIN_PLATFORMS, choose_platform, resolve_obj_by_qualname
from support.fixtures import FreshPython

ACCELERATORS = {
    "cuda": (CudaPlatform, "cuda_devices"),
    "rocm": (RocmPlatform, "rocm_devices"),
    "tpu": (TpuPlatform, "tpu_devices"),
    "xpu": (XpuPlatform, "xpu_devices"),
}


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, probe in ACCELERATORS.values():
        monkeypatch.setattr(probes, probe, lambda: 0)


def device(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """Let the machine have a device of these properties."""
    asked = SimpleNamespace(name="A device", **facts)
    monkeypatch.setattr(probes, "properties", lambda device_type, index: asked)


def test_the_names_are_reserved_for_these() -> None:
    assert tuple(BUILTIN) == BUILTIN_PLATFORMS


@pytest.mark.usefixtures("no_devices")
def test_without_devices_it_is_the_cpu() -> None:
    assert choose_platform(BUILTIN).chosen.name == "cpu"


@pytest.mark.usefixtures("no_devices")
@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_device_comes_before_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform, probe = ACCELERATORS[name]
    monkeypatch.setattr(probes, probe, lambda: 2)
    choice = choose_platform(BUILTIN)
    assert choice.chosen.name == name
    assert resolve_obj_by_qualname(choice.chosen.claim.platform) is platform
    assert "2 " in choice.chosen.claim.why
    assert {candidate.name for candidate in choice.candidates} == {name, "cpu"}


def test_claiming_starts_no_runtime(fresh_python: FreshPython) -> None:
    fresh_python("""
        import torch
        from torch.cuda import _lazy_init
        def started(*args):
            raise AssertionError("the runtime was started")
        torch.cuda._lazy_init = torch.xpu._lazy_init = started
        from opweave.platforms.builtin import BUILTIN
        for claim in BUILTIN.values():
            claim()
        assert not torch.cuda.is_initialized()
        assert not torch.xpu.is_initialized()
    """)


COMPUTES: list[tuple[type[Platform], dict[str, Any], str]] = [
    (CudaPlatform, {"major": 7, "minor": 0}, ""),
    (CudaPlatform, {"major": 7, "minor": 5}, "int8"),
    (CudaPlatform, {"major": 8, "minor": 6}, "int8 bf16"),
    (CudaPlatform, {"major": 8, "minor": 9}, "int8 bf16 fp8"),
    (CudaPlatform, {"major": 9, "minor": 0}, "int8 bf16 fp8"),
    (CudaPlatform, {"major": 12, "minor": 0}, "int8 bf16 fp8"),
    (RocmPlatform, {"gcnArchName": "gfx906:sramecc+:xnack-"}, ""),
    (RocmPlatform, {"gcnArchName": "gfx90a:sramecc+:xnack-"}, "int8 bf16"),
    (RocmPlatform, {"gcnArchName": "gfx942:sramecc+:xnack-"}, "int8 bf16"),
    (RocmPlatform, {"gcnArchName": "gfx950:sramecc+:xnack-"}, "int8 bf16 fp8"),
    (RocmPlatform, {"gcnArchName": "gfx1100"}, "int8 bf16"),
    (RocmPlatform, {"gcnArchName": "gfx1201"}, "int8 bf16 fp8"),
    (XpuPlatform, {"has_subgroup_matrix_multiply_accumulate": True}, "int8 bf16"),
    (XpuPlatform, {"has_subgroup_matrix_multiply_accumulate": False}, ""),
    (CpuPlatform, {"features": "avx2"}, ""),
    (CpuPlatform, {"features": "avx2 avx512_vnni"}, "int8"),
    (CpuPlatform, {"features": "avx512_vnni avx512_bf16"}, "int8 bf16"),
    (CpuPlatform, {"features": "i8mm bf16"}, "int8 bf16"),
]


@pytest.mark.parametrize(("kind", "facts", "expected"), COMPUTES)
def test_what_a_device_computes(
    kind: type[Platform], facts: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device(monkeypatch, **{"major": 9, "minor": 4, **facts})
    features = frozenset(facts.get("features", "").split())
    monkeypatch.setattr(probes, "cpu_features", lambda: features)
    platform = kind()
    assert computes(platform) == set(expected.split())
    if kind is CpuPlatform:
        assert platform.capabilities.unified_memory
    else:
        assert platform.get_device_name() == "A device"
    if kind is CudaPlatform:
        capability = platform.get_device_capability()
        assert (capability, str(capability)) == (
            (facts["major"], facts["minor"]),
            "{major}.{minor}".format(**facts),
        )
        assert platform.capabilities.graph_capture
        assert not platform.capabilities.unified_memory


@pytest.mark.parametrize(
    ("platform", "flag"),
    [
        (CudaPlatform, "is_integrated"),
        (RocmPlatform, "is_integrated"),
        (XpuPlatform, "is_integrated_gpu"),
    ],
)
def test_integrated_gpus_share_the_memory_of_the_host(
    platform: type[Platform], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (0, 1):
        device(monkeypatch, major=12, minor=1, gcnArchName="gfx942", **{flag: value})
        assert platform().capabilities.unified_memory == bool(value)


def test_triton_kernels_are_the_default_on_gpus_that_have_triton() -> None:
    for platform in (CudaPlatform, RocmPlatform):
        lists = platform().get_default_ir_op_priority()
        for name in ("reshape_and_cache", "linear_w4a16", "linear_q", "linear_w8a8"):
            assert lists[name] == ["triton"]
    assert not XpuPlatform().get_default_ir_op_priority()


@pytest.mark.parametrize("libraries", [(), ("flashinfer",), ("flash_attn", "flashinfer")])
def test_attention_of_libraries_is_the_default_on_gpus(
    libraries: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "is_installed", libraries.__contains__)
    found = CudaPlatform().get_default_ir_op_priority()
    # Prompts are never left to Triton where torch's attention supports them.
    assert found["paged_attention"] == [*sorted(libraries, reverse=True), "aten", "triton"]
    latent = ["flashinfer"] if "flashinfer" in libraries else None
    assert found.get("mla_attention_decode") == latent


def computes(platform: Platform) -> set[str]:
    found: Capabilities = platform.capabilities
    return {name for name in ("int8", "bf16", "fp8") if getattr(found, name)}


def test_gpus_say_how_much_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = SimpleNamespace(mem_get_info=lambda index: (10 + index, 20))
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: asked)
    assert CudaPlatform().memory_info(1) == XpuPlatform().memory_info(1) == (11, 20)


def test_each_device_type_is_torchs() -> None:
    platforms = [platform() for platform, _ in ACCELERATORS.values()]
    assert [torch.device(platform.device_type).type for platform in platforms] == [
        "cuda",
        "cuda",
        "xla",
        "xpu",
    ]


@pytest.mark.parametrize("platform", [CpuPlatform, *(p for p, _ in ACCELERATORS.values())])
def test_default_priorities_name_ops_and_providers(platform: type[Platform]) -> None:
    registry = current_registry()
    registry.ensure_ready()
    everywhere = {provider for op in registry.ops.values() for provider in op.impls}
    for op, providers in platform().get_default_ir_op_priority().items():
        assert {*providers} <= (everywhere if op == "*" else registry.op(op).impls.keys())


def test_the_cpu_prefers_its_own_kernels_but_for_the_listed_ops() -> None:
    listed = CpuPlatform().get_default_ir_op_priority()
    for name, op in current_registry().ops.items():
        if name in listed:
            expected = listed[name]
        else:
            expected = [p for p in ("opweave_c", "opweave_c_invariant") if p in op.impls]
        assert op.get_priority() == [*expected, "native"], name


# The host


MEMINFO = "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  600 kB\n"
STAT = f"anon 7\nactive_file {100 << 10}\ninactive_file {200 << 10}"


@pytest.mark.parametrize(
    ("limit", "used", "stat", "expected"),
    [
        (None, None, None, (600 << 10, 1000 << 10)),
        ("max", "5", None, (600 << 10, 1000 << 10)),
        (str(500 << 10), str(100 << 10), None, (400 << 10, 500 << 10)),
        (str(800 << 10), str(100 << 10), None, (600 << 10, 800 << 10)),
        (str(500 << 10), str(600 << 10), None, (0, 500 << 10)),
        (str(2000 << 10), "0", None, (600 << 10, 1000 << 10)),
        (str(500 << 10), str(450 << 10), STAT, (350 << 10, 500 << 10)),  # files are free
    ],
)
def test_limits_of_the_control_group_count(
    limit: str | None,
    used: str | None,
    stat: str | None,
    expected: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in (("max", limit), ("current", used), ("stat", stat)):
        if text is not None:
            (tmp_path / f"memory.{name}").write_text(text + "\n", encoding="utf-8")
    monkeypatch.setattr(probes, "_CGROUP", tmp_path)
    monkeypatch.setattr(probes, "_MEMINFO", tmp_path / "meminfo")
    free, total = probes.host_memory()  # without meminfo
    assert stat is not None or limit is not None or free == total > 0
    (tmp_path / "meminfo").write_text(MEMINFO, encoding="utf-8")
    assert probes.host_memory() == expected
