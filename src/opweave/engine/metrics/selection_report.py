"""Which kernels the forwards of a model run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from opweave import ir


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A kernel that runs in a model's forwards.

    Attributes:
        op: the op.
        provider: the kernel's.
        tokens: of the forwards: at least as many, and fewer than twice as many; None: of any
            number, since the calls are in a graph that was compiled.
        calls: in one forward.
    """

    op: str
    provider: str
    tokens: int | None
    calls: int


class SelectionReport:
    """What one engine's forwards run: looked at once for each size of a forward.

    A forward that is looked at is slower, since each of its calls goes through the full selection;
    sizes are powers of two, so that there are few. May be read while another thread writes.

    Attributes:
        kernels: what was found, in the order of ops, sizes and providers.
        compile_seconds: that compiling took; 0.0 if nothing was compiled.
    """

    def __init__(self) -> None:
        self.kernels: tuple[KernelUse, ...] = ()
        self.compile_seconds = 0.0
        self._seen: set[int] = set()

    @contextmanager
    def watch(self, num_tokens: int) -> Iterator[None]:
        """Look at the forward in the block, unless one of that size is known."""
        size = 1 << (num_tokens.bit_length() - 1)
        if size in self._seen:
            yield
            return
        with ir.record() as record:
            yield
        self._seen.add(size)
        self._add(record.selected_impls, size)

    def add_graph(self) -> None:
        """Look at the graph that opweave's passes have compiled last."""
        from opweave.compile import report

        found: dict[str, Counter[str]] = {}
        for node in report().nodes:
            found.setdefault(node.op, Counter())[node.chosen] += 1
        self._add(found, None)

    def _add(self, found: Mapping[str, Mapping[str, int]], size: int | None) -> None:
        new = [
            KernelUse(op, provider, size, calls)
            for op, by_provider in found.items()
            for provider, calls in by_provider.items()
        ]
        self.kernels = tuple(
            sorted([*self.kernels, *new], key=lambda k: (k.op, k.tokens or 0, k.provider))
        )
