"""Platform plugins: asked once, and what they may claim."""

from __future__ import annotations

import sys

import pytest

from opweave.config.values import OpenRegistry
from opweave.ir.errors import DuplicateImplError, SettingError
from opweave.plugins.discovery import PluginPolicy
from opweave.plugins.entry import (
    BUILTIN_PLATFORMS,
    PLATFORM_API,
    Claim,
    ClaimApiError,
    PlatformConflictError,
    PluginHookError,
    PluginsFailedError,
    PluginTypeError,
    PluginWarning,
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
