"""Runs due jobs within a budget of time, several at once where the machine has the cores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from gpu_queue.gate import Gate
from gpu_queue.job import Stage
from gpu_queue.plan import DONE, Planned
from gpu_queue.process import Outcome, WorkerProcess

Report = Callable[[Planned, Outcome], None]


class Queue:
    """Hands out jobs in their order, as long as the budget lasts.

    Args:
        planned: the jobs, in order; those that are done are left out.
        stages: for their shares of the budget.
        began, budget: when the budget began, by ``time.monotonic``, and its seconds.
    """

    def __init__(
        self, planned: Sequence[Planned], stages: Sequence[Stage], began: float, budget: float
    ) -> None:
        self._left = [each for each in planned if each.state != DONE]
        self._most = {stage.name: stage.share * budget for stage in stages}
        self._first: dict[str, float] = {}  # when the first job of a stage was started
        self._deadline = began + budget
        self._lock = threading.Lock()

    def take(self) -> Planned | None:
        """Return the next job that fits the rest of the budget, or None."""
        with self._lock:
            now = time.monotonic()
            fit = [each for each in self._left if now + each.expected <= self._deadline]
            # Jobs of a stage that has had its share wait until no others are left.
            fit.sort(key=lambda each: self._has_had_its_share(each.job.stage, now))
            if not fit:
                return None
            self._first.setdefault(fit[0].job.stage, now)
            self._left.remove(fit[0])
            return fit[0]

    def _has_had_its_share(self, stage: str, now: float) -> bool:
        return now - self._first.get(stage, now) >= self._most[stage]


def run(
    queue: Queue,
    start: Callable[[Gate], WorkerProcess],
    report: Report,
    *,
    deadline: float,
    lanes: int,
) -> None:
    """Run jobs until the queue is empty.

    Args:
        queue: where jobs come from.
        start: starts a process for jobs.
        report: is told what came of each job, one at a time.
        deadline: when everything stops, by ``time.monotonic``.
        lanes: how many jobs run at once.
    """
    gate, reporting = Gate(), threading.Lock()
    errors: list[BaseException] = []

    def lane() -> None:
        worker: WorkerProcess | None = None
        try:
            while not errors:
                worker = worker or start(gate)  # it imports while this lane waits
                if not gate.share(deadline - time.monotonic()):
                    return
                try:
                    planned = queue.take()
                    if planned is None:
                        return
                    outcome = worker.run(planned.job)
                    if outcome.problem:  # its process is over
                        worker = None
                    elif planned.job.is_fresh:
                        worker.kill()
                        worker = None
                finally:
                    gate.leave()
                with reporting:
                    report(planned, outcome)
        except BaseException as error:
            errors.append(error)
        finally:
            if worker is not None:
                worker.kill()

    threads = [threading.Thread(target=lane, daemon=True) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
