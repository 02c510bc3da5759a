"""``current_platform``: found once, lazily, by whoever asks first, and handed to children."""

from __future__ import annotations

import json
import threading
from textwrap import dedent

import pytest

from opweave import platforms
from opweave.platforms import CpuPlatform, resolution
from opweave.platforms.base import PlatformMismatchError
from opweave.platforms.resolution import VARIABLE, Handover, impose, isolated_resolution
from opweave.plugins.entry import ReferenceNameError
from support.fixtures import Case, FreshCases

from .conftest import installed

PLATFORM = """
    from opweave.platforms import Platform

    class AcmePlatform(Platform):
        name = "acme"
        device_type = "cpu"

        def extend_cli(self, options):
            options.add("queue_depth", int, 4, "Kernels in flight.")
"""
PLUGIN = """
    import os
    from opweave.plugins import Claim

    def register():
        with open(os.environ.get("CALLS", os.devnull), "a") as calls:
            calls.write("called\\n")
        return Claim("acme_platform.AcmePlatform", 1, why="it is always here")
"""
POINTS = {"opweave.platform_plugins": {"acme": "acme_plugin:register"}}


def acme(code: str, platform: str = PLATFORM, **env: str) -> Case:
    """Return a case in which there is a plugin for the platform acme."""
    files = {"acme_platform.py": platform, "acme_plugin.py": PLUGIN}
    return installed(code, POINTS, files, env)


# In this process


@pytest.mark.usefixtures("unresolved")
def test_it_is_resolved_once_and_remembers_who_asked() -> None:
    first = resolution()
    assert resolution() is first
    assert platforms.resolution().platform is first.platform
    assert isinstance(first.platform, CpuPlatform)
    assert first.qualname == "opweave.platforms.builtin.CpuPlatform"
    assert platforms.resolve_current_platform_cls_qualname() == first.qualname
    assert "test_it_is_resolved_once_and_remembers_who_asked" in first.trace
    assert "first = resolution()" in first.trace.splitlines()[-1]
    assert first.why == "every machine has it"


def test_threads_that_ask_at_once_get_the_same() -> None:
    with isolated_resolution():
        start, found = threading.Barrier(8), []

        def ask() -> None:
            start.wait()
            found.append(resolution())

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len({id(each) for each in found}) == 1


def test_isolation_puts_the_platform_back() -> None:
    before = resolution()
    with isolated_resolution():
        assert resolution() is not before
    assert resolution() is before


# The order of imports, and plugins

FIRST = (
    "from opweave.platforms import current_platform",
    "import opweave.layers; from opweave import platforms; platforms.current_platform",
    "import opweave.platforms.resolution; from opweave.platforms import current_platform",
    "from opweave.plugins import load_general_plugins as load; load(); import opweave.platforms",
    "ir.ops.rms_norm(torch.ones(2, 4), None, 1e-6)",
)


def test_it_can_be_asked_for_before_anything_else(fresh_cases: FreshCases) -> None:
    then = "\nfrom opweave.platforms import current_platform as it\nassert it.name == 'acme'"
    fresh_cases([acme(first + then) for first in FIRST])


def test_a_plugins_platform_is_resolved_late_asked_once_and_owned(fresh_cases: FreshCases) -> None:
    asked = """
        import opweave.platforms, opweave.layers, opweave.compile
        from opweave.platforms.resolution import is_resolved
        assert not is_resolved()
        from opweave.platforms import current_platform, resolution
        from opweave.config.plugin_options import PluginOptions, options
        assert current_platform.name == "acme"
        found = resolution()
        assert str(found.owner) == "acme (acme-device 0.1.0)"
        assert found.why == "it is always here"
        assert [candidate.name for candidate in found.candidates] == ["acme", "cpu"]
        assert str(options.entries["acme.queue_depth"].owner) == str(found.owner)
        assert PluginOptions("acme")["queue_depth"] == 4
        assert open("calls").read() == "called\\n"
    """
    selected = """
        from opweave.platforms import current_platform, resolution
        assert current_platform.name == "cpu"
        assert resolution().why == "OPWEAVE_PLATFORM=cpu"
        assert "acme_plugin" not in sys.modules
    """
    fresh_cases([acme(asked, CALLS="calls"), acme(selected, OPWEAVE_PLATFORM="cpu")])


BROKEN = {
    "AcmePlatform = 1": ("acme_platform.AcmePlatform is 1", "derived from Platform"),
    "AcmePlatform = dict": ("acme_platform.AcmePlatform is <class 'dict'>",),
    "class Other: pass": ("has no 'AcmePlatform'",),
    """
    from opweave.platforms import Platform
    class AcmePlatform(Platform):
        name, device_type, api = 'acme', 'cpu', 2
    """: ("version 2", "version 1", "upgrade opweave"),
    """
    from opweave.platforms import Platform
    class AcmePlatform(Platform):
        name, device_type = 'cpu', 'cpu'
    """: ("'cpu'", "a platform of opweave"),
    """
    from opweave.platforms import Platform
    class AcmePlatform(Platform): pass
    """: ("name is missing", "device_type is missing"),
    """
    from opweave import platforms
    class AcmePlatform(platforms.Platform):
        name, device_type = 'acme', 'cpu'
        def __init__(self):
            platforms.current_platform
    """: ("current_platform is used by", "constructor"),
    "import nothing_of_the_kind": ("nothing_of_the_kind",),
    """
    from opweave.platforms import Platform
    class AcmePlatform(Platform):
        name, device_type = 'acme', 'cpu'
        def extend_cli(self, options):
            options.add('depth', int, 4, '.')
            1 / 0
    """: ("extend_cli", "ZeroDivisionError"),
}


def test_a_platform_that_is_none_is_one_readable_error(fresh_cases: FreshCases) -> None:
    code = """
        from opweave.ir.errors import OpweaveError
        from opweave import platforms
        for _ in range(2):
            try:
                platforms.current_platform
            except OpweaveError as error:
                for part in ("OPWEAVE_PLUGINS=-acme", *{named!r}):
                    assert part in str(error), error
            else:
                raise AssertionError
        from opweave.config.plugin_options import options
        assert "acme.depth" not in options
    """
    fresh_cases(
        [acme(dedent(code).format(named=named), source) for source, named in BROKEN.items()]
    )


def test_without_strictness_a_broken_platform_is_a_warning(fresh_cases: FreshCases) -> None:
    code = """
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            from opweave.platforms import current_platform, resolution
        assert current_platform.name == "cpu"
        assert [each.name for each in resolution().candidates] == ["cpu"]
        assert any("OPWEAVE_PLUGINS=-acme" in str(each.message) for each in caught), caught
    """
    sources = ("import nothing_of_the_kind", "AcmePlatform = 1")
    fresh_cases([acme(code, source, OPWEAVE_PLUGINS_STRICT="0") for source in sources])


def test_kernels_that_fail_leave_nothing_and_are_tried_again(fresh_cases: FreshCases) -> None:
    platform = """
        import os
        from opweave.platforms import Platform
        class AcmePlatform(Platform):
            name, device_type = "acme", "cpu"
            def import_kernels(self):
                super().import_kernels()
                import acme_plugin.kernels
            def get_default_ir_op_priority(self, config=None):
                return {"rms_norm": ["acme"]}
    """
    kernels = """
        import os
        from opweave import ir
        @ir.ops.rms_norm.register_impl("acme")
        def _(x, weight, epsilon, variance_size=None):
            return x + 1
        if "BROKEN" in os.environ:
            raise OSError("no driver")
    """
    code = """
        from opweave.plugins.entry import PluginHookError
        x = torch.ones(2, 4)
        os.environ["BROKEN"] = "1"
        for _ in range(2):
            try:
                ir.ops.rms_norm(x, None, 1e-6)
            except PluginHookError as error:
                assert "no driver" in str(error) and "import_kernels" in str(error), error
            else:
                raise AssertionError
        del os.environ["BROKEN"]
        assert torch.equal(ir.ops.rms_norm(x, None, 1e-6), x + 1)
        assert str(ir.ops.rms_norm.impls["acme"].owner) == "acme (acme-device 0.1.0)"
        assert ir.ops.rms_norm.impls["opweave_c"].owner is None
    """
    files = {
        "acme_platform.py": platform,
        "acme_plugin/__init__.py": PLUGIN,
        "acme_plugin/kernels.py": kernels,
    }
    fresh_cases([installed(code, POINTS, files)])


# Children

PARENT = """
    import multiprocessing
    from opweave import platforms
    from opweave.config.plugin_options import PluginOptions, apply_plugin_options

    def work(text, queue):
        found = platforms.impose(text)
        depth = PluginOptions("acme")["queue_depth"]
        queue.put((found.qualname, str(found.owner), found.why, depth))

    if __name__ == "__main__":
        platforms.resolution()
        apply_plugin_options({"acme.queue-depth": "8"})
        spawn = multiprocessing.get_context("spawn")
        queue = spawn.Queue()
        child = spawn.Process(target=work, args=(platforms.resolution().to_json(), queue))
        child.start()
        child.join(120)
        assert child.exitcode == 0
        qualname, owner, why, depth = queue.get()
        assert qualname == "acme_platform.AcmePlatform"
        assert owner == "acme (acme-device 0.1.0)"
        assert why == "the parent process runs on it"
        assert depth == 8
        assert open("calls").read() == "called\\n"  # the child does not ask again
"""


def test_a_spawned_child_is_on_the_parents_platform(fresh_cases: FreshCases) -> None:
    code = """
        import subprocess
        os.environ["PYTHONPATH"] = os.getcwd() + os.pathsep + os.environ["PYTHONPATH"]
        subprocess.run([sys.executable, "parent.py"], check=True)
    """
    case = acme(code, CALLS="calls")
    fresh_cases([case._replace(files={**case.files, "parent.py": dedent(PARENT)})])


def test_the_environment_can_hand_over_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    text = resolution().to_json()
    with isolated_resolution():
        monkeypatch.setenv(VARIABLE, text)
        assert resolution().why == "the parent process runs on it"
    with isolated_resolution():
        monkeypatch.setenv(VARIABLE, text.replace("CpuPlatform", "Nothing"))
        with pytest.raises(ReferenceNameError, match="Nothing"):
            resolution()


def test_what_is_handed_over_comes_back_as_it_was(unresolved: None) -> None:
    text = resolution().to_json()
    assert Handover.from_json(text).to_json() == text
    with isolated_resolution():
        assert impose(text).qualname == resolution().qualname


def test_a_child_that_has_another_platform_refuses(unresolved: None) -> None:
    handed = json.loads(resolution().to_json())
    handed["claim"]["platform"] = "opweave.platforms.builtin.XpuPlatform"
    with pytest.raises(PlatformMismatchError) as raised:
        impose(json.dumps(handed))
    for part in ("XpuPlatform", "has resolved", "test_a_child_that_has_another"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("name", "version", "named"),
    [("torch", "1.0", "torch 1.0"), ("acme-device", "0.1.0", "finds no acme-device")],
)
def test_a_child_that_has_other_versions_refuses(name: str, version: str, named: str) -> None:
    handed = json.loads(resolution().to_json())
    handed["versions"][name] = version
    with isolated_resolution(), pytest.raises(PlatformMismatchError) as raised:
        impose(json.dumps(handed))
    assert named in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"claim": {}}', "null", "3"])
def test_what_no_parent_wrote(text: str) -> None:
    with pytest.raises(PlatformMismatchError, match="OPWEAVE_PLATFORM_RESOLUTION"):
        impose(text)
