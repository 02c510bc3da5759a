"""Memory: metadata of results, mutation, donation and stale results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from opweave import torch_compat
from opweave.conformance import inputs
from opweave.conformance.compare import bits_problem, outputs_problem, structure_problem
from opweave.conformance.snapshot import Snapshot, Values, copied, fake_values
from opweave.conformance.subject import (
    Case,
    Check,
    Finding,
    Findings,
    Outputs,
    Subject,
    accepted,
    each,
    outputs_of,
)
from opweave.ir.donation import disjoint
from opweave.ir.op import tensors_in

# Metadata: shapes, dtypes and strides are those of the fake implementation.


_metadata_cases = inputs.chained(
    inputs.usual, inputs.empty, inputs.dimensions, inputs.tails, inputs.options, inputs.without,
    inputs.mixed, partial(inputs.laid_out, dtypes=2),  # fake tensors are slow
)  # fmt: skip


def strides(t: Tensor) -> list[int]:
    """Return the strides of the dimensions with more than one element."""
    pairs = zip(t.shape, t.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1] if t.numel() else []


def metadata_problem(subject: Subject, case: Case) -> Finding:
    """Compare the outputs' metadata with that of the fake implementation."""
    mode, values = fake_values(case.values)
    args, kwargs = subject.op.schema.split(values)
    with mode, torch.no_grad():
        fakes = outputs_of(subject.op.fake(*args, **kwargs))
    result = subject.run(copied(case.values))
    problem = structure_problem(fakes, result)
    if problem:
        return problem.replace("native's", "the fake implementation's")
    for i, (output, fake) in enumerate(zip(outputs_of(result), fakes, strict=True)):
        if strides(output) != strides(fake):
            return (
                f"output {i} has strides {tuple(output.stride())}, the fake implementation's has "
                f"{tuple(fake.stride())}"
            )
    return None


METADATA = Check(
    "metadata", "shapes, dtypes, devices and strides are those of the fake implementation",
    each(_metadata_cases, metadata_problem),
)  # fmt: skip


# Mutation: arguments do not change, and results are in new memory.


def _leaves_alone(subject: Subject, case: Case) -> Finding:
    values = copied(case.values)
    before = Snapshot(values)
    return memory_problem(case, values, before, outputs_of(subject.run(values)))


def memory_problem(case: Case, values: Values, before: Snapshot, outputs: Outputs) -> Finding:
    """Return which arguments were changed or returned, or which outputs share memory."""
    changed = before.changed()
    if changed:
        return f"wrote into {_names(case, values, changed)}"
    arguments = tensors_in(values)
    shared = [t for t in arguments if any(torch_compat.share_storage(t, out) for out in outputs)]
    if shared:
        return f"an output is a view of {_names(case, values, shared)}"
    if any(torch_compat.share_storage(a, b) for a, b in combinations(outputs, 2)):
        return "two outputs share memory"
    return None


def _names(case: Case, values: tuple[object, ...], tensors: Sequence[object]) -> str:
    """Return which arguments these tensors are."""
    named = zip(case.op.schema.names, values, strict=True)
    return " and ".join(
        name for name, value in named if any(v is t for t in tensors for v in tensors_in((value,)))
    )


MUTATION = Check(
    "mutation", "arguments, and the memory around them, do not change; results are in new memory",
    each(inputs.chained(inputs.usual, inputs.laid_out), _leaves_alone),
)  # fmt: skip


# Donation: ``maybe_inplace`` writes only to its activations, also if arguments share memory.


def _donates(subject: Subject) -> bool:
    return subject.op.allow_inplace


_donation_cases = inputs.chained(
    inputs.usual, inputs.empty, inputs.dimensions, inputs.few_and_many, inputs.without,
    inputs.laid_out,
)  # fmt: skip


def takes(subject: Subject, case: Case, **how: Any) -> Finding:
    """Call with donated activations, and check the result and the memory."""
    values = copied(case.values)
    activations = [values[i] for i in subject.op.activation_indices]
    before = Snapshot(values)
    result = subject.run(values, donating=True, **how)
    problem = outputs_problem(case, result)
    if problem:
        return f"maybe_inplace: {problem}"
    if before.changed(except_in=activations):
        return "maybe_inplace wrote into memory that was not donated"
    functional = outputs_of(subject.run(copied(case.values)))
    for i, (a, b) in enumerate(zip(outputs_of(result), functional, strict=True)):
        if strides(a) != strides(b):
            both = f"{tuple(a.stride())}, the functional call {tuple(b.stride())}"
            return f"output {i} of maybe_inplace has strides {both}"
    for a, b in combinations(outputs_of(result), 2):
        if torch_compat.share_storage(a, b) and not disjoint(a, b):
            return "maybe_inplace returned two outputs in one memory"
    return None


def aliases(subject: Subject) -> Iterator[Case]:
    """Yield cases whose activations share memory: with each other, themselves, a weight."""
    op, indices = subject.op, subject.op.activation_indices
    for base in inputs.usual(subject):
        first = base.values[indices[0]]
        for i in indices[1:]:
            if base.values[i].shape == first.shape and base.values[i].dtype == first.dtype:
                for label, pair in {
                    "one tensor twice": (first, first),
                    "views of one": (first, first.view(first.shape)),
                    "overlapping": _overlapping(first),
                    "packed": _packed(first),
                }.items():
                    yield base.replaced(label, dict(zip((indices[0], i), pair, strict=True)))
        for i in indices:
            value = base.values[i]
            if value.ndim > 1:
                yield base.replaced("rows in one memory", {i: inputs.expanded(value)})
            for j, other in enumerate(base.values):
                if j not in indices and isinstance(other, Tensor) and _fits(value, other):
                    label = f"{op.schema.names[i]} is {op.schema.names[j]}"
                    yield base.replaced(label, {i: other.view(value.shape)})


def _fits(value: Tensor, other: Tensor) -> bool:
    return value.dtype == other.dtype and value.numel() == other.numel() > 0


def _overlapping(t: Tensor) -> tuple[Tensor, Tensor]:
    shift = max(1, t.shape[-1] // 2)
    memory = torch.cat([t.reshape(-1), t.reshape(-1)[:shift]])
    return memory[: t.numel()].view(t.shape), memory[shift:].view(t.shape)


def _packed(t: Tensor) -> tuple[Tensor, Tensor]:
    one, other = torch.cat([t, t.flip(-1)], -1).chunk(2, -1)
    return one, other


def _survives(subject: Subject, case: Case) -> Finding:
    values = copied(case.values)
    others = [v for i, v in enumerate(values) if i not in subject.op.activation_indices]
    before = Snapshot(others)
    problem = outputs_problem(case, subject.run(values, donating=True))
    if problem:
        return f"maybe_inplace: {problem}"
    return "maybe_inplace wrote into what was not donated" if before.changed() else None


DONATION = Check(
    "donation", "maybe_inplace is correct, and writes only to its activations",
    each(_donation_cases, takes), _donates,
)  # fmt: skip
ALIASES = Check(
    "aliases",
    "it is also correct if donated tensors share memory with each other or other arguments",
    each(aliases, _survives), _donates,
)  # fmt: skip


# Staleness: a result depends on the current values of the arguments, not on earlier ones.
#
# A kernel that caches a converted weight by the weight's address is wrong after the next
# ``load_state_dict``, which writes in place.


def _findings(subject: Subject) -> Findings:
    for case, other in zip(inputs.usual(subject), inputs.usual(subject), strict=True):
        yield from accepted(subject, case, partial(_follows, other=other))


def _follows(subject: Subject, case: Case, other: Case) -> Finding:
    """Change one argument after the other, and compare with a call of copies."""
    names = case.op.schema.names
    changes = [(i, new) for i in range(len(names)) for new in _other_values(case, other, i)]
    for place, changed in changes:
        values = copied(case.values)
        subject.ask("hold", values)
        for tensor, new in zip(tensors_in(values[place : place + 1]), changed, strict=True):
            tensor.data.copy_(new)  # without a new version, as optimizers and loaders do
        expected = outputs_of(subject.run(copied(values)))
        problem = bits_problem(expected, outputs_of(subject.ask("again")))
        if problem:
            problem = problem.replace("native has", "a copy of the arguments gives")
            return f"{names[place]} was changed in place since the last call, and {problem}"
    return None


def _other_values(case: Case, other: Case, place: int) -> Iterator[list[Tensor]]:
    """Yield other values of an argument: numbers reversed, positions as in *other*, if they fit.

    Both all numbers of a row and those of its second half are reversed.
    """
    tensors, others = (tensors_in(c.values[place : place + 1]) for c in (case, other))
    if any(map(_has_rows_of_numbers, tensors)):
        for share in (0.0, 0.5):
            yield [_reversed(t, share) if _has_rows_of_numbers(t) else t for t in tensors]
    elif tensors and not case.replaced("", {place: other.values[place]}).refusal:
        yield from [others] if [t.shape for t in tensors] == [t.shape for t in others] else []


def _has_rows_of_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor can be reversed; positions cannot, since they must fit the rest."""
    is_of_numbers = tensor.is_floating_point() or tensor.dtype is torch.int8
    return is_of_numbers and tensor.ndim > 0 and tensor.shape[-1] > 1


def _reversed(tensor: Tensor, kept: float) -> Tensor:
    """Return *tensor* with reversed rows, behind a share that is kept."""
    words = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    first, last = words.tensor_split([int(kept * words.shape[-1])], -1)
    return torch.cat((first, last.flip(-1)), -1).view(tensor.dtype)


STALENESS = Check(
    "staleness", "after an argument changes in place, the result uses its new values", _findings
)
