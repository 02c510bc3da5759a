"""Replace the modules of a model, and restore them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from opweave.ir import current_registry
from opweave.ir.explain import text_table
from opweave.optimization import attention, linears, norms
from opweave.optimization.check import brief, difference
from opweave.optimization.forward import (
    Replaced,
    Replacement,
    class_of,
    is_put_back_possible,
    put_back,
    replace,
)


@dataclass(frozen=True)
class ModuleOutcome:
    """Whether one module was replaced, and why not.

    Attributes:
        name: the name of the module, as in ``named_modules()``; "" is the model itself.
        module: the class of the module.
        ops: the ops that it now runs; empty if it was not replaced.
        reason: why it was not replaced; empty if it was.
    """

    name: str
    module: str
    ops: tuple[str, ...]
    reason: str = ""

    @property
    def is_replaced(self) -> bool:
        return bool(self.ops)


@dataclass(frozen=True)
class OptimizeReport:
    """The modules of a model that were replaced, and those that were not.

    ``print`` it for a table with one row for each kind of module.
    """

    outcomes: tuple[ModuleOutcome, ...]

    @property
    def replaced(self) -> dict[str, tuple[str, ...]]:
        """The ops that each replaced module runs, by the module's name."""
        return {o.name: o.ops for o in self.outcomes if o.is_replaced}

    @property
    def kept(self) -> dict[str, str]:
        """Why each of the other candidates was not replaced, by the module's name."""
        return {o.name: o.reason for o in self.outcomes if not o.is_replaced}

    def to_json(self) -> list[dict[str, Any]]:
        """Return the outcomes as JSON values."""
        return [asdict(o) for o in self.outcomes]

    def __str__(self) -> str:
        if not self.outcomes:
            return "no module that opweave could replace"
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for o in self.outcomes:
            text = ", ".join(o.ops) if o.is_replaced else f"not replaced: {o.reason}"
            groups[o.module, text].append(o.name)
        rows = [("module", "count", "ops", "for example")]
        rows += [
            (module, str(len(names)), text, names[0] or "the model")
            for (module, text), names in groups.items()
        ]
        return text_table(rows)


def optimize(model: nn.Module) -> OptimizeReport:
    """Make the modules of *model* run opweave's ops, in place.

    Replaces linear layers, RMS and layer normalization, gated MLPs, and the attention of
    transformers models that use SDPA. Modules stay instances of their class, with the same
    parameters, buffers, hooks and ``state_dict()``; pickle, ``copy.deepcopy`` and device moves
    work. A second call is a no-op.

    Before a module is replaced, its old and its new ``forward`` run on random inputs in its dtype.
    If they differ by more than the op's tolerance, or if ``forward`` reads buffers or attributes
    that the op does not, the module is not replaced, and the report gives the reason. Calls that
    the ops do not support, such as inputs in another dtype than the module's, run the old
    ``forward``.

    Args:
        model: any module.

    Returns:
        The replaced modules, and the reasons why others were not replaced.

    Raises:
        TypeError: *model* is not a module.
        PluginError: a plugin cannot be loaded; no module is replaced.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize() takes a torch.nn.Module, not {type(model).__name__}")
    current_registry().ensure_ready()  # else its errors would be reasons not to replace a module
    outcomes = []
    for name, module, candidates, width in list(_candidates(model)):
        chosen, reason = _choose(module, candidates, width)
        ops = chosen.ops if chosen else ()
        outcomes.append(ModuleOutcome(name, type(module).__name__, ops, reason))
        if chosen:
            replace(module, chosen)
    attends = ("causal_attention", "bidirectional_attention")
    for name, module in attention.install(model):
        outcomes.append(ModuleOutcome(name, f"attention of {type(module).__name__}", attends))
    return OptimizeReport(tuple(outcomes))


def restore(model: nn.Module) -> None:
    """Undo :func:`optimize`: every module runs its own ``forward`` again.

    Raises:
        ValueError: a module got another class after :func:`optimize`, for example by
            ``torch.nn.utils.parametrize``; nothing is restored.
    """
    replaced = [(name, each) for name, each in model.named_modules() if isinstance(each, Replaced)]
    for name, module in replaced:
        if not is_put_back_possible(module):
            raise ValueError(
                f"restore() cannot restore {name or 'the model'!r}: its class was changed to "
                f"{type(module).__name__!r} after optimize(). Undo that first; for a "
                "parametrization, call torch.nn.utils.parametrize.remove_parametrizations()."
            )
    for _, module in replaced:
        put_back(module)
    attention.remove(model)


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[Replacement], int]]:
    for name, module in model.named_modules():
        if isinstance(module, Replaced):
            continue
        for candidates in (linears.candidates, norms.candidates, linears.gated_candidates):
            replacements, width = candidates(module)
            if replacements:
                yield name, module, replacements, width
                break


def _choose(
    module: nn.Module, candidates: list[Replacement], width: int
) -> tuple[Replacement | None, str]:
    """Return the first candidate that agrees with *module*, or None and why the first differs."""
    like = next(iter(module.parameters()), torch.empty(0))
    if like.is_meta:
        return None, "its parameters are on the meta device"
    if "forward" in vars(module):
        return None, "its forward was replaced on the instance"
    if is_parametrized(module):
        return None, "its parameters are parametrized"
    problems = []
    with _undisturbed(module):
        for candidate in candidates:
            attributes = candidate.kept(module)
            vars(module).update(attributes)
            problem = _cannot_derive(module, candidate)
            problem = problem or difference(module, candidate, width, like)
            if not problem:
                return candidate, ""
            problems.append(problem)
            for name in attributes:
                del vars(module)[name]
    return None, problems[0]


def _cannot_derive(module: nn.Module, replacement: Replacement) -> str:
    """Return why the module's class has no subclass with *replacement*; "" if it does."""
    try:
        class_of(type(module), replacement)
    except Exception as error:  # from __init_subclass__ or a metaclass
        return f"its class cannot be derived from: {brief(error)}"
    return ""


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Run *module* and its children in evaluation mode, without calling the user's hooks."""
    saved = []
    for part in module.modules():
        names = ("_forward_hooks", "_forward_pre_hooks", "training")
        saved.append((part, {name: vars(part)[name] for name in names}))
        vars(part).update(_forward_hooks={}, _forward_pre_hooks={}, training=False)
    try:
        yield
    finally:
        for part, values in saved:
            vars(part).update(values)
