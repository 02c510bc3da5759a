"""General plugins: called once, in order, all or nothing, and the owners of what they register."""

from __future__ import annotations

import re
import sys
import threading
import tomllib
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.config.values import OpenRegistry
from opweave.ir.errors import ReplacedWarning, UnknownOpError, UnknownProviderError
from opweave.layers.registry import op_registry_oot, owner_of
from opweave.plugins import PluginError
from opweave.plugins.discovery import PluginPolicy
from opweave.plugins.entry import (
    DuplicatePluginError,
    PluginFailedError,
    PluginImportError,
    PluginRequirementError,
    PluginsFailedError,
    PluginTypeError,
    PluginWarning,
    UnknownGroupError,
    UnknownPluginError,
)
from opweave.plugins.plugin import State
from support import ROOT
from support.fixtures import Case, FreshCases

from .conftest import Install
from .helpers import GENERAL, PLATFORM, files, install, plugin

CALLS = """
    import opweave_plugin_test_calls as calls
    def register():
        calls.names.append(__name__)
"""
REGISTERS = """
    from opweave import ir
    from opweave.layers import RMSNorm
    from opweave_engine.models.registry import register_model
    from tests_registry import table
    from torch import Tensor

    def register():
        @ir.register_op
        def triple(x: Tensor) -> Tensor:
            return x * 3

        @triple.register_impl("acme")
        def _(x): return x + x + x

        @RMSNorm.register_oot
        class AcmeNorm(RMSNorm): pass

        register_model("AcmeForCausalLM", "acme_module:Model")
        table.add("acme", 1)
        FAIL
"""
DUPLICATES = """
    from opweave import ir
    from torch import Tensor

    def register():
        @ir.register_op
        def triple(x: Tensor) -> Tensor:
            return x * 3
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules of the plugins that were called, in order."""
    module = type(sys)("opweave_plugin_test_calls")
    module.names = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.names  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> OpenRegistry[int]:
    """A table like those of options, variables and passes."""
    module, found = type(sys)("tests_registry"), OpenRegistry[int]("thing")
    module.table = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def test_each_is_called_once(installed: Install, calls: list[str]) -> None:
    loader = installed(plugin("b", CALLS), plugin("a", CALLS))
    loader.load_general()
    loader.load_general()
    loader.load_group(GENERAL)
    loader.load_general()
    assert calls == ["a_module", "b_module"]
    assert [(p.record.name, p.state) for p in loader.plugins] == [
        ("a", State.LOADED),
        ("b", State.LOADED),
    ]


def test_importing_a_group_calls_nothing(installed: Install, calls: list[str]) -> None:
    loader = installed(plugin("a", CALLS))
    functions = loader.load_group(GENERAL)
    assert calls == []
    assert functions["a"].__name__ == "register"
    loader.load_general()
    assert calls == ["a_module"]


def test_policy_leaves_plugins_unimported(installed: Install, calls: list[str]) -> None:
    policy = PluginPolicy(without=frozenset({"b"}))
    loader = installed(plugin("a", CALLS), plugin("b", "1 / 0"), policy=policy)
    loader.load_general()
    assert calls == ["a_module"]
    assert "b_module" not in sys.modules
    assert loader.plugins[1].record.state == "excluded"


def test_requirements_come_first(installed: Install, calls: list[str]) -> None:
    loader = installed(
        plugin("a", CALLS, order="[requires.c, after.d, after.nobody]"),
        plugin("b", CALLS),
        plugin("c", CALLS, order="[after.d]"),
        plugin("d", CALLS),
    )
    loader.load_general()
    assert sorted(calls) == ["a_module", "b_module", "c_module", "d_module"]
    assert calls.index("d_module") < calls.index("c_module") < calls.index("a_module")


def test_missing_requirements_are_errors(installed: Install, calls: list[str]) -> None:
    loader = installed(
        plugin("a", CALLS, order="[requires.bace]"),
        plugin("b", CALLS, order="[requires.left]"),
        plugin("c", CALLS, order="[requires.broken]"),
        plugin("base", CALLS),
        plugin("left", CALLS),
        plugin("broken", "1 / 0"),
        policy=PluginPolicy(without=frozenset({"left"})),
    )
    with pytest.raises(PluginsFailedError) as caught:
        loader.load_general()
    messages = {str(error).split("'")[1]: error for error in caught.value.errors}
    assert "requires 'bace', which is not installed. Did you mean 'base'?" in str(messages["a"])
    assert "requires 'left', which OPWEAVE_PLUGINS leaves out" in str(messages["b"])
    assert "requires 'broken', which failed to load" in str(messages["c"])
    assert isinstance(messages["a"], PluginRequirementError)
    assert calls == ["base_module"]


def test_cycles_are_errors_and_stop_nobody_else(installed: Install, calls: list[str]) -> None:
    loader = installed(
        plugin("a", CALLS, order="[requires.b]"),
        plugin("b", CALLS, order="[after.c]"),
        plugin("c", CALLS, order="[requires.a]"),
        plugin("d", CALLS),
    )
    with pytest.raises(PluginsFailedError, match="each of these waits for the next: ") as caught:
        loader.load_general()
    assert len(caught.value.errors) == 3
    circle = str(caught.value.errors[0]).split("next: ")[1].split(". ")[0].split(" → ")
    assert all((one, two) in {("a", "b"), ("b", "c"), ("c", "a")} for one, two in pairwise(circle))
    assert calls == ["d_module"]


def test_an_error_of_opweave_is_at_the_line_of_the_plugin(installed: Install) -> None:
    source = """
    from opweave import ir

    def register():
        ir.ops.rms_norm.register_impl("aten")(lambda x: x)
    """
    loader = installed(plugin("acme", source))
    with pytest.raises(PluginFailedError, match=r"comes with opweave.*\(at .*acme_module.py:5\)"):
        loader.load_general()


@pytest.mark.parametrize("fails", [False, True])
def test_all_or_nothing_and_whose(
    installed: Install, registry: ir.Registry, table: OpenRegistry[int], fails: bool
) -> None:
    from opweave_engine.models.registry import supported_architectures

    source = REGISTERS.replace("FAIL", "raise OSError('late')" if fails else "")
    loader = installed(plugin("acme", source))
    if fails:
        with pytest.raises(PluginFailedError, match=r"OSError: late \(at .*acme_module.py:21\)"):
            loader.load_general()
        assert not registry.ops
        assert not hasattr(getattr(torch.ops, registry.namespace), "triple")
        assert "RMSNorm" not in op_registry_oot
        assert "AcmeForCausalLM" not in supported_architectures()
        assert "acme" not in table
        assert loader.plugins[0].record.registered == ()
        assert "acme_module" not in sys.modules

        @ir.register_op  # the name is free again, for torch too
        def triple(x: torch.Tensor) -> torch.Tensor:
            return x * 3

        assert torch.equal(triple(torch.ones(2)), torch.full((2,), 3.0))
        return
    try:
        loader.load_general()
        op = registry.op("triple")
        owner = loader.plugins[0].entry.owner
        assert str(owner) == "acme (acme 1.0)"
        assert op.owner == op.impls["native"].owner == op.impls["acme"].owner == owner
        assert owner_of(op_registry_oot["RMSNorm"]) == owner
        assert table.entries["acme"].owner == owner
        assert loader.plugins[0].record.registered == (
            "op triple",
            "implementation triple:acme",
            "replacement of RMSNorm",
            "model AcmeForCausalLM",
            "thing acme",
        )
        assert "plugin acme (acme 1.0)" in str(ir.explain(op, torch.ones(2)))
        assert ir.explain(op, torch.ones(2)).to_dict()["providers"][0]["plugin"] == str(owner)
    finally:
        loader.plugins[0].reject(PluginFailedError("taken back"))
    assert "RMSNorm" not in op_registry_oot


def test_what_opweave_registers_meanwhile_is_its_own(fresh_cases: FreshCases) -> None:
    """A plugin that fails does not take opweave's layers with it, though it imported them first."""
    source = "import opweave.layers\ndef register(): raise OSError"
    fresh_cases(
        [
            Case(
                """
                import pytest, sys
                from opweave.plugins import PluginError, load_general_plugins, plugin_report
                assert "opweave.layers" not in sys.modules
                with pytest.raises(PluginError, match="OSError"):
                    load_general_plugins()
                from opweave.layers import RMSNorm
                from opweave.layers.registry import op_registry, owner_of
                assert op_registry["rms_norm"] is RMSNorm
                assert owner_of(RMSNorm) is None
                assert plugin_report()[0].registered == ()
                """,
                files=plugin("a", source),
            )
        ]
    )


def test_a_package_that_was_installed_after_the_start_of_the_process(
    installed: Install, tmp_path: Path
) -> None:
    loader = installed(plugin("late", CALLS))
    (tmp_path / "late_module.py").unlink()  # as if found on the path of a new process only
    with pytest.raises(PluginImportError, match="Restart Python if it was installed after"):
        loader.load_general()


def test_all_are_tried_and_those_that_failed_again(
    installed: Install, registry: ir.Registry, calls: list[str], tmp_path: Path
) -> None:
    loader = installed(plugin("a", "1 / 0"), plugin("b", DUPLICATES), plugin("c", CALLS))
    with pytest.raises(PluginImportError) as caught:
        loader.load_general()
    message = str(caught.value)
    for part in (
        "general plugin 'a' (a_module:register, of a 1.0) could not be imported",
        "ZeroDivisionError: division by zero",
        "a_module.py:1",
        "OPWEAVE_PLUGINS=-a",
        "pip uninstall a",
        "OPWEAVE_PLUGINS_STRICT=0",
    ):
        assert part in message
    assert "\n" not in message
    assert calls == ["c_module"]
    assert [p.state for p in loader.plugins] == ["failed", "loaded", "loaded"]
    with pytest.raises(UnknownOpError, match=r"It may be of general plugin a .*division by zero"):
        registry.op("of_a")
    with pytest.raises(PluginImportError):  # never "loaded" when it is not
        loader.load_general()
    install(tmp_path, plugin("a", CALLS + "\n"))
    sys.path_importer_cache.clear()
    loader.load_general()
    assert calls == ["c_module", "a_module"]
    assert registry.op("triple")
    with pytest.raises(UnknownOpError) as unknown:
        registry.op("of_a")
    assert "It may be" not in str(unknown.value)


def test_without_strict_failures_are_warnings(installed: Install, calls: list[str]) -> None:
    loader = installed(plugin("a", "1 / 0"), plugin("b", CALLS), policy=PluginPolicy(strict=False))
    with pytest.warns(PluginWarning, match="general plugin 'a' .* could not be imported"):
        loader.load_general()
    loader.load_general()  # once is enough
    assert calls == ["b_module"]


def test_a_duplicate_op_names_both(installed: Install, registry: ir.Registry) -> None:
    loader = installed(plugin("a", DUPLICATES), plugin("b", DUPLICATES))
    with pytest.raises(PluginFailedError, match=r"'b'.*'triple' is declared already.*a_module.py"):
        loader.load_general()
    assert registry.op("triple").owner == loader.plugins[0].entry.owner


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("register = 3", "is 3; it should be a function without arguments"),
        ("def register(engine): pass", "should be a function without arguments"),
        ("async def register(): 1 / 0", "an async function or a generator runs nothing of it"),
        ("def register(): yield 1 / 0", "an async function or a generator runs nothing of it"),
        ("async def register(): yield 1 / 0", "or a generator runs nothing of it"),
    ],
)
def test_entry_points_of_another_kind(installed: Install, source: str, message: str) -> None:
    with pytest.raises(PluginTypeError, match=message):
        installed(plugin("a", source)).load_general()


def test_an_entry_point_to_nothing(installed: Install) -> None:
    with pytest.raises(PluginImportError, match="has no attribute 'register'"):
        installed(plugin("a", "")).load_general()


def test_two_distributions_with_one_name(installed: Install, calls: list[str]) -> None:
    point = {GENERAL: {"acme": "one_module:register"}}
    other = {GENERAL: {"acme": "two_module:register"}}
    loader = installed(files("one", point, CALLS), files("two", other, CALLS), plugin("c", CALLS))
    with pytest.raises(DuplicatePluginError, match="one_module:register of one and two_module"):
        loader.load_general()
    assert calls == ["c_module"]


def test_the_same_thing_twice_is_no_conflict(installed: Install, calls: list[str]) -> None:
    point = {GENERAL: {"acme": "one_module:register"}}
    loader = installed(files("one", point, CALLS), files("two", point))
    loader.load_general()
    assert calls == ["one_module"]


def test_malformed_brackets(installed: Install) -> None:
    with pytest.raises(PluginTypeError, match=r"says \[needs.x\]. Expected requires.NAME"):
        installed(plugin("a", CALLS, order="[needs.x]")).load_general()


def test_misspelled_groups_are_warned_of(installed: Install) -> None:
    misspelled = files("a", {"opweave.plugins": {"a": "a_module:register"}})
    with pytest.warns(PluginWarning, match=r"a 1.0 declares.*'opweave.plugins'.*Did you mean"):
        loader = installed(misspelled)
    assert len(loader.misspelled) == 1


def test_a_plugin_may_use_ops_and_ask_for_plugins(
    installed: Install, registry: ir.Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        import torch
        from opweave import ir
        from torch import Tensor
        def register():
            @ir.register_op
            def triple(x: Tensor) -> Tensor:
                return x * 3
            assert torch.equal(triple(torch.ones(2)), torch.full((2,), 3.0))
    """
    loader = installed(plugin("a", source))
    registry.on_first_use(lambda registry: None, loader.load_general)
    assert registry.ops == {}
    registry.ensure_ready()
    assert set(registry.ops) == {"triple"}


def test_unknown_groups_and_plugins(installed: Install) -> None:
    loader = installed(plugin("acme", CALLS))
    with pytest.raises(UnknownGroupError, match=r"Did you mean 'opweave.general_plugins'\?"):
        loader.load_group("opweave.generalplugins")
    with pytest.raises(UnknownPluginError, match=r"Did you mean 'acme'\?"):
        loader.find(GENERAL, "acne")
    assert loader.find(GENERAL, "acme").entry.name == "acme"


def test_threads_wait_for_each_other_and_not_for_ever(
    installed: Install, registry: ir.Registry
) -> None:
    """One loads a plugin, which registers; another uses an op for the first time meanwhile."""
    source = """
        import time
        from opweave import ir
        from torch import Tensor
        def register():
            time.sleep(0.2)
            ir.current_registry().ensure_ready()
            @ir.register_op
            def triple(x: Tensor) -> Tensor:
                return x * 3
    """
    loader = installed(plugin("a", source))
    prepared: list[str] = []
    registry.on_first_use(lambda registry: prepared.append("once"), loader.load_general)
    threads = [
        threading.Thread(target=work, daemon=True)
        for work in (loader.load_general, registry.ensure_ready, registry.ensure_ready)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert prepared == ["once"]
    assert set(registry.ops) == {"triple"}


# The smallest plugin, as the documentation prints it.

PAGE = ROOT / "docs" / "how-to" / "plugins.md"


def test_it_runs_as_printed(fresh_cases: FreshCases) -> None:
    page = PAGE.read_text(encoding="utf-8")
    [module, *_] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [project, *_] = [tomllib.loads(t) for t in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    metadata = project["project"]
    assert len(module.splitlines()) <= 10
    [(group, [(name, value)])] = [(g, p.items()) for g, p in metadata["entry-points"].items()]
    assert value == "hello_kernels:register"
    distribution = files(metadata["name"], {group: {name: value}}, version=metadata["version"])
    fresh_cases(
        [
            Case(
                """
                x = torch.randn(4, 8)
                assert torch.equal(ir.ops.relu2.using("hello!")(x), x.clamp(min=0).square())
                assert str(ir.ops.relu2.impls["hello"].owner) == "hello (hello-kernels 0.1.0)"
                from opweave.plugins import plugin_report
                [record] = plugin_report()
                assert record.state == "loaded", record
                assert record.registered == ("implementation relu2:hello",)
                """,
                files={**distribution, "hello_kernels.py": module},
            )
        ]
    )


# Plugins that want the same, and names of plugins that are left out.


@pytest.fixture
def op(registry: ir.Registry) -> ir.IrOp:
    @ir.register_op
    def twice(x: Tensor) -> Tensor:
        return x * 2

    return twice


def preferring(name: str, then: str = "") -> dict[str, str]:
    """Return a plugin with a kernel for the op, which it makes the default."""
    source = f"""
        from opweave.ir.registry import find_op
        def register():
            op = find_op("twice")
            op.register_impl({name!r})(lambda x: x + x)
            op.set_default([{name!r}])
            {then}
    """
    return plugin(name, source)


def test_the_last_default_is_warned_of_and_named(installed: Install, op: ir.IrOp) -> None:
    found = installed(preferring("one"), preferring("two"))
    told = (
        r"twice: the plugin two \(two 1.0\) replaces the default one \(twice.set_default.* "
        r"of the plugin one \(one 1.0\)\)\..*PRIORITY__TWICE=one\..* OPWEAVE_PLUGINS=-two\.$"
    )
    with pytest.warns(ReplacedWarning, match=told):
        found.load_general()
    assert op.get_priority() == ["two", "native"]
    assert ir.policy_for(op).priority[0].origin == (
        "twice.set_default(...) of the plugin two (two 1.0)"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op.set_default(["one"])  # the program's own choice
    assert ir.policy_for(op).priority[0].origin == "twice.set_default(...)"
    assert found.plugins[0].record.registered == ("implementation twice:one", "default of twice")


def test_a_plugin_may_change_its_mind(installed: Install, op: ir.IrOp) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installed(preferring("one", then="op.set_default(['native'])")).load_general()
    assert op.get_priority() == ["native"]


@pytest.mark.filterwarnings("ignore::opweave.ir.errors.ReplacedWarning")
@pytest.mark.parametrize("before", [None, "one"])
def test_the_default_of_a_plugin_that_fails_is_taken_back(
    installed: Install, op: ir.IrOp, before: str | None
) -> None:
    others = [preferring(before)] if before else []
    found = installed(*others, preferring("two", then="1 / 0"))
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        found.load_general()
    assert op.get_priority() == [*([before] if before else []), "native"]
    owner = op.registry.settings.default_owner(op.name)
    assert (owner and owner.plugin) == before


LEFT_OUT = [
    (PluginPolicy(without=frozenset({"acme"})), r"which OPWEAVE_PLUGINS leaves out\."),
    (PluginPolicy(only=frozenset({"other"})), r"which OPWEAVE_PLUGINS leaves out\."),
    (PluginPolicy(platform="other"), r"which OPWEAVE_PLATFORM=other leaves out\."),
    (PluginPolicy(), r"which says that its device is not here\."),
]


@pytest.mark.parametrize(("policy", "why"), LEFT_OUT)
def test_an_unknown_provider_may_be_of_a_plugin_that_is_absent(
    installed: Install, op: ir.IrOp, policy: PluginPolicy, why: str
) -> None:
    found = installed(
        plugin("acme", "def register(): pass", PLATFORM),
        plugin("other", "def register(): pass", PLATFORM),
        policy=policy,
    )
    found.platform_claims()
    told = (
        r"unknown provider 'acme' .*Known: native\. It may be of platform plugin acme \(acme 1.0\)"
    )
    with pytest.raises(UnknownProviderError, match=told + ".* " + why):
        op.using("acme")


def test_a_general_plugin_that_is_left_out(installed: Install, op: ir.IrOp) -> None:
    found = installed(preferring("acme"), policy=PluginPolicy(without=frozenset({"acme"})))
    found.load_general()
    told = r"of general plugin acme \(acme 1.0\), which OPWEAVE_PLUGINS leaves out\.$"
    with pytest.raises(UnknownProviderError, match=told):
        op.using("acme")


def test_a_failure_is_still_told(installed: Install, op: ir.IrOp) -> None:
    found = installed(plugin("acme", "1 / 0"), policy=PluginPolicy(strict=False))
    with pytest.warns(PluginWarning):
        found.load_general()
    told = r"acme \(acme 1.0\), which failed to load: ZeroDivisionError: division by zero\.$"
    with pytest.raises(UnknownProviderError, match=told):
        op.using("acme")
