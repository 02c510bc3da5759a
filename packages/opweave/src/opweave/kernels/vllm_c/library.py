"""The library of vLLM's CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from opweave.base.packages import folders_of
from opweave.ir import IrOp
from opweave.ir.predicate import Predicate
from opweave.ir.traits import BATCH_INVARIANT
from opweave.platforms.probes import cpu_features

Function = Callable[..., Any]

_NAMESPACE = "_C"  # in which vLLM registers its ops


def implements(
    op: IrOp, supports_args: Predicate, *, traits: Iterable[str] = (BATCH_INVARIANT,)
) -> Callable[[Function], Function]:
    """Register the decorated function as vLLM's implementation of *op*, if vLLM is installed."""
    if path() is None:
        return lambda function: function
    return op.register_impl("vllm_c", supports_args=supports_args, traits=traits)


@cache
def path() -> Path | None:
    """Return the file of the kernels that suit this CPU; None if it is not installed."""
    for folder in folders_of("vllm"):
        file = folder / f"{_name()}.abi3.so"
        if file.is_file():
            return file
    return None


@cache
def ops() -> Any:
    """Return the namespace of vLLM's ops in torch, and load their library before that.

    Raises:
        OSError: the library was built for another release of torch.
    """
    torch.ops.load_library(str(path()))  # type: ignore[no-untyped-call]
    return getattr(torch.ops, _NAMESPACE)


def _name() -> str:
    """Return the name of the library that vLLM itself would choose."""
    features = cpu_features()
    if not features & {"avx2", "avx512_f"} or "avx512_bf16" in features:  # or another processor
        return "_C"
    return "_C_AVX512" if "avx512_f" in features else "_C_AVX2"
