"""Graphs compiled ahead of time and saved with ``torch.compile(...).aot_compile(...)``.

A loaded graph cannot be recompiled, so it always runs the kernels that were selected when it was
compiled, as an AOTInductor package does. An engine that caches such graphs calls
:meth:`Precompiled.finalize_loading`, which rejects a graph of other settings.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from opweave.base.plain_call import is_forward_ad
from opweave.compile import compat
from opweave.compile.aliases import note_writes, overlaps_another
from opweave.compile.errors import CompileError
from opweave.compile.options import CompileOptions
from opweave.compile.plan import Plan
from opweave.compile.report import Report
from opweave.ir import current_registry

Runner = Callable[..., Any]


class Precompiled(compat.SerializableCallable):
    """A loaded graph.

    Attributes:
        report: the report of its compilation.
        settings: the digest of the settings that it was compiled with, see :func:`settings_digest`.
    """

    def __init__(self, run: Runner, report: Report, donated: list[int], settings: str) -> None:
        self._run, self.report, self._donated = run, report, donated
        self.settings = settings

    def __call__(self, *inputs: Any) -> Any:
        if is_forward_ad():
            raise CompileError(
                "a graph that was compiled ahead of time does not compute forward-mode "
                "derivatives. Call the model that was compiled."
            )
        if self._donated:
            if overlaps_another(inputs, self._donated):
                raise CompileError(
                    "an input donated to maybe_inplace shares memory with another input, and the "
                    "graph, compiled ahead of time, reuses that memory. Pass a clone of one of "
                    "them, or compile with options={'inplace': False}."
                )
            note_writes(inputs, self._donated)
        return self._run(*inputs)

    def finalize_loading(self, vllm_config: object = None) -> None:
        """Check that the graph fits the current settings; vLLM calls this after loading.

        vLLM's cache key does not contain opweave's priorities and kernels. If this raises, vLLM
        compiles the model again.

        Raises:
            CompileError: priorities, kernels or plugins have changed since the compilation.
        """
        if self.settings != settings_digest():
            raise CompileError(
                "opweave's priorities, kernels or plugins have changed since this graph was "
                "compiled; compile it again."
            )

    @classmethod
    def serialize_compile_artifacts(cls, fn: Precompiled) -> bytes:
        """Serialize the graph."""
        return to_bytes(fn._run, fn.report, fn._donated, fn.settings)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Precompiled:
        """Load the output of :func:`to_bytes`, and register the kernels that it calls by name."""
        current_registry().ensure_ready()
        code, report, donated, settings = pickle.loads(data)
        found = Report.from_json(report)
        found.from_cache = True
        return cls(compat.deserialize(code), found, donated, settings)


def to_bytes(run: Runner, report: Report, donated: list[int], settings: str) -> bytes:
    """Serialize a compiled graph, its report, its donated inputs' positions and its settings."""
    return pickle.dumps((compat.serialize(run), report.to_json(), donated, settings))


def settings_digest() -> str:
    """Return a digest of the settings outside the graph and the backend options."""
    return Plan.capture([current_registry()], CompileOptions()).digest
