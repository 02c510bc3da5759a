"""Output of the commands about plugins."""

from __future__ import annotations

from support import ROOT
from support.fixtures import Case, FreshCases

from .helpers import plugin

COMMAND = """
    import contextlib, io, json, pytest
    from opweave.cli import main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.raises(SystemExit) as exit_:
            main(COMMAND)
    out, err, code = out.getvalue(), err.getvalue(), exit_.value.code
"""
KERNEL_AND_LAYER = """
    from opweave import ir
    from opweave.layers import CustomOp, RMSNorm
    def register():
        print("output of a plugin is not a result")
        @ir.ops.relu2.register_impl("acme")
        def _(x): return x.clamp(min=0).square()
        @RMSNorm.register_oot
        class AcmeNorm(RMSNorm): pass
"""


KERNEL = """
    owners = {each["provider"]: each["plugin"] for each in found["implementations"]}
    assert owners["acme"] == "acme (acme 1.0)"
    assert owners["native"] is owners["opweave_c"] is found["plugin"] is None
"""
LAYER = """
    assert found["replacement"].endswith("AcmeNorm")
    assert found["plugin"] == "acme (acme 1.0)"
"""
ONE_LINE = """
    assert code == 2, (code, out, err)
    assert len(err.strip().splitlines()) == 1 and "Traceback" not in err, err
    for part in ("general plugin 'acme'", "ZeroDivisionError", "OPWEAVE_PLUGINS=-acme"):
        assert part in err, err
"""


def listed(name: str, kind: str, check: str) -> Case:
    """Return what ``opweave ops NAME`` lists of that kind, as *found* in *check*."""
    find = f"""
    assert not code, err
    [found] = [entry for entry in json.loads(out) if entry["kind"] == {kind!r}]
    """
    command = COMMAND.replace("COMMAND", f"['ops', {name!r}, '--json']")
    return Case(command + find + check, files=plugin("acme", KERNEL_AND_LAYER))


WITH_OPTION = """
    from opweave import ir
    from opweave.config.plugin_options import PluginOptions
    def register():
        options = PluginOptions("acme")
        options.add("depth", int, 4, "How deep.")
        def deep(x): return options["depth"] == 3
        ir.ops.silu_and_mul.register_impl("acme", supports_args=deep)(ir.ops.silu_and_mul.native)
        ir.ops.silu_and_mul.set_default(["acme"])
"""
OPTION = "--plugin.acme.depth=3"
MODEL = str(ROOT / "examples" / "models" / "tiny-pydoc")
SELECTED = """
    assert not code, err
    [silu] = [each for each in json.loads(out)["selections"] if each["op"] == "silu_and_mul"]
    assert silu["chosen"] == "acme"
"""
VERIFIED = """
    assert not code, err
    assert "acme" in out
    from opweave.config.plugin_options import PluginOptions
    assert PluginOptions("acme")["depth"] == 3
"""
LISTED = """
    assert not code, err
    assert "of the plugin acme (acme 1.0)" in out
    from opweave.config.plugin_options import PluginOptions
    assert PluginOptions("acme")["depth"] == 3
"""
SHOWN = """
    [setting] = json.loads(out)["plugin_settings"]
    assert (setting["given"], setting["default"]) == (3, 4)
"""
UNKNOWN = """
    assert code == 1
    [problem] = [p for p in json.loads(out)["problems"] if "dpth" in p]
    assert "no plugin has this option. Did you mean 'acme.depth'?" in problem
"""


def test_options_of_plugins_where_nothing_is_generated(fresh_cases: FreshCases) -> None:
    commands = [
        (["explain", MODEL, "--json", "-", OPTION], SELECTED),
        (
            [
                "verify",
                "--provider",
                "acme",
                "--check",
                "predicate",
                "--in-process",
                "--json",
                OPTION,
            ],
            VERIFIED,
        ),
        (["ops", "silu_and_mul", OPTION], LISTED),
        (["doctor", "--json", OPTION], SHOWN),
        (["doctor", "--json", "--plugin.acme.dpth=3"], UNKNOWN),
    ]
    fresh_cases(
        [
            Case(
                COMMAND.replace("COMMAND", repr(command)) + check, files=plugin("acme", WITH_OPTION)
            )
            for command, check in commands
        ]
    )


FAILING = """
    from opweave import ir
    def register():
        @ir.ops.silu_and_mul.register_impl("acme")
        def _(x): raise OSError("driver gone")
        ir.ops.silu_and_mul.set_default(["acme"])
"""
TOLD = """
    assert code == 2 and len(err.strip().splitlines()) == 1, (code, err)
    assert err.startswith("opweave: driver gone [in silu_and_mul:acme ("), err
    assert "of the plugin acme (acme 1.0)). To go on without" in err
    assert "OPWEAVE_PLUGINS=-acme]" in err
"""


def test_whose_kernel_failed(fresh_cases: FreshCases) -> None:
    command = COMMAND.replace("COMMAND", repr(["generate", MODEL, "--prompt", "def"]))
    fresh_cases([Case(command + TOLD, files=plugin("acme", FAILING))])


def test_whose_kernels_and_layers_are_and_one_line_about_what_failed(
    fresh_cases: FreshCases,
) -> None:
    fresh_cases(
        [
            listed("relu2", "op", KERNEL),
            listed("rms_norm", "CustomOp", LAYER),
            Case(COMMAND.replace("COMMAND", "['ops']") + ONE_LINE, files=plugin("acme", "1 / 0")),
        ]
    )
