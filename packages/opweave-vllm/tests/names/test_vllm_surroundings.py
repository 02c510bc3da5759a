"""Platform, plugin loaders, layers and configuration by vLLM's names."""

from __future__ import annotations

import pytest
import torch

from opweave import ir, layers, platforms, plugins
from opweave.config import (
    CompilationConfig,
    EngineConfig,
    compilation_config,
    current_compilation_config,
)
from opweave.ir.errors import UnknownProviderError
from opweave.platforms import Capabilities, DeviceCapability, Platform
from opweave_vllm import vllm_api
from opweave_vllm.vllm_api import config, current_platform
from opweave_vllm.vllm_api import plugins as loaders
from opweave_vllm.vllm_api.model_executor import custom_op
from opweave_vllm.vllm_api.platforms import resolve_current_platform_cls_qualname
from support.fixtures import Case, FreshCases

QUESTIONS = ("cuda", "rocm", "cuda_alike", "cpu", "xpu", "tpu", "out_of_tree")


class Device(Platform):
    name = "zoo_device"
    device_type = "cpu"
    capabilities = Capabilities(fp8=True, pinned_memory=True)

    def get_device_capability(self, index: int = 0) -> DeviceCapability | None:
        return DeviceCapability(9, 0)

    def memory_info(self, index: int = 0) -> tuple[int, int]:
        return 1, 2


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(platforms, "current_platform", found)
    return found


@pytest.mark.parametrize(
    ("name", "true"),
    [
        ("cuda", {"cuda", "cuda_alike"}),
        ("rocm", {"rocm", "cuda_alike"}),
        ("cpu", {"cpu"}),
        ("xpu", {"xpu"}),
        ("tpu", {"tpu"}),
        ("zoo_device", {"out_of_tree"}),
    ],
)
def test_what_a_platform_is(
    name: str, true: set[str], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "name", name)
    assert {q for q in QUESTIONS if getattr(current_platform, f"is_{q}")()} == true


def test_other_questions(device: Device) -> None:
    assert current_platform.device_name == "zoo_device"
    assert current_platform.device_type == "cpu"  # as every member of opweave's
    assert current_platform.get_device_capability(0) == (9, 0)
    assert current_platform.has_device_capability(90)
    assert current_platform.has_device_capability((8, 9))
    assert not current_platform.has_device_capability((9, 1))
    assert current_platform.get_device_total_memory() == 2
    assert current_platform.supports_fp8()
    assert current_platform.is_pin_memory_available()
    current_platform.manual_seed_all(3)
    first = torch.rand(4)
    current_platform.manual_seed_all(3)
    assert torch.rand(4).equal(first)
    with pytest.raises(AttributeError, match="is_neuron"):
        current_platform.is_neuron()


def test_a_platform_without_a_number_has_no_capability(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "get_device_capability", lambda self, index=0: None)
    assert not current_platform.has_device_capability(1)


def test_importing_resolves_nothing(fresh_cases: FreshCases) -> None:
    code = """
    from opweave_vllm.vllm_api import current_platform, plugins
    from opweave.platforms.resolution import is_resolved
    assert not is_resolved()
    current_platform.is_cpu()
    assert is_resolved()
    """
    fresh_cases([Case(code)])


def test_names_are_opweaves() -> None:
    assert vllm_api.CustomOp is custom_op.CustomOp is layers.CustomOp
    assert vllm_api.PluggableLayer is layers.PluggableLayer
    assert custom_op.op_registry["rms_norm"] is layers.RMSNorm
    assert custom_op.op_registry_oot is layers.CustomOp.op_registry_oot
    assert custom_op.maybe_get_oot_by_class is layers.replacement
    assert resolve_current_platform_cls_qualname is platforms.resolve_current_platform_cls_qualname
    assert loaders.load_general_plugins is plugins.load_general_plugins
    assert config.VllmConfig is EngineConfig


def test_groups_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(plugins, "load_plugins_by_group", lambda group: asked.append(group) or {})
    names = (loaders.PLATFORM_PLUGINS_GROUP, "vllm.platform_plugins", "vllm.general_plugins")
    for name in names:
        assert loaders.load_plugins_by_group(name) == {}
    assert asked == [plugins.PLATFORM_PLUGINS, plugins.PLATFORM_PLUGINS, plugins.GENERAL_PLUGINS]


def test_a_current_configuration() -> None:
    before = current_compilation_config()
    wanted = config.VllmConfig(
        compilation_config=CompilationConfig(custom_ops=["none", "+rms_norm"]),
        kernel_config=config.KernelConfig(ir_op_priority={"rms_norm": ["native"]}),
    )
    with config.set_current_vllm_config(wanted):
        assert layers.RMSNorm.enabled()
        assert not layers.SiluAndMul.enabled()
        assert config.get_current_vllm_config() is wanted
        assert vllm_api.ir.ops.rms_norm.get_priority() == ["native"]
        assert ir.ops.rms_norm.get_priority()[0] == "native"
        with compilation_config(CompilationConfig(custom_ops=["all"])):
            assert config.get_current_vllm_config().compilation.custom_ops == ("all",)
        assert config.get_current_vllm_config() is wanted
    assert current_compilation_config() == config.get_current_vllm_config().compilation == before


def test_a_configuration_of_an_unknown_provider_is_refused() -> None:
    wanted = config.VllmConfig(
        kernel_config=config.KernelConfig(ir_op_priority={"rms_norm": ["atn"]})
    )
    with (
        pytest.raises(UnknownProviderError, match="Did you mean 'aten'"),
        config.set_current_vllm_config(wanted),
    ):
        pass
    assert config.get_current_vllm_config() is not wanted
