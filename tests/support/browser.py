"""A headless Chromium, driven through the pipe of its debugging protocol: no driver is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "chrome")
_PATIENCE = 60  # seconds for everything

# The protocol wants its pipes as 3 and 4: they are moved there in the new process.
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD_CLOEXEC, 10) for fd in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """Return the path of a Chromium: what ``CHROMIUM`` names, or one on the path."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


class Page:
    """A page that is open; it notes what went wrong in it, and what it asked for.

    Attributes:
        complaints: errors and warnings of the console.
        requests: addresses.
    """

    file: Path  # for whoever shares the page

    def __init__(self, out: FileIO, in_: FileIO) -> None:
        self._out, self._in = out, in_
        self._ids, self._left, self._session = count(1), b"", ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def open(self, file: Path, *, width: int, height: int = 844, dark: bool = False) -> None:
        """Show *file* in a window of that size."""
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        self._send("Page.navigate", url=file.as_uri())
        loaded = "document.readyState === 'complete' && location.protocol === 'file:'"
        ready = (
            f"new Promise(go => {{ const f = () => {loaded} ? go(1) : setTimeout(f, 10); f() }})"
        )
        self.evaluate(ready)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited."""
        answer = self._send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, file: Path, **options: Any) -> None:
        """Write a PNG of what the window shows; *options* are those of the protocol."""
        answer = self._send("Page.captureScreenshot", **options)
        file.write_bytes(base64.b64decode(answer["data"]))

    def close_browser(self) -> None:
        self._session = ""
        self._send("Browser.close")

    def _send(self, method: str, **parameters: Any) -> Any:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _receive(self) -> Any:
        while b"\0" not in self._left:
            more = self._in.read(1 << 16)
            assert more, "the browser has gone"
            self._left += more
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str, details: Any) -> None:
        if event == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
            self.complaints.append(str(details["args"]))
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(details["exceptionDetails"]))
        elif event == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(details["entry"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])


@contextmanager
def browser(executable: str, profile: Path) -> Iterator[Page]:
    """Start a browser with an empty page; it ends with the block, or when it stops answering."""
    theirs_in, write = os.pipe()
    read, theirs_out = os.pipe()
    arguments = (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--hide-scrollbars", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--remote-debugging-pipe", f"--user-data-dir={profile}",
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), executable, *arguments],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    watchdog = threading.Timer(_PATIENCE, process.kill)
    watchdog.start()
    try:
        with FileIO(write, "wb") as out, FileIO(read, "rb") as in_:
            page = Page(out, in_)
            yield page
            page.close_browser()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
