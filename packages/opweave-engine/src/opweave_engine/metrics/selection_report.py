"""Selection report: the kernels that the forward passes of a model run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from opweave import ir


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A kernel that runs in a model's forward passes.

    Attributes:
        op: the op.
        provider: the kernel's provider.
        tokens: the size class of the forward passes, which have at least this many tokens and fewer
            than twice as many; None: any size, for calls in a compiled graph.
        calls: the number of calls in one forward pass.
    """

    op: str
    provider: str
    tokens: int | None
    calls: int


class SelectionReport:
    """Records the kernels of an engine's forward passes, once for each size class.

    Recording makes a forward pass slower, because each call goes through the full selection. Size
    classes are powers of two, so there are few of them. May be read while another thread records.

    Attributes:
        kernels: sorted by op, size and provider.
        compile_seconds: compile time; 0.0 if nothing was compiled.
    """

    def __init__(self) -> None:
        self.kernels: tuple[KernelUse, ...] = ()
        self.compile_seconds = 0.0
        self._seen: set[int] = set()

    @contextmanager
    def watch(self, num_tokens: int) -> Iterator[None]:
        """Record the forward pass in the block, unless its size class is known."""
        size = 1 << (num_tokens.bit_length() - 1)
        if size in self._seen:
            yield
            return
        with ir.record() as record:
            yield
        self._seen.add(size)
        self._add(record.selected_impls, size)

    def add_graph(self) -> None:
        """Record the calls of the graph that was compiled last."""
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
