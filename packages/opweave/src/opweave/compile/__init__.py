"""The ``torch.compile`` backend: fuses IR ops and lowers them to the selected kernels.

Use ``torch.compile(model, backend="opweave")``, or call :func:`install` and use plain
``torch.compile``.
"""

from opweave.compile.backend import backend, install, uninstall
from opweave.compile.compiled import CompiledGraph, report, reports
from opweave.compile.errors import (
    CompileError,
    OptionError,
    PluginPassError,
    UnloweredOpError,
    UseAfterDonationError,
)
from opweave.compile.lower import lower
from opweave.compile.options import CompileOptions
from opweave.compile.passes.fusion import FusionForm, fusion_table
from opweave.compile.report import Report

__all__ = [
    "CompileError",
    "CompileOptions",
    "CompiledGraph",
    "FusionForm",
    "OptionError",
    "PluginPassError",
    "Report",
    "UnloweredOpError",
    "UseAfterDonationError",
    "backend",
    "fusion_table",
    "install",
    "lower",
    "report",
    "reports",
    "uninstall",
]
