"""Settings: command line, environment and file, what they say and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from opweave import ir
from opweave.config import environment, sources
from opweave.config.sources import apply_command_line
from opweave.ir import rules
from opweave.ir.errors import SettingError
from support.fixtures import Case, FreshCases


def norm(x: Tensor, weight: Tensor | None = None, *, epsilon: float = 1e-6) -> Tensor:
    return x + epsilon


@pytest.fixture
def op(registry: ir.Registry) -> ir.IrOp:
    found = ir.register_op(name="my_norm")(norm)
    found.register_impl("alpha", supports_args=rules.ndim("x", 2))(norm)
    found.register_impl("beta", supported=False, unsupported_reason="needs a tractor")(norm)
    return found


# Settings: the command line


def test_the_command_line_names_the_flag(op: ir.IrOp) -> None:
    registry = op.registry
    apply_command_line(registry, {"my-norm": "alpha"})
    assert op.get_priority() == ["alpha", "native"]
    for lists, fragments in [
        ({"mynorm": "alpha"}, ["--ir-op-priority.mynorm", "Did you mean 'my_norm'"]),
        ({"my_norm": "alfa"}, ["--ir-op-priority.my_norm", "'alfa'", "Did you mean 'alpha'"]),
        ({"my_norm": "al pha"}, ["--ir-op-priority.my_norm", "'al pha'"]),
        ({"my_norm": ""}, ["--ir-op-priority.my_norm"]),
    ]:
        with pytest.raises(SettingError) as caught:
            apply_command_line(registry, lists)
        for fragment in fragments:
            assert fragment in str(caught.value)


# Settings: the environment


@pytest.mark.parametrize(
    ("value", "texts"),
    [(True, ("1", "true", "YES", " on ")), (False, ("0", "False", "no", "off", ""))],
)
def test_flags(value: bool, texts: tuple[str, ...]) -> None:
    for text in texts:
        assert environment.flag("OPWEAVE_X", {"OPWEAVE_X": text}) is value, text


@pytest.mark.parametrize("text", ["2", "maybe", "yess", "None"])
def test_a_flag_is_true_or_false(text: str) -> None:
    with pytest.raises(SettingError, match=f"OPWEAVE_X='{text}'"):
        environment.flag("OPWEAVE_X", {"OPWEAVE_X": text})


def test_variables_are_known_or_reported() -> None:
    environ = {
        "OPWEAVE_CONFIG": "a",
        "OPWEAVE_BATCH_INVARIENT": "1",
        "HOME": "/",
        "OPWEAVE_IR_OP_PRIORITY__RMS_NORM": "aten",
        "OPWEAVE_IR_OP_PRIORITY__X": "y,z",
    }
    (unknown,) = environment.unknown_variables(environ)
    assert unknown.startswith("OPWEAVE_BATCH_INVARIENT is set, but is not a variable of opweave.")
    assert environment.priorities(environ) == {"rms_norm": "aten", "x": "y,z"}
    assert not environment.flag("OPWEAVE_CHECK_DONATION", environ)
    for variable in environment.VARIABLES:
        assert variable.doc
        assert variable.name.startswith("OPWEAVE_")


# Settings: the file


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("rms_norm = [", ["TOML"]),
        ("batch_invarient = true", ["'batch_invarient'", "Did you mean 'batch_invariant'?"]),
        ("batch_invariant = 1", ["batch_invariant = 1", "bool"]),
        ("check_donation = 'yes'", ["check_donation", "bool"]),
        ("ir_op_priority = ['aten']", ["ir_op_priority", "table"]),
        ("[ir_op_priority]\nrms_norm = 3", ["ir_op_priority.rms_norm = 3", "list of providers"]),
    ],
)
@pytest.mark.parametrize("how", ["found", "named"])
def test_a_malformed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, fragments: list[str], how: str
) -> None:
    path = tmp_path / "opweave.toml"
    path.write_text(text, encoding="utf-8")
    monkeypatch.delenv("OPWEAVE_CONFIG", raising=False)
    if how == "named":
        monkeypatch.setenv("OPWEAVE_CONFIG", str(path))
    with pytest.raises(SettingError) as caught:
        sources.find(None if how == "named" else tmp_path)
    for fragment in [str(path), *fragments]:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("text", ["tool = 3", "[tool]\nopweave = 3", "[tool.opweave]\nunknown = 1"])
def test_a_malformed_pyproject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.delenv("OPWEAVE_CONFIG", raising=False)
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    if text == "tool = 3":  # somebody else's mistake
        assert sources.find(tmp_path).ir_op_priority == {}
    else:
        with pytest.raises(SettingError, match=r"pyproject\.toml"):
            sources.find(tmp_path)


def test_a_named_file_must_be_there_and_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in [
        ("nowhere.toml", None),
        ("opweave.toml", b"\xff\xfe"),
        ("pyproject.toml", b"[tool.opweave"),
    ]:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        monkeypatch.setenv("OPWEAVE_CONFIG", str(path))
        with pytest.raises(SettingError) as caught:
            sources.find()
        assert name in str(caught.value)
    monkeypatch.setenv("OPWEAVE_CONFIG", str(tmp_path))
    with pytest.raises(SettingError, match="OPWEAVE_CONFIG"):
        sources.find()


def test_the_nearest_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPWEAVE_CONFIG", raising=False)
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "opweave.toml").write_text("batch_invariant = true\n", encoding="utf-8")
    assert sources.find(inner).batch_invariant
    pyproject = tmp_path / "a" / "pyproject.toml"
    pyproject.write_text("[project]\nname = 'x'\n", encoding="utf-8")
    assert sources.find(inner).batch_invariant  # a table for opweave is what counts
    pyproject.write_text("[tool.opweave]\ncheck_donation = true\n", encoding="utf-8")
    assert sources.find(inner) == sources.FileSettings(pyproject, check_donation=True)
    beside = tmp_path / "a" / "opweave.toml"
    beside.write_text("", encoding="utf-8")
    assert sources.find(inner) == sources.FileSettings(beside)


# Settings as a whole, in fresh processes

PRIORITY = "OPWEAVE_IR_OP_PRIORITY__RMS_NORM"
ATEN = {PRIORITY: "aten"}
ROW = {"opweave.toml": "[ir_op_priority]\nrms_norm = ['batch_invariant']\n"}
PYPROJECT = {"pyproject.toml": "[tool.opweave.ir_op_priority]\nrms_norm = 'batch_invariant'"}
CALL = "x = torch.ones(2, 8)\nir.ops.rms_norm(x, None, 1e-6)\n"
CHOSEN = CALL + "assert ir.ops.rms_norm.dispatch(x, None, 1e-6).provider == {!r}"
CHECK = "ir.current_registry().check_settings()"
READY = "r = ir.current_registry(); r.ensure_ready()\n"


def fails(
    code: str, *fragments: str, env: dict[str, str] | None = None, toml: str | None = None
) -> Case:
    """Code that passes if *code* raises an IrError with the fragments, twice."""
    return Case(
        "for attempt in range(2):\n    try:\n        exec(" + repr(code) + ")\n"
        "    except ir.IrError as error:\n"
        f"        missing = [f for f in {fragments!r} if f not in str(error)]\n"
        "        assert not missing, (missing, str(error))\n"
        "    else:\n        raise SystemExit('nothing was raised')\n",
        env or {},
        {} if toml is None else {"opweave.toml": toml},
    )


def test_environment_and_file_in_fresh_processes(fresh_cases: FreshCases) -> None:
    batch_invariant, nowhere = "OPWEAVE_BATCH_INVARIANT", {"OPWEAVE_CONFIG": "nowhere.toml"}
    unknown_op = PRIORITY.replace("RMS_", "RMS")
    fresh_cases(
        [
            Case(CHOSEN.format("aten"), ATEN),
            Case(CHOSEN.format("aten"), {PRIORITY.replace("RMS", "rms"): "aten"}),
            Case(CHOSEN.format("batch_invariant"), {}, ROW),
            Case(CHOSEN.format("batch_invariant"), {}, PYPROJECT),
            Case(
                CHOSEN.format("batch_invariant"),
                {"OPWEAVE_CONFIG": "a/b.toml"},
                {"a/b.toml": ROW["opweave.toml"]},
            ),
            # the environment beats the file, which beats the platform
            Case(
                CHOSEN.format("aten")
                + "\nassert ir.ops.rms_norm.get_priority()[:2] == ['aten', 'batch_invariant']\n"
                "assert [e.origin for e in ir.policy_for(ir.ops.rms_norm).priority][0]"
                f" == 'environment {PRIORITY}'",
                ATEN,
                ROW,
            ),
            # requirements
            Case(
                READY + "assert list(r.settings.required) == ['batch_invariant']\n"
                "assert not r.settings.check_donation",
                {batch_invariant: "1"},
            ),
            Case(
                "x = torch.ones(2, 2)\n"
                "assert 'batch_invariant' in str(ir.explain(ir.ops.linear, x, x))\n"
                "assert 'batch_invariant' in ir.ops.linear.dispatch(x, x).traits",
                {},
                {"opweave.toml": "batch_invariant = true"},
            ),
            Case(READY + "assert r.settings.check_donation", {"OPWEAVE_CHECK_DONATION": "1"}),
            Case(
                READY + "assert r.settings.check_donation",
                {},
                {"opweave.toml": "check_donation = true"},
            ),
            # mistakes; every use says so until they are mended
            fails(CALL, PRIORITY, "'atem'", "Did you mean 'aten'?", env={PRIORITY: "atem"}),
            fails(CHECK, PRIORITY, "'atem'", "Did you mean 'aten'?", env={PRIORITY: "atem"}),
            fails(CALL, PRIORITY, "'a b'", env={PRIORITY: "a b"}),
            fails(CALL, PRIORITY, env={PRIORITY: ""}),
            fails(CALL, f"{batch_invariant}='perhaps'", env={batch_invariant: "perhaps"}),
            fails(CALL, "OPWEAVE_CHECK_DONATION", env={"OPWEAVE_CHECK_DONATION": "2"}),
            fails(CALL, *nowhere, "nowhere.toml", env=nowhere),
            fails(CALL, "opweave.toml", "'color'", toml="color = 1"),
            fails(
                CALL,
                "opweave.toml ir_op_priority.rms_norm",
                "'atem'",
                toml="[ir_op_priority]\nrms_norm = ['atem']",
            ),
            fails(
                CALL,
                "opweave.toml ir_op_priority.rms_norm",
                "3",
                toml="[ir_op_priority]\nrms_norm = [3]",
            ),
            fails(
                CHECK, unknown_op, "'rmsnorm'", "Did you mean 'rms_norm'?", env={unknown_op: "aten"}
            ),
            fails(
                CHECK,
                "ir_op_priority.rmsnorm",
                "Did you mean 'rms_norm'?",
                toml="[ir_op_priority]\nrmsnorm = ['aten']",
            ),
            fails(CALL, PRIORITY, "batch_invariant", env={PRIORITY: "aten!", batch_invariant: "1"}),
            # a provider that is there already: the same error each time, both places named
            Case(
                "op = ir.ops.fused_add_rms_norm\nop.register_impl('aten')(op.native)\n"
                + fails(CALL, "fused_add_rms_norm", "'aten'", "<string>").code
            ),
            # an op and a provider of a plugin, known only later
            Case(
                "r = ir.current_registry()\n" + CALL + "@ir.register_op\n"
                "def my_op(x: torch.Tensor) -> torch.Tensor: return x + 1\n"
                "my_op.register_impl('mine')(lambda x: x + 2)\n"
                "assert my_op(torch.zeros(1)).item() == 2\n" + CHECK,
                {"OPWEAVE_IR_OP_PRIORITY__MY_OP": "mine"},
            ),
        ]
    )
