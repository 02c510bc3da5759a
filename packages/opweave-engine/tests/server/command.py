"""``opweave serve`` as a process, for tests that speak to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from support import ROOT


class Command:
    """A server in a process of its own.

    Attributes:
        url: the URL that it prints.

    Args:
        folder: where its log is written.
        arguments: of the command.
        is_leader: whether it leads a group of processes, as in a terminal.
        environment: variables that it gets.
    """

    def __init__(
        self, folder: Path, *arguments: str, is_leader: bool = False, **environment: str
    ) -> None:
        self.log = folder / "log"
        self._log_file = self.log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from opweave.cli import main; main()", "serve", *arguments],
            stdout=subprocess.PIPE, stderr=self._log_file, text=True, cwd=ROOT,
            env={**os.environ, **environment}, process_group=0 if is_leader else None,
        )  # fmt: skip
        line = self.process.stdout.readline()
        address = r"(http://127\.0\.0\.1:\d+|unix:\S+)"
        found = re.fullmatch(rf"opweave serves (\S+) on {address}\n", line)
        assert found, self.log.read_text()
        self.name, self.url = found.groups()
        is_unix = self.url.startswith("unix:")
        self.client = httpx.Client(
            base_url="http://localhost" if is_unix else self.url, timeout=60, trust_env=False,
            transport=httpx.HTTPTransport(uds=self.url[5:]) if is_unix else None,
        )  # fmt: skip

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop_while_it_streams(self, stop: Callable[[], None], **headers: str) -> list[str]:
        """Call *stop* after the first piece of a stream of 30 tokens; return all its events."""
        body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "stream": True}
        with self.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            pieces = answer.iter_text()
            text = next(pieces)
            stop()
            text += "".join(pieces)
        self.process.wait(60)
        return text.split("\n\n")

    def close(self) -> int:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        self._log_file.close()
        return self.process.returncode
