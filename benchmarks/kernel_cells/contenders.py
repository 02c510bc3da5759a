"""The contenders of a cell: our kernel in each state, eager torch, Inductor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_cells.cases import PROVIDER
from kernel_cells.cell import Cell, dynamic_dims
from kernel_cells.eager import in_plain_torch
from opweave import native
from opweave.native.loader import NAMESPACE

Call = Callable[..., Any]
Arguments = tuple[Any, ...]


@dataclass(slots=True)
class Contender:
    """A call, and the ring of arguments that it goes round."""

    call: Call
    ring: Sequence[Arguments]

    def batch(self, start: int, size: int) -> list[Arguments]:
        return [self.ring[(start + i) % len(self.ring)] for i in range(size)]


def torch_baseline(cell: Cell) -> Call:
    """Return what torch users run without opweave."""
    return cell.case.eager or in_plain_torch(cell.op.native)


def ours(cell: Cell, state: str, ring: Sequence[Arguments]) -> Contender:
    """Return our kernel: through the op, or, for a given output, through the native fast call."""
    op = cell.op.using(f"{PROVIDER}!")
    if state == "fresh":
        return Contender(op, ring)
    if cell.op.impls[PROVIDER].inplace:
        return Contender(op.maybe_inplace, [_copied(arguments) for arguments in ring])
    name, _ = native_call(cell, ring[0])
    return Contender(getattr(native.module(), name), [native_call(cell, a)[1] for a in ring])


def rejection(cell: Cell, arguments: Arguments) -> str | None:
    """Why no kernel of ours would run; None if one does."""
    impl = cell.op.impls[PROVIDER]
    if not impl.supported:
        return impl.unsupported_reason
    reason = impl.rejection(cell.op.bind(*arguments))
    if reason is None and cell.is_one_call and not native_call(cell, arguments)[0]:
        return "the implementation leaves it to torch"
    return reason


def native_call(cell: Cell, arguments: Arguments) -> tuple[str, Arguments]:
    """Return the native function that the implementation calls, if any, and its arguments.

    The implementation runs on fake tensors, for which it takes torch's dispatcher; what arrives
    there is its call, with the outputs that it made.
    """
    recorder = _Recorder()
    with torch.no_grad(), FakeTensorMode() as fake, recorder:
        stand_ins = [fake.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        cell.op.impls[PROVIDER].impl_fn(*stand_ins)
    real = {id(fake): given for fake, given in zip(stand_ins, arguments, strict=True)}
    return recorder.name, tuple(
        _real(value, real) if isinstance(value, Tensor) else value for value in recorder.arguments
    )


def _real(value: Tensor, known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    output = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return output.zero_()  # an output that is reused has its pages already


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the call of a native op."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = ""
        self.arguments: Arguments = ()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Arguments = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == NAMESPACE:
            self.name, self.arguments = function._opname, args
        return function(*args, **(kwargs or {}))


def ring_of(arguments: Arguments, size: int) -> list[Arguments]:
    """Return *arguments* and copies, together *size*."""
    return [arguments, *itertools.islice(_copies(arguments), size - 1)]


def _copies(arguments: Arguments) -> Iterator[Arguments]:
    while True:
        yield _copied(arguments)


def _copied(arguments: Arguments) -> Arguments:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)


class Inductor:
    """The baseline, compiled for a family of cells; or why that cannot be done."""

    def __init__(self, cell: Cell, arguments: Arguments) -> None:
        torch._dynamo.reset()
        torch._inductor.config.compile_threads = 1  # each core compiles a family of its own
        self.reason: str | None = None
        self.call: Call = torch.compile(torch_baseline(cell))
        if cell.shape.tokens > 1:
            for value, dims in zip(arguments, dynamic_dims(cell), strict=True):
                for dim in dims:
                    torch._dynamo.maybe_mark_dynamic(value, dim)
        self.warm_up(arguments)

    def warm_up(self, arguments: Arguments) -> None:
        """Compile for *arguments*, if that is still to do."""
        try:
            self.call(*arguments)
        except Exception as error:  # any exception of a compiler is the reason
            lines = str(error).strip().splitlines()
            self.reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
