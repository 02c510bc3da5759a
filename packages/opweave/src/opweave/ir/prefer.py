"""``ir.priority``: priorities for a block of code, by op name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opweave.ir.errors import SettingError
from opweave.ir.op import IrOp
from opweave.ir.priority import Entries, parse
from opweave.ir.registry import current_registry
from opweave.ir.scope import Scope, current_scope, entered, left_to_python


@contextmanager
def priority(
    priorities: Mapping[str, str | Iterable[str]] | None = None,
    /,
    **by_op: str | Iterable[str],
) -> Iterator[None]:
    """Prefer these providers inside the block, in this thread or asyncio task only.

    Takes a mapping, keywords, or both: ``with ir.priority(rms_norm=["triton", "opweave_c"]): ...``.
    Scopes nest; the inner list comes before the outer one. Names refer to the current registry.

    Raises:
        UnknownOpError, UnknownProviderError: a name is not registered.
        SettingError: a list is malformed.
    """
    if priorities is not None and not isinstance(priorities, Mapping):
        raise SettingError(
            "ir.priority takes priority lists by op name, such as "
            f"ir.priority(rms_norm=['native']), not {priorities!r}."
        )
    lists: dict[IrOp, Entries] = {}
    for name, names in {**(priorities or {}), **by_op}.items():
        op, entries = current_registry().op(name), parse(names, f"scope ir.priority({name}=...)")
        op.check_providers(entries)
        lists[op] = entries
    with entered(Scope(current_scope(), priorities=lists)):
        yield


left_to_python("ir.priority", priority)
