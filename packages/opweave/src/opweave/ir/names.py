"""Valid names of ops and providers."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from typing import Any

from opweave.base import compat
from opweave.base.packages import is_in_project
from opweave.ir.errors import InvalidNameError
from opweave.ir.priority import NATIVE

ANNOTATED_SUFFIX = "_annotated"  # of the torch op that carries call-site settings as arguments
ANNOTATIONS = ("using", "donate", "autocast")  # those arguments
RESERVED_PROVIDERS = frozenset({NATIVE, "unfused"})
"""Names that providers must not have."""
OWN_PROVIDERS = ("aten", "batch_invariant", "opweave_c", "opweave_c_invariant", "triton")
"""The providers that come with opweave."""
ADAPTERS = ("flag_gems", "flash_attn", "flashinfer", "liger", "quack", "sgl_kernel", "vllm_c")
"""Providers for kernels of other libraries, where these are installed."""

_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_FORM = "use lower-case letters, digits and underscores, not starting with a digit"


def check_op_name(name: object) -> str:
    """Return *name*; raise InvalidNameError if it is not a valid name for an op."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidNameError(f"op name {name!r} is invalid: {_FORM}.")
    if name.endswith(ANNOTATED_SUFFIX):
        raise InvalidNameError(f"op {name!r}: names must not end in {ANNOTATED_SUFFIX!r}.")
    if keyword.iskeyword(name) or compat.is_taken_in_torch_ops(name):
        raise InvalidNameError(
            f"op {name!r}: the name is reserved by Python or torch.ops; choose another, such as "
            f"'{name}_op'."
        )
    return name


def check_provider_name(name: object) -> str:
    """Return *name*; raise InvalidNameError if it is not a valid name for a provider."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidNameError(f"provider name {name!r} is invalid: {_FORM}.")
    if name in RESERVED_PROVIDERS:
        raise InvalidNameError(
            f"provider {name!r} is reserved. The native implementation is the function that the "
            "op was declared with; choose another name."
        )
    return name


def check_is_not_ours(name: str, native: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Raise InvalidNameError if third-party *function* takes a provider name of opweave's.

    Applies to opweave's ops only. Their kernels are registered at the first use of an op, and
    would then find the name taken.
    """
    if (
        name in (*OWN_PROVIDERS, *ADAPTERS)
        and _is_of_opweave(native)
        and not _is_of_opweave(function)
    ):
        raise InvalidNameError(
            f"{native.__name__}: provider {name!r} comes with opweave. Choose another name, "
            f"such as 'my_{name}', and prefer it: {native.__name__}.set_default(['my_{name}'])."
        )


def _is_of_opweave(function: Callable[..., Any]) -> bool:
    module = getattr(function, "__module__", None) or ""
    return is_in_project(module)
