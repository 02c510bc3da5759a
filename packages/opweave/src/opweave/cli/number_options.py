"""Options with a number in a range."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

SeedOption = Annotated[int, Parameter(validator=Number(gte=-(2**63), lt=2**64))]
"""``--seed``, in the range of ``torch.manual_seed``."""
RoundsOption = Annotated[int, Parameter(show=False, validator=Number(gte=1))]
"""``--rounds``, of measurements."""
