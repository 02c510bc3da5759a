"""Implementations: a kernel for an op, the arguments it supports and its traits."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opweave import torch_compat
from opweave.ir.errors import InvalidOpError, PredicateFailedError, described
from opweave.ir.priority import NATIVE, Tunable, base_of, without_values
from opweave.ir.rules import Predicate, Rule, check_predicate, evaluator, named_call
from opweave.ir.schema import check_same
from opweave.registration import Owner, Site, current_owner, way_out

if TYPE_CHECKING:
    from opweave.ir.op import IrOp

_editions: Counter[tuple[str, str, str]] = Counter()


@dataclass(frozen=True, eq=False)
class IrOpImpl:
    """A kernel for *op*.

    Attributes:
        op: the op it implements.
        provider: who wrote the kernel (``"opweave_c"``, ``"triton"``), regardless of the device.
        impl_fn: the function; same signature as the op's native implementation.
        supported: whether it can run on this system, decided once at registration.
        unsupported_reason: why it cannot.
        supports_args: the predicate, or None if all arguments are supported.
        inplace: whether it may write its outputs into the op's activations.
        functional_fn: the out-of-place form of an in-place kernel, if it has one.
        traits: its promises, see :mod:`opweave.ir.rules`.
        site: where it was registered.
        owner: the plugin that registered it, if any.
        tunable: the tunable parameters and their values, see :mod:`opweave.ir.priority`.
        edition: the number of earlier registrations of this provider and op in the process.
    """

    op: IrOp
    provider: str
    impl_fn: Callable[..., Any]
    _: KW_ONLY
    traits: frozenset[str]
    site: Site
    owner: Owner | None = field(default_factory=current_owner)
    supported: bool = True
    unsupported_reason: str = ""
    supports_args: Predicate | None = None
    inplace: bool = False
    functional_fn: Callable[..., Any] | None = None
    tunable: Tunable = field(default_factory=dict)
    edition: int = field(init=False)

    def __post_init__(self) -> None:
        native, what = self.op.native, f"{self.op.name!r}: implementation {self.provider!r}"
        check_same(native, self.impl_fn, f"{what} ({self.site})", self.tunable)
        if self.functional_fn is not None:
            check_same(native, self.functional_fn, f"{what}, functional= ({self.site})")
        if self.supports_args is not None:
            check_predicate(self.supports_args, self.op.schema, what)
        name = (self.op.registry.namespace, self.op.name, self.provider)
        object.__setattr__(self, "edition", _editions[name])
        _editions[name] += 1

    def __repr__(self) -> str:
        return f"<IrOpImpl {self.op.name}:{self.provider} from {self.site}>"

    @property
    def plain_fn(self) -> Callable[..., Any]:
        """``impl_fn`` for plain calls (:mod:`opweave.plain_call`): skips its own torch op."""
        found: Callable[..., Any] = getattr(self.impl_fn, "undispatched", self.impl_fn)
        return found

    @property
    def base(self) -> str:
        """The provider without values of tunable parameters."""
        return base_of(self.provider)

    @property
    def supports_all_args(self) -> bool:
        """Whether there is no predicate."""
        return self.supports_args is None

    @property
    def place(self) -> str:
        """Where it was registered, and by which plugin, if any."""
        return f"{self.site}" if self.owner is None else f"{self.site}, of the plugin {self.owner}"

    @property
    def way_out(self) -> str:
        """A sentence on how to disable the plugin that registered it; empty without one."""
        return way_out(self.owner)

    def add_note(self, error: Exception) -> None:
        """Add a note to *error*, raised by ``impl_fn``, that names this implementation."""
        if self.owner is None and self.provider == NATIVE:
            return  # an error of the op itself, such as invalid arguments
        note = f"in {self.op.name}:{self.provider} ({self.place}).{self.way_out}"
        error.add_note(note.removesuffix("."))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Call :meth:`add_note` for an exception that the block raises."""
        try:
            yield
        except Exception as error:
            self.add_note(error)
            raise

    @cached_property
    def _accepts(self) -> Callable[..., bool]:
        predicate = self.supports_args
        if predicate is None:
            return lambda *args, **kwargs: True
        if isinstance(predicate, Rule):
            return evaluator(predicate, self.op.schema)
        return self.op.schema.function(f"_predicate({named_call(predicate)})", _predicate=predicate)

    def rejection(self, values: Sequence[Any]) -> str | None:
        """Return why the predicate rejects *values* (one per parameter), or None if it accepts.

        Raises:
            PredicateFailedError: the predicate itself raised.
        """
        args, kwargs = self.op.schema.split(values)
        try:
            answer: object = self._accepts(*args, **kwargs)
            if not isinstance(answer, (bool, torch.SymBool)):
                raise TypeError(f"it returned {answer!r}")
            if answer:
                return None
        except Exception as error:
            if torch_compat.depends_on_data(error):
                return "its predicate reads a data-dependent size"
            odd = [t for t in values if isinstance(t, Tensor) and t.layout is not torch.strided]
            if odd and isinstance(self.supports_args, Rule):
                return f"a tensor has the layout {odd[0].layout} (supports strided)"
            raise PredicateFailedError(
                f"{self.op.name}: the predicate of provider {self.provider!r} ({self.place}) "
                f"raised {described(error)}. A predicate must return True or False for any "
                "arguments of the op; fix it, or leave the provider out of the priority."
                f"{self.way_out}"
            ) from error
        if isinstance(self.supports_args, Rule):
            named = dict(zip(self.op.schema.names, values, strict=True))
            return self.supports_args.reason(self.op.schema, named)
        return f"its predicate {_name(self.supports_args)} returned False"

    def uuid(self) -> str:
        """Return a digest of the source files of the kernel's function and its predicate."""
        digest = hashlib.sha256(self.provider.encode())
        functions = [self.impl_fn, *filter(None, [self.functional_fn])]
        if callable(self.supports_args):
            functions.append(self.supports_args)
        for function in functions:
            digest.update(_source(function))
        return digest.hexdigest()


def check_options(op: IrOp, *, inplace: bool, functional: object, supported: object) -> None:
    """Raise InvalidOpError for options of a registration that do not fit each other or *op*."""
    if functional is not None and not inplace:
        raise InvalidOpError(
            f"{op.name}: functional= is for an in-place implementation (inplace=True); "
            "otherwise the decorated function is the functional one."
        )
    if inplace and not op.allow_inplace:
        raise InvalidOpError(
            f"{op.name}: an in-place implementation needs an op declared with "
            f"allow_inplace=True; {op.name} ({op.site}) is not."
        )
    if not isinstance(supported, bool):
        raise InvalidOpError(f"{op.name}: supported={supported!r} is neither True nor False.")


def _name(function: Any) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", repr(function))
    return f"{name!r} ({code.co_filename}:{code.co_firstlineno})" if code else repr(name)


def _source(function: Callable[..., Any]) -> bytes:
    function = without_values(function)  # the provider names the values
    try:
        file = inspect.getsourcefile(function)
        if file is not None:
            with open(file, "rb") as handle:
                return handle.read()
    except (OSError, TypeError):
        pass
    code = getattr(function, "__code__", None)
    parts = (code.co_code, code.co_consts, code.co_names) if code else (repr(function),)
    return repr(parts).encode()
