"""Graphs compiled ahead of time and saved with ``torch.compile(...).aot_compile(...)``.

A loaded graph cannot be recompiled, so it always runs the kernels that were selected when it was
compiled, as an AOTInductor package does.
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
        report: the report of its compilation.
    """

    def __init__(self, run: Runner, report: Report, donated: list[int]) -> None:
        self._run, self.report, self._donated = run, report, donated

    def __call__(self, *inputs: Any) -> Any:
        if self._donated:
            if overlaps_another(inputs, self._donated):
                raise CompileError(
                    "an input donated to maybe_inplace shares memory with another input, and the "
                    "graph, compiled ahead of time, reuses that memory. Pass a clone of one of "
                    "them, or compile with options={'inplace': False}."
                )
            note_writes(inputs, self._donated)
        return self._run(*inputs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Precompiled) -> bytes:
        """Serialize the graph."""
        return to_bytes(fn._run, fn.report, fn._donated)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Precompiled:
        """Load the output of :func:`to_bytes`, and register the kernels that it calls by name."""
        current_registry().ensure_ready()
        code, report, donated = pickle.loads(data)
        found = Report.from_json(report)
        found.from_cache = True
        return cls(compat.deserialize(code), found, donated)


def to_bytes(run: Runner, report: Report, donated: list[int]) -> bytes:
    """Serialize a compiled graph, its report and the positions of its donated inputs."""
    return pickle.dumps((compat.serialize(run), report.to_json(), donated))
