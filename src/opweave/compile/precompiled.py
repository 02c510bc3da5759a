"""Graphs compiled ahead of time: ``torch.compile(...).aot_compile(...)`` saves and loads them.

A loaded graph has no source to compile again, so it keeps the kernels that were selected where it
was compiled, as an AOTInductor package does.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from opweave.compile import compat
from opweave.compile.aliases import note_writes, overlaps_another
from opweave.compile.errors import CompileError
from opweave.compile.report import Report
from opweave.ir import current_registry

Runner = Callable[..., Any]


class Precompiled(compat.SerializableCallable):
    """A loaded graph.

    Attributes:
        report: of its compilation.
    """

    def __init__(self, run: Runner, report: Report, donated: list[int]) -> None:
        self._run, self.report, self._donated = run, report, donated

    def __call__(self, *inputs: Any) -> Any:
        if self._donated:
            if overlaps_another(inputs, self._donated):
                raise CompileError(
                    "an input that maybe_inplace gives up shares memory with another input, and "
                    "the graph, compiled ahead of time, reuses that memory. Pass a clone of one of "
                    "them, or compile with options={'inplace': False}."
                )
            note_writes(inputs, self._donated)
        return self._run(*inputs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Precompiled) -> bytes:
        """Return the graph as bytes."""
        return to_bytes(fn._run, fn.report, fn._donated)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Precompiled:
        """Return the graph in *data*."""
        return cls.from_bytes(data)

    @classmethod
    def from_bytes(cls, data: bytes) -> Precompiled:
        """Load what :func:`to_bytes` returned, and the kernels that it calls by name."""
        current_registry().ensure_ready()
        code, report, donated = pickle.loads(data)
        found = Report.from_json(report)
        found.from_cache = True
        return cls(compat.deserialize(code), found, donated)


def to_bytes(run: Runner, report: Report, donated: list[int]) -> bytes:
    """Return a compiled graph, its report and the positions of its donated inputs as bytes."""
    return pickle.dumps((compat.serialize(run), report.to_json(), donated))
