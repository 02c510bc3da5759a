"""The command line, run as a user runs it."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
from cyclopts import App

from opweave import ir
from opweave.cli import companions, main, output
from opweave.cli.app import COMMANDS
from opweave.cli.companions import COMMANDS as COMPANIONS
from opweave.cli.output import CliError
from opweave.ir.schema import OWN_PROVIDERS
from opweave.layers import op_registry
from opweave.plugins.entry import BUILTIN_PLATFORMS
from support import ROOT
from support.fixtures import FreshPython
from support.warm_python import warm_python

CHECKPOINT = ROOT / "examples" / "models" / "tiny-pydoc"


@dataclass
class Done:
    """The result of a run of the command."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def in_this_process(*arguments: str | Path, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(int(exit_.value.code or 0), captured.out, captured.err)

    return in_this_process


def run_anew(*arguments: str | bytes | Path, cwd: Path = ROOT, **environment: str) -> Done:
    """Run the command in a process of its own, which reads the settings."""
    code = "from opweave.cli import main; main()"
    env = {**os.environ, "COLUMNS": "200", **environment}
    done = warm_python().run("-c", code, *arguments, cwd=cwd, env=env)
    return Done(done.returncode, done.stdout, done.stderr)


def assert_one_line_error(done: Done, *named: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("opweave: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    for name in named:
        assert name in done.stderr


def test_generate_json_is_complete_and_repeatable(run: Run) -> None:
    arguments = ("generate", CHECKPOINT, "--prompt", "Return the", "--max-tokens", "12", "--json")
    first, second = (json.loads(run(*arguments).stdout) for _ in range(2))
    output = first["outputs"][0]
    assert output["prompt"] == "Return the"
    assert len(output["token_ids"]) <= 12
    assert output["token_ids"] == second["outputs"][0]["token_ids"]
    assert output["text"]
    assert output["finish_reason"] in ("length", "stop")
    assert all(seconds >= 0 for seconds in output["timings"].values())
    ran = {s["op"]: s["chosen"] for s in first["selections"]}
    assert ran["rms_norm"] == "opweave_c"
    assert {"linear", "embedding", "rotary_embedding", "silu_and_mul"} <= set(ran)


def test_generate_forced_provider_shows_in_selections(run: Run) -> None:
    done = run(
        "generate", CHECKPOINT, "--prompt", "Return", "--max-tokens", "2", "--json",
        "--ir-op-priority.rms-norm=aten", "--ir-op-priority.fused_add_rms_norm=native",
    )  # fmt: skip
    ran = {s["op"]: s["chosen"] for s in json.loads(done.stdout)["selections"]}
    assert (ran["rms_norm"], ran["fused_add_rms_norm"]) == ("aten", "native")


def test_generate_explain_prints_text_then_table(run: Run) -> None:
    done = run("generate", CHECKPOINT, "--prompt", "Return", "--max-tokens", "3", "--explain")
    text = done.stdout
    assert text.startswith("Return")
    assert "opweave_c" in text
    assert "in no priority list" in text


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_prompt_from_file_and_stdin(run: Run, source: str, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Return a ünïcode list\n", encoding="utf-8")
    given, stdin = (str(path), b"") if source == "file" else ("-", path.read_bytes())
    done = run(
        "generate", CHECKPOINT, "--prompt-file", given, "--max-tokens", "2", "--json", stdin=stdin
    )
    assert json.loads(done.stdout)["outputs"][0]["prompt"] == "Return a ünïcode list"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--prompt", "x", "--max-tokens", "-1"), ("max_tokens", "-1")),
        (("--prompt", "x", "--max-tokens", "many"), ("max-tokens", "many")),
        (("--prompt", "x", "--max-tokens", "2.9"), ("max-tokens", "2.9")),
        (("--prompt", "x", "--temperature", "-0.5"), ("temperature", "-0.5")),
        (("--prompt", "x", "--temperature", "nan"), ("temperature", "nan")),
        (("--prompt", "x", "--top-p", "1.5"), ("top_p", "1.5")),
        (("--prompt", "x", "--top-k", "-3"), ("top_k", "-3")),
        (("--prompt", "x", "--dtype", "float12"), ("float12", "bfloat16")),
        (("--prompt", "x", "--ir-op-priority.rmsnorm=native"), ("rmsnorm", "rms_norm")),
        (("--prompt", "x", "--ir-op-priority.rms_norm=tritn"), ("tritn", "native")),
        (("--prompt", "x", "--ir-op-priority.rms_norm="), ("rms_norm",)),
        (("--prompt", "x", "--tempreature", "1"), ("--tempreature", "--temperature")),
        ((), ("--prompt",)),
        (("--prompt", "x", "--prompt-file", "-"), ("--prompt",)),
        (("--prompt-file", "no/such/file"), ("no/such/file",)),
        (("--prompt", "\udcff\udcfe"), ("UTF-8",)),  # how Python shows an argument that is not
    ],
)
def test_bad_options_end_in_one_line(
    run: Run, arguments: tuple[str, ...], named: tuple[str, ...]
) -> None:
    assert_one_line_error(run("generate", CHECKPOINT, *arguments), *named)


def test_prompt_file_that_is_not_utf8(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(b"caf\xe9")
    assert_one_line_error(run("generate", CHECKPOINT, "--prompt-file", path), "UTF-8", str(path))
    done = run("generate", CHECKPOINT, "--prompt-file", "-", stdin=b"caf\xe9")
    assert_one_line_error(done, "UTF-8", "standard input")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))


def test_missing_directory(run: Run) -> None:
    assert_one_line_error(run("generate", "no/such/model", "--prompt", "x"), "no/such/model")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file(run: Run, copy: Path, missing: str) -> None:
    (copy / missing).unlink()
    assert_one_line_error(run("generate", copy, "--prompt", "x"), Path(missing).suffix[1:])


def test_ops_lists_every_op_with_reasons(run: Run) -> None:
    entries = json.loads(run("ops", "--json").stdout)
    listed = {entry["op"]: entry for entry in entries if entry["kind"] == "op"}
    assert set(listed) == set(ir.ops.__all__)
    norm = listed["rms_norm"]
    assert [entry["provider"] for entry in norm["priority"]] == ["opweave_c", "native"]
    assert {impl["provider"] for impl in norm["implementations"]} >= {"native", "aten", "opweave_c"}
    text = run("ops").stdout
    assert all(name in text for name in listed)


def test_ops_shows_where_a_priority_came_from(tmp_path: Path) -> None:
    (tmp_path / "opweave.toml").write_text('[ir_op_priority]\nrms_norm = ["native"]\n')
    done = run_anew(
        "ops", "rms_norm", "--ir-op-priority.rms_norm=batch_invariant", "--json", cwd=tmp_path,
        OPWEAVE_IR_OP_PRIORITY__RMS_NORM="aten!",
    )  # fmt: skip
    entries = json.loads(done.stdout)[0]["priority"]
    assert [entry["provider"] for entry in entries] == [
        "batch_invariant", "aten", "native", "opweave_c",
    ]  # fmt: skip
    assert [entry["strict"] for entry in entries] == [False, True, False, False]
    origins = [entry["origin"] for entry in entries]
    assert "--ir-op-priority.rms_norm" in origins[0]
    assert "OPWEAVE_IR_OP_PRIORITY__RMS_NORM" in origins[1]
    assert "opweave.toml" in origins[2]
    assert "platform default" in origins[3]


def test_priorities_in_one_json_object(run: Run) -> None:
    option = '--ir-op-priority={"rms-norm": ["batch_invariant", "aten!"], "relu2": "native"}'
    entries = json.loads(run("ops", "rms_norm", option, "--json").stdout)[0]["priority"]
    assert [entry["provider"] for entry in entries[:2]] == ["batch_invariant", "aten"]
    assert "--ir-op-priority.rms_norm" in entries[0]["origin"]
    assert_one_line_error(run("ops", '--ir-op-priority={"rms_norm": 3}'), "3 is not a list of")


def test_ops_unknown_op(run: Run) -> None:
    assert_one_line_error(run("ops", "rmsnorm"), "rmsnorm", "Did you mean 'rms_norm'")
    assert_one_line_error(run("ops", ""), "No op or layer is called ''")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_ops_prints_one_line_for_each_op_and_layer(width: int) -> None:
    lines = run_anew("ops", COLUMNS=str(width)).stdout.splitlines()
    assert all(len(line) <= width for line in lines[:-1])  # the note below wraps
    names = [line.split()[0] for line in lines if line.strip()]
    assert all(names.count(op) == 1 + (op in op_registry) for op in ir.ops.__all__)
    assert len(lines) == len(ir.ops.__all__) + len(op_registry) + 5  # headings, a note, blank lines


def test_op_details_fit_80_columns_without_breaking_words() -> None:
    op = ir.ops.fused_add_rms_norm_dynamic_per_token_quant_int8
    text = run_anew("ops", op.name, COLUMNS="80").stdout
    table = text[text.index("#  provider") :]
    assert all(len(line) <= 80 for line in table.splitlines())
    for word in ("opweave_c", "native", "platform", "default,", "batch_invariant"):
        assert word in table.split()


def test_ops_imports_modules_that_register_ops(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from opweave import ir\nfrom torch import Tensor\n\n"
        "@ir.register_op\ndef double_it(x: Tensor) -> Tensor:\n    return x + x\n"
    )
    assert "double_it" in run_anew("ops", "--import", "mine", cwd=tmp_path).stdout
    assert_one_line_error(run_anew("ops", "--import", "missing", cwd=tmp_path), "missing")


def test_version_imports_no_torch() -> None:
    code = "import sys, opweave_cli; opweave_cli.main(); assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == version("opweave")


def test_generate_from_token_ids(run: Run) -> None:
    arguments = ("generate", CHECKPOINT, "--max-tokens", "4", "--json")
    text = json.loads(run(*arguments, "--prompt", "Return the").stdout)["outputs"][0]
    ids = ",".join(map(str, text["prompt_token_ids"]))
    again = json.loads(run(*arguments, "--prompt-token-ids", ids).stdout)["outputs"][0]
    assert again["token_ids"] == text["token_ids"]
    bad = ("generate", CHECKPOINT, "--prompt-token-ids")
    assert_one_line_error(run(*bad, "1,x"), "1,x", "list of integers")
    assert_one_line_error(run(*bad, "1", "--prompt", "x"), "one of")
    assert_one_line_error(run_anew(*bad, "99999999"), "99999999")


def test_doctor_is_well(run: Run) -> None:
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["problems"]
    assert report["problems"] == []
    assert report["native"]["available"]
    assert report["versions"]["torch"]
    assert report["platform"]["name"] == "cpu"
    tools = {tool["name"]: tool["found"] for tool in report["tools"]}
    assert tools["C++ compiler"]
    assert tools["opweave-engine"]
    text = run("doctor").stdout
    assert "no problems" in text
    assert "fast_call" not in text


def test_doctor_says_what_a_missing_compiler_breaks() -> None:
    done = run_anew("doctor", CXX="/no/such/compiler")
    assert done.returncode == 1
    assert "C++ compiler is missing: torch.compile on the CPU" in done.stdout


def test_doctor_reports_what_is_wrong() -> None:
    done = run_anew(
        "doctor", "--json", OPWEAVE_BACH_INVARIANT="1", OPWEAVE_IR_OP_PRIORITY__LINAER="a"
    )
    problems = " ".join(json.loads(done.stdout)["problems"])
    assert done.returncode == 1
    assert "OPWEAVE_BACH_INVARIANT" in problems
    assert "linaer" in problems


def test_doctor_and_generate_without_the_native_module() -> None:
    done = run_anew("doctor", "--json", OPWEAVE_ISA="none-such")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert not report["native"]["available"]
    assert "none-such" in report["problems"][0]
    done = run_anew(
        "generate", CHECKPOINT, "--prompt", "Return", "--max-tokens", "2", "--json",
        OPWEAVE_ISA="none-such",
    )  # fmt: skip
    ran = {s["op"]: s["chosen"] for s in json.loads(done.stdout)["selections"]}
    assert ran["rms_norm"] == "native"
    assert "SettingWarning: the C++ kernels are not used: " in done.stderr
    assert "'none-such'" in done.stderr


def test_a_variable_that_means_nothing_is_warned_of_once() -> None:
    done = run_anew("ops", "--json", OPWEAVE_BATCH_INVARIENT="1")
    assert done.returncode == 0
    assert done.stderr.startswith("opweave: SettingWarning: OPWEAVE_BATCH_INVARIENT is set, but")
    assert done.stderr.count("\n") == 1
    assert "Did you mean 'OPWEAVE_BATCH_INVARIANT'?" in done.stderr


def test_broken_settings_end_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "opweave.toml").write_text("ir_op_priority = 3\n")
    assert_one_line_error(run_anew("ops", cwd=tmp_path), "opweave.toml", "ir_op_priority")
    assert_one_line_error(
        run_anew("ops", OPWEAVE_BATCH_INVARIANT="maybe"), "OPWEAVE_BATCH_INVARIANT"
    )
    assert_one_line_error(run_anew("ops", OPWEAVE_CONFIG="no/file"), "no/file")


def test_unknown_command_and_no_command() -> None:
    """In a new process, where no command has been imported yet."""
    assert_one_line_error(run_anew("generat"), 'Did you mean "generate"?')
    for arguments in ((), ("--help",)):
        shown = run_anew(*arguments).stdout
        assert all(f"│ {name} " in shown for name in COMMANDS)
        assert "Generate text from one or more prompts" in shown


@pytest.mark.parametrize("arguments", [("ops",), ("ops", "--json")])
def test_a_reader_that_has_gone_is_no_problem(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", "from opweave.cli import main; main()", *arguments],
        check=False, stdout=writing, stderr=subprocess.PIPE, cwd=ROOT, timeout=120,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("arguments", [("ops", "--json"), ("--help",)])
def test_output_that_cannot_be_written(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from opweave.cli import main; main()", *arguments],
            check=False, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, timeout=120,
        )  # fmt: skip
    message = b"opweave: Cannot write the output: No space left on device.\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError("libnosuch.so: cannot open"), "libnosuch.so: cannot open"),
        (PermissionError(13, "Permission denied", "/secret"), "Permission denied: '/secret'"),
        (OSError(), "OSError"),
    ],
)
def test_other_errors_of_the_system_say_what_they_are(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: OSError, shown: str
) -> None:
    def fails(*args: object) -> None:
        error.add_note("in relu2:acme")
        raise error

    monkeypatch.setattr(ir.current_registry().settings, "ensure_ready", fails)
    done = run("ops")
    assert_one_line_error(done, f"{shown} [in relu2:acme]")
    assert "Cannot write" not in done.stderr


def test_an_error_that_nobody_expected_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        error = LookupError("of a kernel\nand more")
        error.add_note("in relu2:acme,\nof the plugin acme")
        raise error

    monkeypatch.setattr(ir.current_registry().settings, "ensure_ready", fails)
    done = run("ops")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    told = "LookupError: of a kernel [in relu2:acme, of the plugin acme]"
    assert f"{told} (at {__file__}:" in done.stderr
    monkeypatch.setenv("OPWEAVE_LOGGING_LEVEL", "debug")
    with pytest.raises(LookupError):
        run("ops")


def test_a_width_too_small_for_any_table_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in ("1", "2", "19", "x", "\N{SUPERSCRIPT TWO}", "20"):
        monkeypatch.setenv("COLUMNS", width)
        output._check_width()
        assert os.environ.get("COLUMNS") == (width if width == "20" else None)
    assert run_anew("verify", "--help", COLUMNS="0") == run_anew("verify", "--help", COLUMNS="")


def test_a_new_package_cannot_have_a_name_that_is_taken(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("native", "unfused", "triton", *BUILTIN_PLATFORMS, *OWN_PROVIDERS):
        assert_one_line_error(run("new", name), f"The name {name!r} is taken")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "package"), COMPANIONS.items())
@pytest.mark.parametrize("options", [("a", "--port", "3"), ("--help",), ()])
def test_a_command_of_a_package_that_is_missing(
    name: str, package: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companions, "entry_points", lambda **_: [])
    parent, _, command = name.rpartition(".")
    app = App(name="opweave", result_action="return_value")
    companions.add_commands(app, parent)
    message = f"opweave {name.replace('.', ' ')} needs the package {package}. "
    with pytest.raises(CliError, match=message):
        app([command, *options], exit_on_error=False)


# ``OPWEAVE_LOGGING_LEVEL``: which messages are shown, and where.

USE_AN_OP = """
    import logging, torch
    from opweave import ir
    ir.ops.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6)
    ir.current_registry().ensure_ready()
    log = logging.getLogger("opweave.compile")
    log.debug("a detail")
    log.warning("a warning")
"""


@pytest.mark.parametrize(
    ("level", "shown"),
    [("DEBUG", ["a detail", "a warning"]), (" warning ", ["a warning"]), ("critical", [])],
)
def test_level(fresh_python: FreshPython, level: str, shown: list[str]) -> None:
    done = fresh_python(USE_AN_OP, env={"OPWEAVE_LOGGING_LEVEL": level})
    lines = [line for line in done.stderr.splitlines() if "opweave.compile: a " in line]
    assert [line.split(": ", 1)[1] for line in lines] == shown
    assert done.stdout == ""


def test_without_it_the_program_decides(fresh_python: FreshPython) -> None:
    done = fresh_python(USE_AN_OP)
    assert done.stderr == "a warning\n"  # what Python does where nobody has set logging up


def test_lines_are_shown_once_beside_other_handlers(fresh_python: FreshPython) -> None:
    code = f"    import logging; logging.basicConfig(level=0)\n{USE_AN_OP}"
    done = fresh_python(code, env={"OPWEAVE_LOGGING_LEVEL": "DEBUG"})
    assert done.stderr.count("a detail") == 1


def test_unknown_level(fresh_python: FreshPython) -> None:
    done = fresh_python(USE_AN_OP, env={"OPWEAVE_LOGGING_LEVEL": "deebug"}, check=False)
    assert done.returncode == 1
    assert (
        "SettingError: OPWEAVE_LOGGING_LEVEL='deebug' is not a valid log level. Did you mean"
        in done.stderr
    )


CHOOSE = """
    import logging, torch
    from opweave import ir
    from opweave.config.terminal import choose_log
    choose_log("INFO", as_json=True, others={"other": "ERROR"})
    ir.ops.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6)  # reads the environment
    log = logging.getLogger("opweave.compile")
    log.debug("a detail")
    log.info("two\\nlines %s", "é")
    log.info("seen by people", extra={"fields": {"path": "/x", "status": 200}})
    try:
        1 / 0
    except ZeroDivisionError:
        logging.getLogger("other").exception("failed")
    logging.getLogger("other").warning("nothing")
"""


def test_a_program_that_chooses_its_log(fresh_python: FreshPython) -> None:
    done = fresh_python(CHOOSE, env={"OPWEAVE_LOGGING_LEVEL": "DEBUG"})
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    lines = [line for line in lines if line["logger"] in ("opweave.compile", "other")]
    assert [line.get("message") for line in lines] == ["two\nlines é", None, "failed"]
    assert (lines[1]["path"], lines[1]["status"]) == ("/x", 200)
    assert "ZeroDivisionError" in lines[2]["exception"]
    assert lines[0]["level"] == "INFO"
    assert lines[0]["time"].endswith("+00:00")
