"""Boolean options without a value."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative=())]
"""``--name``, without ``--no-name``."""
