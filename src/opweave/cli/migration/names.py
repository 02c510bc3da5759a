"""Names that the sketch gives: identifiers, as ops and providers can be called."""

from __future__ import annotations

import re

from opweave.ir.errors import InvalidNameError
from opweave.ir.names import OWN_PROVIDERS, RESERVED_PROVIDERS, check_op_name


def snake(name: str) -> str:
    """Return ``my_op`` for ``MyOp``."""
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).lower()


def op_name(text: str) -> str:
    """Return *text* as an op can be called."""
    name = _identifier(text)
    try:
        return check_op_name(name)
    except InvalidNameError:
        return f"{name}_op"


def provider_name(text: str) -> str:
    """Return *text* as a provider can be called that is not opweave's."""
    name = _identifier(text)
    return f"my_{name}" if name in RESERVED_PROVIDERS or name in OWN_PROVIDERS else name


def _identifier(text: str) -> str:
    name = re.sub(r"[^a-z0-9_]", "_", text.lower())
    return f"_{name}" if name[:1].isdigit() else name
