"""Opaque ops for loops over rows, which tracers would unroll and specialize on the batch size."""

from __future__ import annotations

from functools import partial

from opweave.adapters.opaque import opaque as opaque_in

opaque = partial(opaque_in, namespace="opweave_rows")
