"""Environment variables for plugins."""

from __future__ import annotations

import pytest

from opweave.plugins.discovery import PluginPolicy
from opweave.plugins.entry import PluginPolicyError


@pytest.mark.parametrize(
    ("value", "permitted"),
    [
        (None, "abc"),
        ("", ""),
        (" a , b ", "ab"),
        ("a,", "a"),
        ("-a", "bc"),
        (" - a , -b", "c"),
        ("a,-b", "a"),
    ],
)
def test_which_plugins_are_permitted(value: str | None, permitted: str) -> None:
    policy = PluginPolicy.from_environment({} if value is None else {"OPWEAVE_PLUGINS": value})
    assert [name for name in "abc" if policy.permits(name)] == list(permitted)


@pytest.mark.parametrize("value", ["a", "a,b,c", "-a", "-a,-c", "b,-c", None])
@pytest.mark.parametrize("name", ["a", "b"])
def test_the_way_out_leaves_out_that_plugin_and_no_other(value: str | None, name: str) -> None:
    policy = PluginPolicy.from_environment({} if value is None else {"OPWEAVE_PLUGINS": value})
    variable, _, setting = policy.leaving_out(name).partition("=")
    after = PluginPolicy.from_environment({variable: setting})
    assert not after.permits(name)
    others = {"a", "b", "c"} - {name}
    assert {o for o in others if after.permits(o)} == {o for o in others if policy.permits(o)}


def test_the_other_settings() -> None:
    assert PluginPolicy.from_environment({}) == PluginPolicy(None, frozenset(), None, True)
    policy = PluginPolicy.from_environment(
        {"OPWEAVE_PLATFORM": " acme ", "OPWEAVE_PLUGINS_STRICT": "0"}
    )
    assert (policy.platform, policy.strict) == ("acme", False)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OPWEAVE_PLUGINS": "a,-a"}, "both asks for 'a' and leaves it out"),
        ({"OPWEAVE_PLUGINS": "a,-"}, "a '-' without a name"),
    ],
)
def test_nonsense_is_an_error(environment: dict[str, str], message: str) -> None:
    with pytest.raises(PluginPolicyError, match=message):
        PluginPolicy.from_environment(environment)


def test_names_must_be_installed() -> None:
    PluginPolicy(only=frozenset({"acme"}), platform="cpu").check({"acme"})
    PluginPolicy(platform="acme").check({"acme"})
    with pytest.raises(PluginPolicyError, match=r"names 'acem'.*Did you mean 'acme'\?"):
        PluginPolicy(only=frozenset({"acem"})).check({"acme"})
    with pytest.raises(PluginPolicyError, match=r"names 'acem'"):
        PluginPolicy(without=frozenset({"acem"})).check({"acme"})
    with pytest.raises(PluginPolicyError, match=r"OPWEAVE_PLATFORM='cdua'.*Did you mean 'cuda'\?"):
        PluginPolicy(platform="cdua").check({"acme"})
