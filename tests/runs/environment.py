"""Virtual environments of their own, under ``build/``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"


class Environment:
    """A virtual environment in *folder*, made when it is not there."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        if not self.python.exists():
            subprocess.run([python, "-m", "venv", folder], check=True)

    def run(self, *arguments: str | Path, **variables: str) -> int:
        """Run Python in the repository, with nothing of it on the path; return the exit status."""
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [self.python, "-P", *arguments]
        return subprocess.run(command, cwd=ROOT, env={**clean, **variables}, check=False).returncode

    def pip(self, *arguments: str | Path) -> None:
        status = self.run("-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)
        if status:
            raise SystemExit(f"pip {' '.join(map(str, arguments))} failed in {self.folder}")

    def borrow(self, packages: Path) -> None:
        """Let the environment import from *packages* too, but for what is installed editable."""
        [own] = self.folder.glob("lib/python3.*/site-packages")
        (own / "borrowed.pth").write_text(f"{packages}\n", encoding="utf-8")
