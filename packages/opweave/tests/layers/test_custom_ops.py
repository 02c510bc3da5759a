"""``custom_ops``: what it enables, what it may say, and where it can be said."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest

import opweave.layers
from opweave.config import (
    CompilationConfig,
    CompilationMode,
    EngineConfig,
    compilation_config,
    current_compilation_config,
)
from opweave.config.compilation import apply_command_line_config
from opweave.ir.errors import SettingError
from opweave.layers import CustomOp, op_registry
from opweave.layers.registry import UnusedOpWarning, warn_of_unused_ops, warn_of_unused_replacements
from support.fixtures import Case, FreshCases

pytestmark = pytest.mark.usefixtures("registries")

OPS = ("rms_norm", "silu_and_mul", "gelu_and_mul", "relu3")


@pytest.mark.parametrize(
    ("custom_ops", "modes", "backend", "expected", "default_on"),
    [
        ("", (0, 1, 2, 3), "eager", "1111", True),
        ("", (0,), "inductor", "1111", True),
        ("", (1, 2, 3), "inductor", "0000", False),
        ("+rms_norm,-silu_and_mul", (0,), "inductor", "1011", True),
        ("none,-rms_norm,+relu3", (1,), "eager", "0001", False),
        ("all,-silu_and_mul", (2,), "inductor", "1011", True),
        ("-relu3,+relu2", (3,), "eager", "1110", True),
        ("none,-relu3,+rms_norm,+silu_and_mul", (3,), "eager", "1100", False),
        ("-rms_norm", (3,), "eager", "0111", True),
        ("none,+relu3", (3,), "inductor", "0001", False),
        ("all,-rms_norm", (3,), "inductor", "0111", True),
    ],
)
def test_what_is_enabled(
    custom_ops: str, modes: tuple[int, ...], backend: str, expected: str, default_on: bool
) -> None:
    relu3 = CustomOp.register("relu3")(type("ReLU3", (op_registry["relu2"],), {}))
    assert op_registry["relu3"] is relu3
    unregistered = type("SiluAndMul2", (op_registry["silu_and_mul"],), {})
    for mode in modes:
        config = CompilationConfig(backend, mode, custom_ops)
        with compilation_config(config):
            assert CustomOp.default_on() is default_on
            enabled = [op_registry[name].enabled() for name in OPS]  # type: ignore[attr-defined]
            assert enabled == [flag == "1" for flag in expected]
            assert unregistered.enabled() is enabled[1]  # type: ignore[attr-defined]


# Valid lists


@pytest.mark.parametrize(
    "written",
    [
        ["all", "-op1"],
        ["all,-op1"],
        "all,-op1",
        " all , -op1 ",
        '["all,-op1"]',
        '["all", "-op1"]',
        ("all", "-op1"),
        (token for token in ["all", "-op1"]),
    ],
)
def test_lists_and_strings(written: Any) -> None:
    assert CompilationConfig(custom_ops=written).custom_ops == ("all", "-op1")


def test_dash_and_underscore_are_alike() -> None:
    assert CompilationConfig(custom_ops="none,+rms-norm").enables_custom_op("rms_norm")


def test_what_the_user_wrote_stays_and_the_default_is_appended() -> None:
    assert CompilationConfig(custom_ops=["+a", "-b"]).custom_ops == ("+a", "-b", "all")
    compiling = CompilationConfig(mode=3, custom_ops=["+a", "-b"])
    assert compiling.custom_ops == ("+a", "-b", "none")
    # The default is computed again for a derived config.
    derived = dataclasses.replace(CompilationConfig(custom_ops="+a"), mode=3)
    assert derived.custom_ops == ("+a", "none")
    kept = dataclasses.replace(CompilationConfig(custom_ops="+a,all"), mode=3)
    assert kept.custom_ops == ("+a", "all")


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        ("all,none", ["'all' and 'none'", "once"]),
        ("all,+rms_norm,all", ["'all' and 'all'", "once"]),
        ("+rms_norm,-rms_norm", ["both enables and disables rms_norm", "'+rms_norm'"]),
        ("rms_norm", ["'rms_norm' must be 'all', 'none', '+op' or '-op'"]),
        ("all,,-a", ["'' must be"]),
        ("+", ["'+' must be"]),
        ("*", ["'*' must be"]),
        ([3], ["[3] should be a list of strings"]),
        (3, ["list of strings"]),
        (None, ["list of strings"]),
        ('["all"', ["not a JSON list"]),
    ],
)
def test_what_a_list_may_not_say(written: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError, match="custom_ops") as caught:
        CompilationConfig(custom_ops=written)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "mode", [3, CompilationMode.OPWEAVE_COMPILE, "3", "opweave-compile", "VLLM_COMPILE"]
)
def test_modes(mode: Any) -> None:
    assert CompilationConfig(mode=mode).mode is CompilationMode.VLLM_COMPILE


@pytest.mark.parametrize("mode", [4, -1, True, None, "fast", 1.0])
def test_no_modes_and_no_backends(mode: Any) -> None:
    with pytest.raises(SettingError, match=r"mode=.* should be one of 0 \(NONE\), 1 \(STOCK"):
        CompilationConfig(mode=mode)
    for backend in ("", None):
        with pytest.raises(SettingError, match=r"backend=.* should name a backend"):
            CompilationConfig(backend)  # type: ignore[arg-type]


# Where it can be said


def test_scopes_nest() -> None:
    outer, inner = CompilationConfig(custom_ops="none"), CompilationConfig(custom_ops="+a")
    before = current_compilation_config()
    with compilation_config(outer):
        with compilation_config(inner):
            assert current_compilation_config() is inner
        with pytest.raises(KeyError), compilation_config(inner):
            raise KeyError
        assert current_compilation_config() is outer
    assert current_compilation_config() is before


def test_the_engines_config_takes_both_forms() -> None:
    typed = CompilationConfig(custom_ops=["none"])
    assert EngineConfig(compilation_config=typed).compilation is typed
    as_dict = EngineConfig(compilation_config={"custom-ops": ["none"], "mode": "none"})
    assert as_dict.compilation_config == typed
    with compilation_config(CompilationConfig(mode=3, custom_ops="+a")) as current:
        assert EngineConfig().compilation == current
        # A dict says what differs; counters are not shared.
        eager = EngineConfig(compilation_config={"backend": "eager"}).compilation
        assert eager == CompilationConfig("eager", 3, "+a")
        assert eager.custom_ops == ("+a", "all")
        assert EngineConfig().compilation.enabled_custom_ops is not current.enabled_custom_ops


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"custom_op": "all"}, "compilation_config: unknown key 'custom_op'. Did you mean"),
        ({"custom_ops": "every"}, "compilation_config: custom_ops: 'every' must be"),
        ({"enabled_custom_ops": {}}, "unknown key 'enabled_custom_ops'"),
        ("all", "should be a CompilationConfig or a dict"),
    ],
)
def test_what_the_engines_config_refuses(given: Any, part: str) -> None:
    with pytest.raises(SettingError, match=part):
        EngineConfig(compilation_config=given)


def test_the_command_line() -> None:
    try:
        apply_command_line_config({"custom-ops": '["none","+a"]', "mode": "1"})
        assert current_compilation_config() == CompilationConfig(mode=1, custom_ops="none,+a")
        with pytest.raises(SettingError, match=r"--compilation-config.mode: mode='x'"):
            apply_command_line_config({"mode": "x"})
    finally:
        apply_command_line_config({})
    assert current_compilation_config() == CompilationConfig()


PREFIX = "OPWEAVE_COMPILATION_CONFIG__"
CURRENT = """
from opweave.config import CompilationConfig, current_compilation_config
assert current_compilation_config() == CompilationConfig({0}), current_compilation_config()
"""
FAILS = """
from opweave.config import current_compilation_config
for _ in range(2):
    try:
        current_compilation_config()
    except ValueError as error:
        assert {0!r} in str(error), error
    else:
        raise AssertionError
"""
FILE = "[compilation_config]\ncustom_ops = ['none', '+rms_norm']\nmode = 1\n"


def test_environment_and_file(fresh_cases: FreshCases) -> None:
    fresh_cases(
        [
            Case(CURRENT.format("")),
            Case(CURRENT.format("custom_ops='none,+a'"), {PREFIX + "CUSTOM_OPS": "none,+a"}),
            Case(CURRENT.format("'eager', 2"), {PREFIX + "BACKEND": "eager", PREFIX + "MODE": "2"}),
            Case(CURRENT.format(""), {PREFIX + "MODE": ""}),
            Case(CURRENT.format("mode=1, custom_ops='none,+rms_norm'"), {}, {"opweave.toml": FILE}),
            # the environment is stronger, key by key
            Case(
                CURRENT.format("mode=1, custom_ops='all'"),
                {PREFIX + "CUSTOM_OPS": "all"},
                {"opweave.toml": FILE},
            ),
            Case(FAILS.format(PREFIX + "MODE: mode='9'"), {PREFIX + "MODE": "9"}),
            Case(FAILS.format(PREFIX + "MOOD: unknown key 'mood'"), {PREFIX + "MOOD": "1"}),
            Case(
                FAILS.format("opweave.toml compilation_config: custom_ops: 'x' must be"),
                {},
                {"opweave.toml": "[compilation_config]\ncustom_ops = 'x'"},
            ),
            Case(
                FAILS.format("compilation_config = 3 should be a table"),
                {},
                {"opweave.toml": "compilation_config = 3"},
            ),
        ]
    )


# Names without effect


def test_names_without_effect_are_warned_of() -> None:
    CustomOp.register("built")(type("Built", (CustomOp,), {}))
    CustomOp.register("absent")(type("Absent", (CustomOp,), {}))
    config = CompilationConfig(custom_ops="+built,-absent,+abscent,+RMSNorm")
    with compilation_config(config):
        op_registry["built"]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_unused_ops(config)
    assert {warning.category for warning in caught} == {UnusedOpWarning}
    by_class, unknown, absent = (str(warning.message) for warning in caught)
    assert "'absent', which is not present in the model, so it has no effect." in absent
    assert "'abscent', which doesn't exist (or wasn't imported or registered)." in unknown
    assert "Did you mean 'absent'?" in unknown
    assert "'RMSNorm', which doesn't exist (or wasn't imported or registered)." in by_class
    assert "Did you mean 'rms_norm'?" in by_class


def test_a_replacement_of_no_layer_is_warned_of() -> None:
    @CustomOp.register_oot(name="SiluAndMull")
    class Mine(op_registry["silu_and_mul"]):  # type: ignore[misc]
        pass

    CustomOp.register_oot(name="SiluAndMul")(Mine)
    with pytest.warns(UnusedOpWarning) as caught:
        warn_of_unused_replacements()
    (message,) = (str(warning.message) for warning in caught)
    assert "Mine replaces 'SiluAndMull', which no layer is called." in message
    assert "Did you mean 'SiluAndMul'?" in message


# Every name of the seed document's list is registered.

LISTED = Path(__file__).with_name("seed_names.txt").read_text(encoding="utf-8").splitlines()
NAMES = [line for line in LISTED if not line.startswith("#")]


def test_each_is_registered() -> None:
    for name in NAMES:
        layer = opweave.layers.op_registry[name]
        assert issubclass(layer, (opweave.layers.CustomOp, opweave.layers.PluggableLayer))
        assert layer.__dict__["name"] == name
        assert layer.__doc__
