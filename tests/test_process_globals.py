"""A test that runs the command line in process leaves nothing behind for the next one."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from pathlib import Path

import pytest

from opweave import ir
from opweave.cli import main
from opweave.config import compilation, terminal
from opweave.config.plugin_options import given_plugin_options, set_plugin_options
from support.process_globals import restored


def state() -> dict[str, object]:
    loggers = [logging.getLogger(name) for name in ("", "opweave", "uvicorn")]
    return {
        "loggers": [(each.level, each.propagate, list(each.handlers)) for each in loggers],
        "log": (terminal._chosen, terminal._handler.formatter),
        "priorities": ir.current_registry().settings._priorities.get(ir.Source.COMMAND_LINE, {}),
        "compilation": compilation.current_compilation_config(),
        "plugin options": given_plugin_options(),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "folder": os.getcwd(),
        "format of warnings": warnings.formatwarning,
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    }


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        (["serve", "one", "--model=two", "--log-format=json"], {"loggers", "log"}),
        (["ops", "--import=json"], {"path"}),
        (["ops", "--ir-op-priority.relu2=native"], {"priorities"}),
        (["ops", "--compilation-config.mode=1"], {"compilation"}),
    ],
)
def test_the_command_line(arguments: list[str], changed: set[str]) -> None:
    before = state()
    with restored():
        with pytest.raises(SystemExit):
            main(arguments)
        after = state()
        assert {name for name in before if after[name] != before[name]} >= changed
    assert state() == before


def test_everything_else(tmp_path: Path) -> None:
    before = state()
    with restored():
        os.environ["ADDED"] = os.environ["PATH"] = "changed"
        del os.environ["HOME"]
        os.chdir(tmp_path)
        warnings.formatwarning = lambda *_: ""  # type: ignore[assignment]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        set_plugin_options({"acme.depth": 8})
        logging.getLogger().setLevel("DEBUG")
    assert state() == before
