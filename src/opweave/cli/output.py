"""Where output goes: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Write *value* to stdout as one JSON document."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def fail(message: str) -> NoReturn:
    """Write *message* as one line to stderr and exit with 2."""
    line = " ".join(message.split())
    err.print(f"[bold red]opweave:[/] {escape(line)}")
    sys.exit(2)
