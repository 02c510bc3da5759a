"""Values: the result of native, for every accepted dtype, size, option and layout."""

from __future__ import annotations

from opweave.conformance import dtypes, inputs, layouts, scalars
from opweave.conformance.case import Case, outputs_of
from opweave.conformance.check import Check, Finding, each, not_native
from opweave.conformance.checks.mutation import memory_problem
from opweave.conformance.compare import outputs_problem
from opweave.conformance.memory import Snapshot, copied
from opweave.conformance.subject import Subject


def is_right(subject: Subject, case: Case) -> Finding:
    """Compare the result with native and the float64 reference, and check its memory."""
    values = copied(case.values)
    before = Snapshot(values)
    result = subject.run(values)
    problem = outputs_problem(case, result)
    return problem or memory_problem(case, values, before, outputs_of(result))


VALUES = Check(
    "values",
    "outputs match native within the op's tolerance, in every dtype and size",
    each(inputs.sizes, is_right),
    not_native,
)
OPTIONS = Check(
    "options",
    "outputs also match with other numbers, flags and strings",
    each(scalars.options, is_right),
    not_native,
)
NONE = Check(
    "none",
    "outputs also match if optional tensors are omitted",
    each(scalars.without, is_right),
    not_native,
)
LAYOUTS = Check(
    "layouts",
    "outputs also match with slices, strides, transposed and repeated rows; gaps are not read",
    each(layouts.laid_out, is_right),
    not_native,
)
DTYPES = Check(
    "dtypes",
    "outputs also match if arguments have different dtypes",
    each(dtypes.mixed, is_right),
    not_native,
)
EMPTY = Check("empty", "a call with zero tokens works", each(inputs.empty, is_right))
