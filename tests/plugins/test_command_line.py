"""What the commands say of plugins."""

from __future__ import annotations

from conftest import Case, FreshCases

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
        print("what a plugin prints is no result")
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
