"""The ``torch.compile`` backend: fuses IR ops and lowers them to the selected kernels.

Use ``torch.compile(model, backend="opweave")``, or call :func:`install` and use plain
``torch.compile``.
"""

from opweave.compile.backend import (
    CompiledGraph,
    backend,
    install,
    lower,
    report,
    reports,
    uninstall,
)
from opweave.compile.fuse import FusionForm, fusion_table
from opweave.compile.options import (
    CompileError,
    CompileOptions,
    OptionError,
    PluginPassError,
    UnloweredOpError,
    UseAfterDonationError,
)
from opweave.compile.report import Report

__all__ = [
    "CompileError", "CompileOptions", "CompiledGraph", "FusionForm", "OptionError",
    "PluginPassError", "Report", "UnloweredOpError", "UseAfterDonationError", "backend",
    "fusion_table", "install", "lower", "report", "reports", "uninstall",
]  # fmt: skip
