"""Program of the processes that test communicators; each imports it, so it imports little."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import FileStore, HashStore

from opweave_engine.errors import CommunicatorError
from opweave_engine.parallel.communicators import (
    SLOT,
    Communicator,
    RankGroup,
    SharedMemoryCommunicator,
    TorchCommunicator,
)

RANKS = 3
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (5, 7), (3, 0, 2), (2, 3, 4)]
LARGE = (2, SLOT + 3)  # of more than two slots in any dtype, and not of whole pieces
REDUCED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]
MOVED = [*REDUCED, torch.bool, torch.uint8, torch.float8_e4m3fn]


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Return what each rank brings."""
    generator = torch.Generator().manual_seed(len(shape) + 7 * sum(shape))
    drawn = torch.randn(RANKS, *shape, generator=generator) * 3
    return list((drawn > 0 if dtype is torch.bool else drawn).to(dtype).unbind())


def cases(dtypes: list[torch.dtype]) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    """Yield shapes in every dtype, and the large one in some."""
    for dtype in dtypes:
        yield from ((dtype, shape) for shape in SHAPES)
        if dtype in (torch.bfloat16, torch.bool):
            yield dtype, LARGE


def summed(brought: list[Tensor]) -> Tensor:
    """Return the sum in the order of the ranks; of small floats in float32, then rounded."""
    dtype = brought[0].dtype
    exact = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = brought[0].to(exact)
    for each in brought[1:]:
        total = total + each.to(exact)
    return total.to(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = [each.contiguous().view(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*bits)


def run_rank(rank: int, folder: Path) -> None:
    """Check every collective of one rank, and save what went wrong."""
    torch.set_num_threads(1)
    wrong = _fails_to_join() if rank == 0 else []  # which does not keep it from the next group
    for kind in (SharedMemoryCommunicator, TorchCommunicator):
        store = FileStore(f"{folder}/{kind.__name__}", RANKS)
        group = RankGroup(rank, RANKS, torch.device("cpu"), "gloo", store, 60.0)
        communicator = kind(group)
        for check in (_all_reduce, _all_gather, _broadcast, _barrier, _difference, _waiting):
            name = f"{kind.__name__}: {check.__name__}"
            wrong += [f"{name}: {failure}" for failure in check(communicator)]
        communicator.close()
    (folder / f"{rank}.txt").write_text("\n".join(wrong), encoding="utf-8")


def _fails_to_join() -> list[str]:
    alone = RankGroup(0, 2, torch.device("cpu"), "gloo", HashStore(), 0.1)
    return _raises(lambda: TorchCommunicator(alone), "rank 0 of 2: joining the group failed")


def _all_reduce(communicator: Communicator) -> list[str]:
    wrong, rank = [], communicator.group.rank
    is_exact = isinstance(communicator, SharedMemoryCommunicator)
    for dtype, shape in cases(REDUCED):
        brought = tensors(shape, dtype)
        own, wanted = brought[rank].clone(), summed(brought)
        found = communicator.all_reduce(own)
        tolerance = {torch.float16: 3e-2, torch.bfloat16: 0.3}.get(dtype, 1e-5)
        is_right = same(found, wanted) if is_exact else torch.allclose(found, wanted, 0, tolerance)
        if not is_right or not same(own, brought[rank]):
            wrong.append(f"{dtype} {shape}")
    brought = [each.T for each in tensors((5, 7), torch.float32)]
    if not torch.allclose(communicator.all_reduce(brought[rank]), summed(brought)):
        wrong.append("strides")
    return wrong


def _all_gather(communicator: Communicator) -> list[str]:
    wrong, rank = [], communicator.group.rank
    for dtype, shape in cases(MOVED):
        brought = tensors(shape, dtype)
        # torch cannot concatenate 8-bit floats.
        raw = [each.view(torch.uint8) if each.element_size() == 1 else each for each in brought]
        for dim in range(-1, len(shape)) if shape else ():
            wanted = torch.cat(raw, dim).view(dtype)
            if not same(communicator.all_gather(brought[rank], dim), wanted):
                wrong.append(f"{dtype} {shape} {dim}")
    return wrong


def _broadcast(communicator: Communicator) -> list[str]:
    wrong, rank = [], communicator.group.rank
    for dtype, shape in cases([torch.bfloat16, torch.int64]):
        brought = tensors(shape, dtype)
        for source in range(RANKS):
            own = brought[rank].clone()
            communicator.broadcast(own, source)
            if not same(own, brought[source]):
                wrong.append(f"{dtype} {shape} from {source}")
    return wrong


def _barrier(communicator: Communicator) -> list[str]:
    """Nobody leaves before the last one comes."""
    store, wrong = communicator.group.store, []
    for turn in range(3):
        if communicator.group.rank == turn:
            time.sleep(0.2)
            store.set(f"came {turn}", "")
        communicator.barrier()
        if not store.check([f"came {turn}"]):
            wrong.append(f"turn {turn}")
    return wrong


def _difference(communicator: Communicator) -> list[str]:
    """Ranks that do not do the same thing are told so, and can go on."""
    if not isinstance(communicator, SharedMemoryCommunicator):
        return []
    size = 4 + communicator.group.rank
    wrong = _raises(lambda: communicator.all_reduce(torch.ones(size)), "different shapes or dtypes")
    if not torch.equal(communicator.all_reduce(torch.ones(2)), torch.full((2,), float(RANKS))):
        wrong.append("afterwards")
    return wrong


def _waiting(communicator: Communicator) -> list[str]:
    """A rank that does not come is named; one that waits can be released."""
    if not isinstance(communicator, SharedMemoryCommunicator):
        return [] if type(communicator) is TorchCommunicator else ["kind"]
    segment = communicator._segment
    if segment is None:
        return ["no shared memory"]
    wrong: list[str] = []
    if communicator.group.rank == 0:
        segment.timeout = 0.3
        wrong += _raises(communicator.barrier, r"rank 0 waited 0.3 s for rank 1")
        segment.abort()
    elif communicator.group.rank == 1:
        time.sleep(1.5)
    else:
        began = time.monotonic()
        wrong += _raises(communicator.barrier, "aborted")
        wrong += [] if time.monotonic() - began < 30 else ["too late"]
    return wrong


def _raises(call: Callable[[], object], text: str) -> list[str]:
    try:
        call()
    except CommunicatorError as error:
        return [] if text in str(error) else [str(error)]
    return [f"no error: {text}"]
