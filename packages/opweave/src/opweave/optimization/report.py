"""The report of :func:`opweave.optimize`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any


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
        return {each.name: each.ops for each in self.outcomes if each.is_replaced}

    @property
    def kept(self) -> dict[str, str]:
        """Why each of the other candidates was not replaced, by the module's name."""
        return {each.name: each.reason for each in self.outcomes if not each.is_replaced}

    def to_json(self) -> list[dict[str, Any]]:
        """Return the outcomes as JSON values."""
        return [asdict(each) for each in self.outcomes]

    def __str__(self) -> str:
        if not self.outcomes:
            return "no module that opweave could replace"
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for each in self.outcomes:
            text = ", ".join(each.ops) if each.is_replaced else f"not replaced: {each.reason}"
            groups[each.module, text].append(each.name)
        rows = [("module", "count", "ops", "for example")]
        rows += [
            (module, str(len(names)), text, names[0] or "the model")
            for (module, text), names in groups.items()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
