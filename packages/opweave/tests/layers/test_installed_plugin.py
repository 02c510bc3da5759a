"""A package that brings a platform and layers of its own, found because it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fixtures import FreshPython

PLATFORM = """
from opweave.platforms import Platform

class DummyPlatform(Platform):
    name = "dummy"
    device_type = "cpu"

    def get_device_name(self, index=0):
        return "DummyDevice"

    def default_custom_ops(self, config):
        return ["all"]
"""

PLUGIN = """
def platform():
    return "dummy_device.platform.DummyPlatform"

def layers():
    from opweave.layers import ParallelLMHead, RotaryEmbedding

    @RotaryEmbedding.register_oot
    class DummyRotaryEmbedding(RotaryEmbedding):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.added = True

    @ParallelLMHead.register_oot
    class DummyParallelLMHead(ParallelLMHead):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.added = True
"""

ENTRY_POINTS = """
[opweave.platform_plugins]
dummy = dummy_device:platform

[opweave.general_plugins]
dummy_layers = dummy_device:layers
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path) -> None:
    """The package and its metadata, where the interpreter of ``fresh_python`` looks first."""
    package, info = tmp_path / "dummy_device", tmp_path / "dummy_device-1.dist-info"
    for folder in (package, info):
        folder.mkdir()
    (package / "__init__.py").write_text(PLUGIN, encoding="utf-8")
    (package / "platform.py").write_text(PLATFORM, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dummy-device\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


def test_the_platform_and_the_layers_of_a_plugin(fresh_python: FreshPython) -> None:
    fresh_python(
        """
        import sys
        import torch
        from opweave import platforms
        from opweave.layers import ParallelLMHead, RotaryEmbedding
        from opweave.plugins import load_general_plugins
        from opweave.config import CompilationConfig, EngineConfig
        assert "dummy_device" not in sys.modules
        assert platforms.current_platform.name == "dummy"
        assert platforms.current_platform.get_device_name() == "DummyDevice"
        assert "dummy_device.platform" in sys.modules

        config = EngineConfig(compilation_config=CompilationConfig("inductor", 3))
        assert not config.compilation.custom_ops_default_on
        assert platforms.configured(config).compilation.custom_ops == ("all",)

        load_general_plugins()
        load_general_plugins()  # a second time nothing happens
        arguments = 16, 16, 16, 16, True, torch.float16
        rotary, head = RotaryEmbedding(*arguments), ParallelLMHead(64, 16)
        assert type(rotary).__name__ == "DummyRotaryEmbedding" and rotary.added
        assert type(head).__name__ == "DummyParallelLMHead" and head.added
        assert (rotary.head_size, rotary.cos_sin_cache.dtype) == (16, torch.float16)
        """
    )
