"""Run code in a new process without waiting for torch to be imported, which takes 6 s of CPU time.

A server process imports torch and its compilers, uses nothing of them, and forks for each request.
The child has the arguments, environment, directory and streams of a new interpreter, and imports
opweave by itself. Variables that torch reads when it is imported, such as ``OMP_NUM_THREADS`` and
``TORCHINDUCTOR_*`` (not ``TORCHINDUCTOR_CACHE_DIR``), keep the values of the server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

# The child leaves the loop, so that the interpreter exits as it always does.
_SERVER = """
import json, os, sys, types
import torch, torch._dynamo, torch._inductor.compile_fx
from torch._inductor.codecache import torch_key

torch_key()  # a hash of torch's sources
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        break
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
else:
    os._exit(0)
for number, name in enumerate(("stdin", "stdout", "stderr")):
    os.dup2(os.open(request[name], os.O_RDWR), number)
sys.stdin = open(0)
os.environ.clear()
os.environ.update(request["env"])
os.chdir(request["cwd"])
sys.path[:] = ["", *request["path"]]
sys.argv[:] = ["-c", *request["arguments"]]
sys.modules["__main__"] = main = types.ModuleType("__main__")
exec(compile(request["code"], "<string>", "exec"), vars(main))
"""


class WarmPython:
    """The server, which is started for the first request."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        code: str,
        *arguments: str,
        cwd: Path,
        env: Mapping[str, str],
        stdin: bytes = b"",
    ) -> subprocess.CompletedProcess[str]:
        """Run *code* as ``python -c`` does, with *env* as its whole environment."""
        with tempfile.TemporaryDirectory() as folder:
            files = {name: Path(folder, name) for name in ("stdin", "stdout", "stderr")}
            for file in files.values():
                file.write_bytes(stdin if file is files["stdin"] else b"")
            request = {
                **{name: str(file) for name, file in files.items()},
                "code": code,
                "arguments": arguments,
                "cwd": str(cwd),
                "env": dict(env),
                "path": [os.path.abspath(each) for each in sys.path if each],
            }
            status = self._ask(json.dumps(request))
            out, err = (files[name].read_text("utf-8") for name in ("stdout", "stderr"))
            return subprocess.CompletedProcess([code, *arguments], status, out, err)

    def _ask(self, request: str) -> int:
        try:
            server = self._server = self._server or self._started()
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(f"{request}\n")
            server.stdin.flush()
            return int(server.stdout.readline())
        except BaseException:  # above all the timeout of a test: the child may still be running
            self.close()
            raise

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        """Stop the server and its child."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None
