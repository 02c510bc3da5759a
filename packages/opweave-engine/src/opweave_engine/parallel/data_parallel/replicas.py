"""Supervises the replicas: starts them, reads their reports, and replaces dead ones."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from opweave.ir.errors import OpweaveError
from opweave_engine.errors import ReplicaFailedError
from opweave_engine.loading.checkpoint import Progress
from opweave_engine.parallel.data_parallel.group import ReplicaGroup
from opweave_engine.parallel.data_parallel.messages import (
    LoadOrder,
    ReplicaLocation,
    ReplicaReport,
    Submission,
)
from opweave_engine.parallel.data_parallel.replica_handle import ReplicaHandle

_log = logging.getLogger(__name__)

_TURN = 1.0  # seconds to wait for messages


class Replicas:
    """The replicas of one engine. Only one thread at a time may call :meth:`hear`.

    A replica that dies is replaced, unless it dies before it has loaded: its replacement would not
    load either.

    Args:
        group: the processes of the replicas.
        size: the number of replicas.
        order: the model and configuration of each.
        on_report: called with each report.
        on_loss: called with the handle of a replica that has died.
        progress: called while the first replica loads, with the number of tensors loaded so far and
            in total.

    Attributes:
        members: the handles of the current replicas, by number.
        last_failure: the error of the replica that died last; None: no replica has died.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        size: int,
        order: LoadOrder,
        on_report: Callable[[ReplicaReport], None],
        on_loss: Callable[[ReplicaHandle], None],
        progress: Progress | None = None,
    ) -> None:
        timeout = order.config.parallel.timeout
        self.members = [ReplicaHandle(number, timeout) for number in range(size)]
        self.last_failure: ReplicaFailedError | None = None
        self._group, self._order, self._progress = group, order, progress
        self._on_report, self._on_loss = on_report, on_loss

    @property
    def able(self) -> list[int]:
        """The numbers of the replicas that take requests."""
        return [member.number for member in self.members if member.is_loaded]

    def load(self) -> None:
        """Wait until all replicas have loaded.

        Raises:
            ReplicaFailedError: a replica failed.
        """
        while not all(member.is_loaded for member in self.members):
            self.hear()
            for member in self.members:
                if member.failure is not None:
                    raise member.failure
        self._progress = None

    def hear(self) -> None:
        """Process new messages; wait for them for at most a second."""
        for number, news in self._group.receive(_TURN):
            member = self.members[number]
            if isinstance(news, ReplicaFailedError):
                self._bury(member, news)
            elif isinstance(news, ReplicaLocation):
                member.put(news)
                _log.info("replica %d: process %d on %s", number, news.pid, news.node)
            else:
                self._take(member, news)
        self._start_what_is_placed()
        for member in list(self.members):
            if (reason := member.silence) is not None:
                self._bury(member, ReplicaFailedError(f"replica {member.number} {reason}."))

    def ask(self, number: int, ask: Submission) -> None:
        """Send a request to a replica."""
        self._group.tell(number, "ask", ask)

    def abort(self, number: int, request_id: str) -> None:
        """Abort a request of a replica."""
        self._group.tell(number, "abort", request_id)

    def stop(self) -> None:
        """Stop every replica that still responds."""
        for number in self.able:
            self._group.tell(number, "stop")

    def close(self) -> None:
        """Close the group, and free its resources."""
        self._group.close()

    def _take(self, member: ReplicaHandle, report: ReplicaReport) -> None:
        for record in report.records:
            record.msg = f"replica {member.number}: {record.msg}"
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        if report.progress is not None and self._progress is not None and member.number == 0:
            self._progress(*report.progress)
        was_loaded = member.is_loaded
        member.report(report)
        if member.is_loaded and not was_loaded:
            _log.info("replica %d: loaded", member.number)
        self._on_report(report)
        if (error := report.failure) is not None:
            shown = error if isinstance(error, OpweaveError) else repr(error)
            failure = ReplicaFailedError(f"replica {member.number} failed: {shown}")
            failure.__cause__ = error
            self._bury(member, failure)

    def _start_what_is_placed(self) -> None:
        places = [member.place for member in self.members if member.failure is None]
        nodes = Counter(place.node for place in places if place is not None)
        if None in places:
            return  # the number of replicas per machine is not known yet
        for member in self.members:
            if member.place is not None and member.failure is None and not member.is_ordered:
                member.is_ordered = True
                order = replace(self._order, neighbors=nodes[member.place.node])
                self._group.tell(member.number, "start", order)

    def _bury(self, member: ReplicaHandle, failure: ReplicaFailedError) -> None:
        was_loaded = member.is_loaded
        self._group.kill(member.number)
        member.die(failure)
        self.last_failure = failure
        self._on_loss(member)
        if not was_loaded:
            _log.error("%s", failure)
            return
        try:
            self._group.renew(member.number)
        except ReplicaFailedError as error:
            _log.critical("%s None takes its place: %s Start the server again.", failure, error)
        else:
            _log.error("%s Another one takes its place.", failure)
            self.members[member.number] = member.successor()
