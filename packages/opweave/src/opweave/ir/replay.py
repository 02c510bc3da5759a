"""Run an implementation on recorded arguments: ``python -m opweave.ir.replay SOCKET``.

The conformance kit runs this in a subprocess and compares the results in its own process. The
subprocess does not import the kit, so that an implementation cannot detect that it is verified.
"""

import importlib
import io
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from opweave.ir.registry import current_registry


def replay(modules: list[str], op: str, provider: str, calls: list[Any]) -> list[Any]:
    """Return the result of the implementation for each call, or the text of its exception.

    Args:
        modules: modules to import first; they register the implementation.

    Returns:
        One result per call; an empty list if the implementation is not registered.
    """
    for module in modules:
        importlib.import_module(module)
    ir_op = current_registry().ops.get(op)
    if ir_op is None or provider not in ir_op.impls:
        return []
    call = ir_op.using(f"{provider}!")
    results: list[Any] = []
    for values in calls:
        args, kwargs = ir_op.schema.split(values)
        try:
            with torch.no_grad():
                results.append(call(*args, **kwargs))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def _main(connection: Connection) -> None:
    request = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
    file = io.BytesIO()
    torch.save(replay(*request), file)
    connection.send_bytes(file.getvalue())


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # the parent process has ended
        _main(Connection(int(sys.argv[1])))
