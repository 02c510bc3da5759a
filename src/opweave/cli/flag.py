"""Options that are there or not."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative=())]
"""``--name``, which has no ``--no-name``."""
