"""What ops and providers may be called."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from typing import Any

from opweave.base import compat
from opweave.ir.errors import InvalidNameError
from opweave.ir.priority import NATIVE

ANNOTATED_SUFFIX = "_annotated"  # of the torch op that carries what a call site says
ANNOTATIONS = ("using", "donate", "autocast")  # the arguments that say it
RESERVED_PROVIDERS = frozenset({NATIVE, "unfused"})
"""What no provider can be called."""
OWN_PROVIDERS = ("aten", "batch_invariant", "opweave_c", "opweave_c_invariant", "triton")
"""The providers that come with opweave."""

_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_FORM = "use lower-case letters, digits and underscores, not starting with a digit"


def check_op_name(name: object) -> str:
    """Return *name*, or raise InvalidNameError if an op cannot be called that."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidNameError(f"{name!r} is no name for an op: {_FORM}.")
    if name.endswith(ANNOTATED_SUFFIX):
        raise InvalidNameError(f"op {name!r}: names may not end in {ANNOTATED_SUFFIX!r}.")
    if keyword.iskeyword(name) or compat.is_taken_in_torch_ops(name):
        raise InvalidNameError(
            f"op {name!r}: Python or torch.ops uses this name itself; choose another, such as "
            f"'{name}_op'."
        )
    return name


def check_provider_name(name: object) -> str:
    """Return *name*, or raise InvalidNameError if a provider cannot be called that."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidNameError(f"{name!r} is no name for a provider: {_FORM}.")
    if name in RESERVED_PROVIDERS:
        raise InvalidNameError(
            f"provider {name!r} is reserved. The native implementation is the function that the "
            "op was declared with; choose another name."
        )
    return name


def check_is_not_ours(name: str, native: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Raise InvalidNameError if *function*, of others, would take a name of opweave's own op.

    Kernels of opweave are registered late, at the first use of an op, and would find it taken.
    """
    if name in OWN_PROVIDERS and _is_of_opweave(native) and not _is_of_opweave(function):
        raise InvalidNameError(
            f"{native.__name__}: provider {name!r} comes with opweave. Use a name of your own, "
            f"such as 'my_{name}', and prefer it: {native.__name__}.set_default(['my_{name}'])."
        )


def _is_of_opweave(function: Callable[..., Any]) -> bool:
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] == __name__.partition(".")[0]
