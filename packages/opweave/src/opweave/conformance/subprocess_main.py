"""The main program of the verifying process: ``python -m opweave.conformance.subprocess_main``.

Its argument is the file descriptor of the socket to the parent process.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from opweave.config.child_process import end_with_parent
from opweave.conformance.find import import_named, subject_named
from opweave.conformance.snapshot import leave_to_this_process
from opweave.conformance.subject import Subject, listening
from opweave.conformance.subprocess import CaseStart, Named, Verified, VerifyTask
from opweave.conformance.verify import verify


def serve(connection: Connection) -> None:
    """Verify subjects until the connection is closed."""
    task: VerifyTask = connection.recv()
    for module in task.modules:
        import_named("--import", module)
    connection.send(CaseStart("ready"))
    while True:
        named: Named = connection.recv()
        with listening(lambda step: connection.send(CaseStart(step))):
            result = verify(_found(named), task.checks, seed=task.seed, report=connection.send)
        connection.send(Verified(result.subject.options, result.obstacle))


def _found(named: Named) -> Subject:
    subject = subject_named(named.op, named.provider)
    return replace(subject, device=named.device, options=named.options)


if __name__ == "__main__":
    end_with_parent()
    leave_to_this_process()
    with suppress(EOFError, ConnectionError):  # the parent has ended
        serve(Connection(int(sys.argv[1])))
