"""Valid names for ops and providers."""

from __future__ import annotations

import re

from opweave.ir.errors import InvalidNameError
from opweave.ir.names import OWN_PROVIDERS, RESERVED_PROVIDERS, check_op_name


def snake(name: str) -> str:
    """Return ``my_op`` for ``MyOp``."""
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).lower()


def op_name(text: str) -> str:
    """Return *text* as a valid op name."""
    name = _identifier(text)
    try:
        return check_op_name(name)
    except InvalidNameError:
        return f"{name}_op"


def provider_name(text: str) -> str:
    """Return *text* as a valid provider name that opweave does not use."""
    name = _identifier(text)
    return f"my_{name}" if name in RESERVED_PROVIDERS or name in OWN_PROVIDERS else name


def _identifier(text: str) -> str:
    name = re.sub(r"[^a-z0-9_]", "_", text.lower())
    return f"_{name}" if name[:1].isdigit() else name
