"""``torch.autocast`` as text, so that a call in a graph can say under which state it is made.

The text names a dtype for each kind of device whose operators cast: ``"cpu=bfloat16"``. It is empty
where none does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch


def to_text(dtypes: Mapping[str, torch.dtype]) -> str:
    """Write down the dtype of each kind of device."""
    names = {device: str(dtype).removeprefix("torch.") for device, dtype in dtypes.items()}
    return ",".join(f"{device}={name}" for device, name in sorted(names.items()))


@contextmanager
def entered(text: str) -> Iterator[None]:
    """Run the block under the state that *text* names; without one, under that of the caller.

    No cast of a weight is kept for later, as torch does in eager mode: the result is the same.
    """
    with ExitStack() as stack:
        for part in filter(None, text.split(",")):
            device, _, name = part.partition("=")
            dtype = getattr(torch, name)
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
        yield
