"""Argument rules shared by several providers."""

from __future__ import annotations

import torch

from opweave.ir.rule import Rule, TensorRule

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def one_element(name: str) -> Rule:
    """Require that parameter *name* has one element, or is None if it is optional."""
    return TensorRule(
        (name,), "{t}.numel() == 1", lambda n, t: f"{n}: {t.numel()} elements (supports 1)"
    )
