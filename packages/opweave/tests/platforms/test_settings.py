"""Options of the command line and environment variables that plugins declare."""

from __future__ import annotations

from typing import Any

import pytest

from opweave import transaction
from opweave.config import environment, plugin_options
from opweave.config.environment import check_declared, declare_variable, declared, declared_value
from opweave.config.plugin_options import (
    PluginOptions,
    apply_plugin_options,
    given_plugin_options,
    options,
    plugin_settings,
)
from opweave.config.values import DuplicateNameError, UnknownNameError
from opweave.ir.errors import SettingError
from opweave.registration import Owner, owned_by
from support import ROOT
from support.fixtures import FreshCases

from .conftest import installed

OWNER = Owner("acme", "acme-device", "0.1.0")


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what the test declares and sets."""
    for registry in (options, declared):
        monkeypatch.setattr(registry, "_entries", dict(registry.entries))
    monkeypatch.setattr(plugin_options, "_given", {})


@pytest.fixture
def acme_options() -> PluginOptions:
    found = PluginOptions("acme")
    found.add("queue_depth", int, 4, "Kernels in flight.")
    found.add("fast", bool, False, "Be fast.")
    found.add("share", float, 0.5, "Of the device.")
    found.add("mode", str, "plain", "How.")
    return found


def test_defaults_and_what_was_given(acme_options: PluginOptions) -> None:
    assert [acme_options[key] for key in ("queue_depth", "fast", "share", "mode")] == [
        4,
        False,
        0.5,
        "plain",
    ]
    apply_plugin_options(
        {"acme.queue-depth": "8", "acme.fast": "yes", "acme.share": 1, "acme.mode": "3"}
    )
    assert [acme_options[key] for key in ("queue_depth", "fast", "share", "mode")] == [
        8,
        True,
        1,
        "3",
    ]
    assert given_plugin_options().keys() == options.entries.keys()


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("acme.queue_dept", "8", ("no plugin has this option", "'acme.queue_depth'?")),
        ("acme.queue-depth", "many", ("--plugin.acme.queue-depth='many'", "an integer")),
        ("acme.queue-depth", "1.5", ("an integer",)),
        ("acme.queue-depth", True, ("an integer",)),
        ("acme.fast", "maybe", ("true (1) or false (0)",)),
        ("acme.share", "half", ("a number",)),
        ("acme.mode", 3, ("a string",)),
    ],
)
def test_what_cannot_be_set(
    name: str, value: Any, named: tuple[str, ...], acme_options: PluginOptions
) -> None:
    with pytest.raises(SettingError) as raised:
        apply_plugin_options({"acme.mode": "other", name: value})
    for part in named:
        assert part in str(raised.value)
    assert acme_options["mode"] == "plain"  # all or nothing


@pytest.mark.parametrize(
    ("key", "kind", "default", "error"),
    [
        ("queue depth", int, 4, SettingError),
        ("depth", list, [], SettingError),
        ("depth", int, "4", SettingError),
        ("depth", bool, 1, SettingError),
        ("mode", str, "x", DuplicateNameError),
    ],
)
def test_what_cannot_be_declared(
    key: str, kind: Any, default: Any, error: type[Exception], acme_options: PluginOptions
) -> None:
    with pytest.raises(error):
        acme_options.add(key, kind, default, "")


def test_an_option_that_nobody_declares() -> None:
    with pytest.raises(UnknownNameError, match=r"acme\.nothing"):
        PluginOptions("acme")["nothing"]


def fail_half_way() -> None:
    with transaction.begin() as entered:
        PluginOptions("acme").add("lost", int, 1, "")
        declare_variable("ACME_LOST", int, 1, "")
        assert entered.registered == ["plugin option acme.lost", "environment variable ACME_LOST"]
        raise ZeroDivisionError


def test_a_name_remembers_its_owner_and_goes_with_a_plugin_that_fails() -> None:
    with owned_by(OWNER):
        PluginOptions("acme").add("kept", int, 1, "")
    assert options.entries["acme.kept"].owner == OWNER
    with pytest.raises(
        DuplicateNameError, match=r"already registered by plugin acme \(acme-device 0.1.0\)"
    ):
        PluginOptions("acme").add("kept", int, 1, "")
    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert "acme.lost" not in options
    assert "ACME_LOST" not in declared


# Variables


def test_a_declared_variable_is_typed_and_known() -> None:
    declare_variable("OPWEAVE_ACME_DEPTH", int, 4, "Kernels in flight.")
    assert declared_value("OPWEAVE_ACME_DEPTH", {}) == 4
    environ = {"OPWEAVE_ACME_DEPTH": "8", "OPWEAVE_ACME_DEPHT": "8"}
    assert declared_value("OPWEAVE_ACME_DEPTH", environ) == 8
    assert environment.in_use(environ) == {"OPWEAVE_ACME_DEPTH": "8"}
    (unknown,) = environment.unknown_variables(environ)
    assert unknown.startswith("OPWEAVE_ACME_DEPHT is set, but is not a variable of opweave.")
    check_declared(environ)
    with pytest.raises(SettingError, match="OPWEAVE_ACME_DEPTH='deep' must be an integer"):
        check_declared({"OPWEAVE_ACME_DEPTH": "deep"})


@pytest.mark.parametrize(
    "name", ["acme_depth", "ACME DEPTH", "", "OPWEAVE_CONFIG", "OPWEAVE_IR_OP_PRIORITY__RMS_NORM"]
)
def test_names_that_a_variable_cannot_have(name: str) -> None:
    with pytest.raises(SettingError):
        declare_variable(name, int, 1, "")


# On the command line

PLATFORM = """
    from opweave.config.plugin_options import PluginOptions
    from opweave.platforms import Platform

    class AcmePlatform(Platform):
        name = "acme"
        device_type = "cpu"

        def extend_cli(self, options):
            options.add("queue_depth", int, 4, "Kernels in flight.")

        def check_and_update_config(self, config):
            print("depth", PluginOptions("acme")["queue_depth"])
            return ()

    def register():
        return "acme_platform.AcmePlatform"
"""
GENERAL = """
    from opweave.config.plugin_options import PluginOptions

    def register():
        PluginOptions("extra").add("level", float, 1.0, "How much.")
"""
POINTS = {
    "opweave.platform_plugins": {"acme": "acme_platform:register"},
    "opweave.general_plugins": {"extra": "acme_extra:register"},
}


def test_options_on_the_command_line(fresh_cases: FreshCases) -> None:
    checkpoint = ROOT / "examples" / "models" / "tiny-pydoc"
    code = f"""
        import contextlib, io, json
        from opweave.cli import main
        from opweave.config.plugin_options import PluginOptions

        def run(*options):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    main(["generate", {str(checkpoint)!r}, "--prompt", "If", "--max-tokens", "1",
                          *options])
                except SystemExit as exit:
                    return exit.code or 0, out.getvalue(), err.getvalue()

        code, out, err = run("--plugin.acme.queue-dept=8")
        assert code == 2 and err.count("\\n") == 1, err
        assert "--plugin.acme.queue" in err and "'acme.queue_depth'" in err, err
        code, out, err = run("--plugin.acme.queue-depth=deep")
        assert code == 2 and "must be an integer" in err, err
        code, out, err = run("--plugin.acme.queue-depth=8", "--plugin.extra.level", "-0.5")
        assert code == 0, err
        assert "depth 8" in out
        assert PluginOptions("extra")["level"] == -0.5
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try:
                main(["doctor", "--json", "--plugin.acme.queue-depth=8"])
            except SystemExit:
                listed = {{s["name"]: s for s in json.loads(out.getvalue())["plugin_settings"]}}
        depth = listed["--plugin.acme.queue-depth"]
        assert (depth["default"], depth["given"], depth["owner"]["plugin"]) == (4, 8, "acme")
    """
    files = {"acme_platform.py": PLATFORM, "acme_extra.py": GENERAL}
    fresh_cases([installed(code, POINTS, files, {"COLUMNS": "200"})])


def test_everything_declared_is_listed(acme_options: PluginOptions) -> None:
    with owned_by(OWNER):
        declare_variable("ACME_DEPTH", int, 4, "Kernels in flight.")
    apply_plugin_options({"acme.queue-depth": "8"})
    found = {each.name: each for each in plugin_settings({"ACME_DEPTH": "5"})}
    assert found["--plugin.acme.queue-depth"][1:] == ("int", 4, 8, "Kernels in flight.", None)
    assert found["--plugin.acme.fast"].given is None
    assert found["ACME_DEPTH"][1:] == ("int", 4, "5", "Kernels in flight.", OWNER)
