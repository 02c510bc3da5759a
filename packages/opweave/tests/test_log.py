"""``OPWEAVE_LOGGING_LEVEL``: which messages are shown, and where."""

from __future__ import annotations

import json

import pytest

from support.fixtures import FreshPython

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
    [
        ("DEBUG", ["a detail", "a warning"]),
        (" warning ", ["a warning"]),
        ("critical", []),
    ],
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
