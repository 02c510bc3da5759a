"""Collectives between processes: values, bits, errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from engine.communicating import RANKS
from opweave.platforms import CpuPlatform, CudaPlatform
from opweave_engine.errors import CommunicatorError
from opweave_engine.parallel.communicators import (
    RankGroup,
    Segment,
    SharedMemoryCommunicator,
    TorchCommunicator,
)
from opweave_engine.parts import part
from support.fixtures import FreshPython


def test_collectives_between_three_processes(tmp_path: Path, fresh_python: FreshPython) -> None:
    """They are forks of one process, so that torch is imported once."""
    fresh_python(f"""
        from pathlib import Path
        from torch.multiprocessing import start_processes
        from engine.communicating import RANKS, run_rank

        folder = Path({str(tmp_path)!r})
        start_processes(run_rank, (folder,), nprocs=RANKS, start_method="fork")
        """)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(RANKS)] == [""] * RANKS


def test_a_segment_leaves_nothing_open_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def full(descriptor: int, *_: int) -> None:
        made.append(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        Segment.create(2, 1.0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


def test_a_segment_is_in_no_folder_and_ends_with_its_rank() -> None:
    made, path, _ = Segment.create(2, 1.0)
    assert os.stat(path).st_nlink == 0  # what a process that is killed leaves, too
    del made
    assert not path.exists()


def test_a_segment_of_another_machine_is_not_opened(tmp_path: Path) -> None:
    made, path, name = Segment.create(2, 1.0)
    other = tmp_path / "other"
    other.write_text("what another process has open")
    with other.open() as file:
        foreign = Path(f"/proc/self/fd/{file.fileno()}")
        for place, called in ((path, "x"), (tmp_path / "absent", name), (foreign, name)):
            assert Segment.open(place, called, 1, 2, 1.0) is None
    found = Segment.open(path, name, 1, 2, 1.0)
    made.abort()
    with pytest.raises(CommunicatorError, match="aborted"):
        found.exchange(torch.empty(0, dtype=torch.uint8), 1)


def test_platforms_name_their_communicators() -> None:
    for platform, expected in (
        (CpuPlatform, SharedMemoryCommunicator),
        (CudaPlatform, TorchCommunicator),
    ):
        assert part(platform(), "get_device_communicator_cls") is expected
    assert CudaPlatform.dist_backend == "nccl"


def test_a_group_that_cannot_be_joined_is_an_error() -> None:
    """As NCCL's where there is no GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    group = RankGroup(0, 1, torch.device("cuda"), "nccl", HashStore(), 5.0)
    with pytest.raises(CommunicatorError, match="rank 0 of 1: joining the group failed"):
        TorchCommunicator(group)
