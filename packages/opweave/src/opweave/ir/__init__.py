"""The IR: ops, their implementations, and the choice between them.

>>> import torch
>>> from opweave import ir
>>> with torch.no_grad():
...     y = ir.ops.rms_norm(torch.ones(1, 4), None, 1e-6)
>>> y.shape
torch.Size([1, 4])

This package imports torch and the standard library, nothing else.
"""

from opweave.ir import rules
from opweave.ir.dispatch import CallSite, IrOpInplaceOverload
from opweave.ir.errors import IrError
from opweave.ir.explain import Explanation, Record, explain, record
from opweave.ir.op import IrOpImpl
from opweave.ir.priority import IrOpPriorityConfig, Source
from opweave.ir.registry import (
    IrOp,
    Registry,
    current_registry,
    isolated_registry,
    priority,
    register_op,
)
from opweave.ir.rules import TRAITS
from opweave.ir.schema import RESERVED_PROVIDERS
from opweave.ir.scope import require
from opweave.ir.selection import Policy, Rejection, Selection, policy_for, select
from opweave.ir.tolerance import Tolerance

from opweave.ir import ops  # isort: skip (declares with the names above)
from opweave.ir.ops.arguments import HostLengths, host_lengths, note_lengths  # isort: skip

__all__ = [
    "RESERVED_PROVIDERS", "TRAITS", "CallSite", "Explanation", "HostLengths", "IrError", "IrOp",
    "IrOpImpl", "IrOpInplaceOverload", "IrOpPriorityConfig", "Policy", "Record", "Registry",
    "Rejection", "Selection", "Source", "Tolerance", "current_registry", "explain", "host_lengths",
    "isolated_registry", "note_lengths", "ops", "policy_for", "priority", "record", "register_op",
    "require", "rules", "select",
]  # fmt: skip
