"""Run Python in a new process that need not import torch, which takes 2 s of CPU time.

A server process imports torch and its compilers, uses nothing of them, and forks for each request.
The child has the arguments, environment, directory and streams of a new interpreter, and imports
opweave by itself. It differs from a new interpreter in the modules that are imported already, in
the options of the interpreter (of which it knows ``-W error``), and in variables that torch reads
when it is imported, such as ``OMP_NUM_THREADS`` and ``TORCHINDUCTOR_*`` (not
``TORCHINDUCTOR_CACHE_DIR``): they keep the values of the server.
"""

from __future__ import annotations

import atexit
import functools
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
import gc, json, os, runpy, sys, types, warnings
import torch, torch._dynamo, torch._inductor.compile_fx
from torch._inductor.codecache import torch_key
from torch._inductor.cpu_vec_isa import pick_vec_isa

def paths(variables):
    return [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]

torch_key()  # a hash of torch's sources
pick_vec_isa()  # compiles a program for each instruction set
own = ["", *paths(os.environ)]
installed = [path for path in sys.path if path not in own]
gc.collect()
gc.freeze()  # what the children need not look through
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
arguments = request["arguments"]
if arguments[:2] == ["-W", "error"]:
    sys.warnoptions.append("error")
    warnings.simplefilter("error")
    del arguments[:2]
sys.path[:] = ["", *map(os.path.abspath, paths(os.environ)), *installed]
if arguments[0] == "-c":
    sys.argv[:] = ["-c", *arguments[2:]]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(arguments[1], "<string>", "exec"), vars(main))
elif arguments[0] == "-m":
    sys.argv[:] = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
else:
    sys.argv[:] = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")
"""


class WarmPython:
    """The server, which is started for the first request."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        *arguments: str | bytes | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python *arguments``: ``-c CODE``, ``-m MODULE`` or a script, and its arguments.

        Args:
            arguments: of the interpreter; ``-W error`` may come first.
            cwd: the directory; None: that of this process.
            env: the whole environment; None: that of this process.
            stdin: what the process reads.
        """
        with tempfile.TemporaryDirectory() as folder:
            files = {name: Path(folder, name) for name in ("stdin", "stdout", "stderr")}
            for file in files.values():
                file.write_bytes(stdin if file is files["stdin"] else b"")
            given = [os.fsdecode(argument) for argument in arguments]
            request = {
                **{name: str(file) for name, file in files.items()},
                "arguments": given,
                "cwd": str(cwd or Path.cwd()),
                "env": dict(os.environ if env is None else env),
            }
            status = self._ask(json.dumps(request))
            out, err = (files[name].read_text("utf-8") for name in ("stdout", "stderr"))
            return subprocess.CompletedProcess(given, status, out, err)

    def _ask(self, request: str) -> int:
        try:
            server = self._server = self._server or self._started()
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


@functools.cache
def warm_python() -> WarmPython:
    """Return the server of this process, which is stopped when the process ends."""
    server = WarmPython()
    atexit.register(server.close)
    return server
