"""Jobs by their names, by those of stages, or by the beginning of names."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_queue.job import Job


def select(jobs: list[Job], names: list[str]) -> tuple[list[Job], list[str]]:
    """Return the jobs of these names, and the names that none has.

    A name may be that of a stage, or the beginning of others: ``decode/64``.
    """
    unknown = [name for name in names if not any(_is_named(job, name) for job in jobs)]
    return [job for job in jobs if any(_is_named(job, name) for name in names)], unknown


def names(jobs: Sequence[Job]) -> list[str]:
    """Return every name that :func:`select` accepts: stages, groups of jobs, and jobs."""
    parts = [job.name.split("/") for job in jobs]
    prefixes = ("/".join(each[:length]) for each in parts for length in range(1, len(each)))
    return [*dict.fromkeys(prefixes), *(job.name for job in jobs)]


def _is_named(job: Job, name: str) -> bool:
    return job.name == name or job.name.startswith((f"{name}/", f"{name}:"))
