"""The program that runs jobs, one after the other.

    python -m gpu_queue.worker FD DEVICE [MODULE ...]

It imports the modules, and speaks JSON through the socket FD: it says that it is ready and on which
machine; a job comes; each row goes back as soon as there is one, then how the job ended.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import platform
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from gpu_queue import measuring


def facts(device: str) -> dict[str, str]:
    """Return the names of the device and of torch's version, as far as torch is imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    from opweave.platforms import current_platform

    if current_platform.device_type != device:  # it would measure something else
        raise SystemExit(f"opweave chose the platform {current_platform.name}, not {device}")
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {"machine": machine, "torch": torch.__version__}


def serve(connection: Connection, device: str, modules: list[str]) -> None:
    """Import *modules*, and run what comes, until nothing comes any more."""

    def send(**message: Any) -> None:
        connection.send_bytes(json.dumps(message).encode())

    def ask(what: str) -> None:
        synchronize(device)
        send(ask=what)
        connection.recv_bytes()

    for name in modules:
        importlib.import_module(name)
    measuring.connect(ask, lambda place: send(at=place))
    send(ready=facts(device))
    while True:
        job = json.loads(connection.recv_bytes())
        module, _, function = job["body"].partition(":")
        problem = ""
        try:
            for row in getattr(importlib.import_module(module), function)(**job["arguments"]):
                send(row=row)
                problem = problem or str(row.get("problem", ""))
            synchronize(device)
        except BaseException as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"
        sys.stdout.flush()
        send(end=problem)


def synchronize(device: str) -> None:
    """Wait for the device, so that an error of a kernel is raised here."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _end_with(parent: int) -> None:
    """End this process when the one that started it has gone, even in the middle of a kernel."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    faulthandler.enable()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with suppress(EOFError, ConnectionError):
        serve(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3:])
