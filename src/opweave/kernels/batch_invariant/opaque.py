"""A loop over rows as one node of a graph: unrolled, it would make a graph for each size."""

from __future__ import annotations

from functools import partial

from opweave.kernels.opaque import opaque as opaque_in

opaque = partial(opaque_in, namespace="opweave_rows")
