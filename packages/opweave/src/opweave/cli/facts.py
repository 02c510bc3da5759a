"""Provenance of a saved report: versions, the device and the command."""

from __future__ import annotations

import platform as python_platform
import shlex
import sys
import time
from pathlib import Path

import torch

from opweave import __version__
from opweave.platforms import current_platform


def facts() -> dict[str, str]:
    """Return the facts by name, for the head of a page."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "opweave": __version__,
        "torch": torch.__version__,
        "Python": python_platform.python_version(),
        "device": f"{current_platform.get_device_name()} ({current_platform.name})",
        "threads": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": shlex.join(command),
    }
