"""Plugins that want the same, and names of plugins that are left out."""

from __future__ import annotations

import warnings

import pytest
from torch import Tensor

from opweave import ir
from opweave.ir.errors import ReplacedWarning, UnknownProviderError
from opweave.plugins import PluginError, PluginWarning
from opweave.plugins.discovery import PluginPolicy

from .conftest import Install
from .helpers import PLATFORM, plugin


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
    assert found.plugins[0].record.registered == (
        "implementation twice:one",
        "default of twice",
    )


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
