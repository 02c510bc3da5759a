"""The state of ``torch.autocast`` as a string, for the arguments of a graph node.

The string has one ``device=dtype`` pair for each device type with autocast enabled, separated by
commas: ``"cpu=bfloat16"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch


def to_text(dtypes: Mapping[str, torch.dtype]) -> str:
    """Encode the autocast dtype of each device type."""
    names = {device: str(dtype).removeprefix("torch.") for device, dtype in dtypes.items()}
    return ",".join(f"{device}={name}" for device, name in sorted(names.items()))


@contextmanager
def entered(text: str) -> Iterator[None]:
    """Enable autocast as *text* says inside the block; an empty text changes nothing.

    The weight cache is off: it does not change results.
    """
    with ExitStack() as stack:
        for part in filter(None, text.split(",")):
            device, _, name = part.partition("=")
            dtype = getattr(torch, name)
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
        yield
