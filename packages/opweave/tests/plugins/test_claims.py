"""Platform plugins: asked once, and what they may claim."""

from __future__ import annotations

import os.path
import sys
from pathlib import Path

import pytest

from opweave.config.values import OpenRegistry
from opweave.ir.errors import DuplicateImplError, SettingError
from opweave.plugins import resolve_obj_by_qualname
from opweave.plugins.discovery import PluginPolicy
from opweave.plugins.entry import (
    BUILTIN_PLATFORMS,
    PLATFORM_API,
    Claim,
    ClaimApiError,
    PlatformConflictError,
    PluginHookError,
    PluginPolicyError,
    PluginsFailedError,
    PluginTypeError,
    PluginWarning,
    ReferenceNameError,
    ReservedPluginNameError,
)
from opweave.plugins.loader import Loader, PlatformCandidate, choose
from opweave.plugins.plugin import State

from .conftest import Install
from .helpers import PLATFORM, plugin

CPU = PlatformCandidate(
    "cpu", Claim("opweave.platforms.builtin.CpuPlatform", PLATFORM_API, 0), None
)


def platform(name: str, returned: str, before: str = "") -> dict[str, str]:
    """Return a platform plugin whose function returns an expression."""
    source = f"""
        from opweave.plugins import Claim
        asked = 0
        def register():
            global asked
            asked += 1
            {before}
            return {returned}
    """
    return plugin(name, source, PLATFORM)


def claims(loader: Loader) -> dict[str, Claim]:
    return {candidate.name: candidate.claim for candidate in loader.platform_claims()}


def test_the_three_answers(installed: Install) -> None:
    loader = installed(
        platform("a", "Claim('a_module:Platform', api=1, score=7, why='it is plugged in')"),
        platform("b", "'b_module.Platform'"),
        platform("c", "None"),
    )
    assert claims(loader) == {
        "a": Claim("a_module:Platform", 1, 7, "it is plugged in"),
        "b": Claim("b_module.Platform", PLATFORM_API, 100, ""),
    }
    assert [p.state for p in loader.plugins] == [State.CLAIMED, State.CLAIMED, State.DECLINED]
    assert loader.plugins[0].record.detail == "it is plugged in"
    assert loader.platform_claims()[0].owner == loader.plugins[0].entry.owner


def test_each_is_asked_once(installed: Install) -> None:
    # The second answer would be None, as of a plugin that keeps a state.
    loader = installed(platform("a", "'a_module.Platform' if asked == 1 else None"))
    assert claims(loader) == claims(loader)
    assert sys.modules["a_module"].asked == 1


@pytest.mark.parametrize(
    ("only", "why"),
    [(None, "OPWEAVE_PLATFORM=a selects another"), (frozenset(), "left out by OPWEAVE_PLUGINS")],
)
def test_a_selected_platform_is_asked_alone(
    installed: Install, only: frozenset[str] | None, why: str
) -> None:
    policy = PluginPolicy(platform="a", only=only)
    loader = installed(platform("a", "'a_module.P'"), plugin("b", "1 / 0", PLATFORM), policy=policy)
    assert set(claims(loader)) == {"a"}
    assert "b_module" not in sys.modules
    assert loader.plugins[1].record.detail == why


def test_a_builtin_platform_that_is_selected_needs_no_plugin(installed: Install) -> None:
    loader = installed(plugin("b", "1 / 0", PLATFORM), policy=PluginPolicy(platform="cpu"))
    assert claims(loader) == {}
    assert "b_module" not in sys.modules


@pytest.mark.parametrize("api", [0, 2, "'1'"])
def test_another_version_of_the_interface(installed: Install, api: object) -> None:
    loader = installed(platform("a", f"Claim('a_module.P', api={api})"))
    with pytest.raises(ClaimApiError, match=r"platform plugin 'a' .*has version 1") as caught:
        loader.platform_claims()
    remedy = "Upgrade opweave" if api == 2 else "Install a newer a"
    assert remedy in str(caught.value)
    assert "OPWEAVE_PLUGINS=-a" in str(caught.value)


@pytest.mark.parametrize("returned", ["3", "''", "'a b.c'", "object", "Claim('', api=1)"])
def test_answers_of_another_kind(installed: Install, returned: str) -> None:
    with pytest.raises(PluginTypeError, match=r"returned .*; it should be a function without"):
        installed(platform("a", returned)).platform_claims()


@pytest.mark.parametrize("given", ["score='high'", "score=float('nan')", "score=True", "why=3"])
def test_claims_of_another_kind(installed: Install, given: str) -> None:
    loader = installed(platform("a", f"Claim('a_module.P', api=1, {given})"))
    with pytest.raises(PluginTypeError, match=r"platform plugin 'a' .*should be a (finite|string)"):
        loader.platform_claims()


@pytest.mark.parametrize("name", BUILTIN_PLATFORMS)
def test_the_names_of_builtin_platforms_are_reserved(installed: Install, name: str) -> None:
    loader = installed(platform(name, "None"))
    with pytest.raises(
        ReservedPluginNameError, match=f"'{name}'.*platform that comes with opweave"
    ):
        loader.platform_claims()
    assert f"{name}_module" not in sys.modules
    without = installed(policy=PluginPolicy(without=frozenset({name})))
    assert without.platform_claims() == []


def test_all_are_asked_before_an_error(installed: Install) -> None:
    loader = installed(platform("a", "1 / 0"), platform("b", "1 / 0"), platform("c", "'c.P'"))
    with pytest.raises(PluginsFailedError, match="2 plugins failed:"):
        loader.platform_claims()
    assert [p.state for p in loader.plugins] == [State.FAILED, State.FAILED, State.CLAIMED]
    with pytest.raises(PluginsFailedError):  # not once an error, and then the CPU
        loader.platform_claims()


def test_without_strict_the_others_remain(installed: Install) -> None:
    policy = PluginPolicy(strict=False)
    loader = installed(platform("a", "1 / 0"), platform("c", "'c.P'"), policy=policy)
    with pytest.warns(PluginWarning, match="'a'"):
        assert set(claims(loader)) == {"c"}


def test_the_highest_score_is_chosen(installed: Install) -> None:
    loader = installed(platform("a", "'a.P'"), platform("b", "Claim('b.P', api=1, score=101)"))
    assert choose([CPU, *loader.platform_claims()]).name == "b"
    assert choose([CPU]) is CPU


def test_equal_scores_are_an_error(installed: Install) -> None:
    loader = installed(
        platform("z", "'z.P'"), platform("b", "Claim('b.P', api=1, why='b0 is there')")
    )
    with pytest.raises(PlatformConflictError) as caught:
        choose([CPU, *loader.platform_claims()])
    assert str(caught.value).startswith(
        "2 platforms claim this machine: b of b (b 1.0), because b0 is there; z of z (z 1.0). "
        "Choose one with OPWEAVE_PLATFORM=b"
    )


def test_hooks_are_the_plugins_own(installed: Install) -> None:
    table = OpenRegistry[int]("thing")
    loader = installed(platform("a", "'a.P'"))
    [candidate] = loader.platform_claims()
    assert candidate.owner is not None
    acme = loader.platform_of(candidate.owner)
    assert acme is not None
    message = r"'a' .* failed in import_kernels: OSError: no bus"

    def half() -> None:
        with acme.hook("import_kernels"):
            table.add("half", 1)
            raise OSError("no bus")

    with pytest.raises(PluginHookError, match=message):
        half()
    assert "half" not in table
    with pytest.raises(SettingError), acme.hook("check_and_update_config"):
        raise SettingError("for the user")
    with pytest.raises(PluginHookError, match="provider"), acme.hook("import_kernels"):
        raise DuplicateImplError("the provider is there already")
    with acme.hook("import_kernels"):
        table.add("whole", 1)
    assert table.entries["whole"].owner == candidate.owner
    assert acme.record.registered == ("thing whole",)
    assert acme.record.error is None


# Environment variables for plugins.


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


# Objects by qualified name.


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("opweave.plugins.Claim", Claim),
        ("opweave.plugins:Claim", Claim),
        ("os.path.join", os.path.join),
        ("pathlib:Path.exists", Path.exists),
    ],
)
def test_both_forms(name: str, found: object) -> None:
    assert resolve_obj_by_qualname(name) is found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os.path.jion", "os.path has no 'jion'. Did you mean 'join'"),
        ("nowhere.Thing", "no module 'nowhere'"),
        ("os.nowhere.Thing", "no module 'os.nowhere'"),
        ("Thing", "not a qualified name"),
        ("", "not a qualified name"),
        ("a b.c", "not a qualified name"),
    ],
)
def test_names_of_nothing(name: str, message: str) -> None:
    with pytest.raises(ReferenceNameError, match=message):
        resolve_obj_by_qualname(name)


def test_what_a_module_lacks_is_not_blamed_on_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_more.py").write_text("import not_installed_here\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_here") as caught:
        resolve_obj_by_qualname("needs_more.Thing")
    assert not isinstance(caught.value, ReferenceNameError)
