"""What implementations of several providers ask of their arguments."""

from __future__ import annotations

import torch

from opweave.ir.rule import Rule, TensorRule

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def one_element(name: str) -> Rule:
    """Parameter *name* has one element (or is None, where the op takes that)."""
    return TensorRule(
        (name,), "{t}.numel() == 1", lambda n, t: f"{n}: {t.numel()} elements (supports 1)"
    )
