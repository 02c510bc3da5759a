"""All replicas: starts them, hears what they say, and replaces those that die."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from opweave.engine.errors import ReplicaFailedError
from opweave.engine.loading.loader import Progress
from opweave.engine.parallel.data_parallel.group import ReplicaGroup
from opweave.engine.parallel.data_parallel.messages import (
    LoadOrder,
    ReplicaLocation,
    ReplicaReport,
    Submission,
)
from opweave.engine.parallel.data_parallel.replica_handle import ReplicaHandle
from opweave.ir.errors import OpweaveError

_log = logging.getLogger(__name__)

_TURN = 1.0  # seconds to wait for news


class Replicas:
    """The replicas of one engine. One thread at a time hears them; any may speak to them.

    One that dies is replaced, and its successor too; one that dies before it has loaded is not,
    since the next would not load either.

    Args:
        group: where they are.
        size: how many.
        order: what each is to load.
        on_report: called with each report of an engine that is loaded.
        on_loss: called when one has died, with it.
        progress: called while the first one loads, with the number of tensors loaded so far and in
            total.

    Attributes:
        members: the replicas, by number; one that was replaced is there no longer.
        last_failure: what the last one that died has died of; None: none has.
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
        """The numbers of those that take requests."""
        return [member.number for member in self.members if member.is_loaded]

    def load(self) -> None:
        """Wait until all have loaded.

        Raises:
            ReplicaFailedError: one does not.
        """
        while not all(member.is_loaded for member in self.members):
            self.hear()
            for member in self.members:
                if member.failure is not None:
                    raise member.failure
        self._progress = None

    def hear(self) -> None:
        """Take in what is new, or nothing for a second."""
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
        """Give a request to a replica."""
        self._group.tell(number, "ask", ask)

    def abort(self, number: int, request_id: str) -> None:
        """Let a replica give a request up."""
        self._group.tell(number, "abort", request_id)

    def stop(self) -> None:
        """Let all stop, which are still heard."""
        for number in self.able:
            self._group.tell(number, "stop")

    def close(self) -> None:
        """Free what they hold; nobody hears them any more."""
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
            return  # how many share a machine is not known
        for member in self.members:
            if member.place is not None and member.failure is None and not member.is_ordered:
                member.is_ordered = True
                order = replace(self._order, neighbours=nodes[member.place.node])
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
