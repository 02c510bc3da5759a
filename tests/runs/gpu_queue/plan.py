"""Which jobs are due, and in which order they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpu_queue.job import Job, Stage
from gpu_queue.sources import digest_of
from gpu_queue.state import PASSED, STOPPED, Record

DUE, CHANGED, RETRY, DONE = "due", "changed", "retry", "done"


@dataclass(frozen=True)
class Planned:
    """A job, and whether it is to run.

    Attributes:
        job: the job.
        digest: of its sources now.
        state: ``due``: it never ran to its end; ``changed``: its sources did since; ``retry``: it
            failed with the same sources; ``done``: it need not run.
        why: the reason, in a few words.
        seconds: how long it took the last time; None: never.
    """

    job: Job
    digest: str
    state: str
    why: str
    seconds: float | None = None

    @property
    def expected(self) -> float:
        """How many seconds it will take, by the last run or the job's own estimate."""
        return self.job.expected if self.seconds is None else min(self.seconds, self.job.limit)


def plan(
    jobs: Sequence[Job],
    stages: Sequence[Stage],
    records: Mapping[str, Record],
    *,
    again: bool = False,
) -> list[Planned]:
    """Return all jobs, those that are to run first, in their order.

    Jobs that never ran come in the order of their stages, with changed ones of stages that repeat
    first; then other changed ones; then those that failed with the same sources.

    Args:
        again: run all of them, regardless of recorded results.
    """
    found = [_planned(job, records.get(job.name), again) for job in jobs]
    order = {stage.name: index for index, stage in enumerate(stages)}
    repeats = {stage.name for stage in stages if stage.repeats_first}

    def rank(each: Planned) -> tuple[int, int]:
        first = each.state == DUE or (each.state == CHANGED and each.job.stage in repeats)
        group = 0 if first else [CHANGED, RETRY, DONE].index(each.state) + 1
        return group, order[each.job.stage]

    return sorted(found, key=rank)  # stable: within a stage, jobs keep their order


def _planned(job: Job, record: Record | None, again: bool) -> Planned:
    digest = digest_of(job)
    if record is None:
        return Planned(job, digest, DUE, "never run")
    if record.status == STOPPED:
        return Planned(job, digest, DUE, f"stopped at the end of the budget ({record.place})")
    if again:
        state, why = DUE, f"asked for again; {record.status} ({record.place})"
    elif record.digest != digest:
        state, why = CHANGED, f"sources changed; {record.status} ({record.place})"
    elif record.status == PASSED:
        state, why = DONE, f"passed ({record.place})"
    else:
        state, why = RETRY, f"{record.status} ({record.place}); tried again last"
    return Planned(job, digest, state, why, record.seconds if record.status == PASSED else None)
