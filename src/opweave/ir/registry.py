"""The table of ops, and what belongs to it: torch namespace, settings, first-use hook."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, overload
from weakref import WeakValueDictionary

from torch.library import Library

from opweave.base import compat, transaction
from opweave.base.owner import owned_by
from opweave.ir.errors import (
    DuplicateOpError,
    IrError,
    SettingError,
    UnknownOpError,
    UnknownOpWarning,
    did_you_mean,
)
from opweave.ir.op import IrOp
from opweave.ir.settings import Settings

NativeFunction = Callable[..., Any]


_registries: WeakValueDictionary[str, Registry] = WeakValueDictionary()


class Registry:
    """A table of ops.

    Args:
        namespace: the namespace of its torch ops (``torch.ops.<namespace>``). Two registries must
            not share one.

    Attributes:
        namespace: as given.
        library: torch's library of that namespace.
        settings: the priorities and requirements that hold in it.
        lock: held while it changes.
        version: counts changes of registrations and settings.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        _registries[namespace] = self
        self.library: Library = compat.new_library(namespace)
        self.lock = threading.RLock()
        self.settings = Settings(self._reset_ops)
        self._ops: dict[str, IrOp] = {}
        self._hook: Callable[[Registry], None] | None = None
        self._load_plugins: Callable[[], None] = lambda: None
        self._ready, self._preparing = True, False
        self.version = 0

    def __repr__(self) -> str:
        return f"<Registry {self.namespace!r} of {len(self._ops)} ops>"

    @property
    def ops(self) -> Mapping[str, IrOp]:
        """The declared ops by name."""
        return MappingProxyType(self._ops)

    def op(self, name: str) -> IrOp:
        """Return the op called *name*.

        Raises:
            UnknownOpError: there is none.
        """
        try:
            return self._ops[str(name)]
        except KeyError:
            raise UnknownOpError(f"unknown op {name!r}. {did_you_mean(name, self._ops)}") from None

    def reduce(self, op: IrOp) -> tuple[Any, ...]:
        """Return how to pickle *op*: by a call of :func:`unpickled`.

        Raises:
            UnknownOpError: it would find none, or another one.
        """
        if self._ops.get(op.name) is not op or _registries.get(self.namespace) is not self:
            raise UnknownOpError(
                f"{op!r} cannot be pickled: the registry {self.namespace!r} has another op of that "
                "name now, or none. Pickle the op that is registered, or leave it out."
            )
        return unpickled, (op.name, self.namespace)

    def add(self, op: IrOp, *, override: bool = False) -> IrOp:
        """Enter *op* and define its torch ops; with *override*, in place of one of the same name.

        Raises:
            DuplicateOpError: the name is taken.
        """
        with self.lock:
            former = self._ops.get(op.name)
            if former is not None:
                self._check_replaceable(former, op, override=override)
                former.torch_ops.remove()  # torch cannot define an op twice
            op.define()
            self._ops = {**self._ops, op.name: op}
            if former is not None:
                self._reset_ops()
        transaction.enter(f"op {op.name}", lambda: self._remove(op, former))
        return op

    def _check_replaceable(self, former: IrOp, op: IrOp, *, override: bool) -> None:
        is_own = former.site.is_in_opweave
        if override and not is_own:
            return
        advice = (
            "opweave's own ops cannot be replaced"
            if is_own
            else "In a notebook, declare it again with override=True"
        )
        raise DuplicateOpError(
            f"op {op.name!r} is declared already, at {former.site}; this is {op.site}. Choose "
            "another name, or register an implementation of the existing op with "
            f"@ir.ops.{op.name}.register_impl. {advice}."
        )

    def _remove(self, op: IrOp, former: IrOp | None) -> None:
        with self.lock:
            self._ops = {name: each for name, each in self._ops.items() if each is not op}
            op.torch_ops.remove()
            if former is not None:
                former.define()
                self._ops = {**self._ops, former.name: former}
            self._reset_ops()

    def on_first_use(
        self, hook: Callable[[Registry], None], load_plugins: Callable[[], None] = lambda: None
    ) -> None:
        """Run ``hook(self)`` once, before the first op of this registry chooses an implementation.

        Kernel libraries and settings are loaded there, so that importing opweave loads nothing.
        *load_plugins* runs before, each time until both have succeeded.
        """
        self._hook, self._load_plugins, self._ready = hook, load_plugins, False

    def ensure_ready(self) -> None:
        """Run the first-use hook, if it has not run; other threads wait until it has."""
        if self._ready:
            return
        with compat.no_transforms():  # what is loaded here serves calls without them, too
            is_first = self._make_ready()
        if is_first:
            self._warn_of_unknown_ops()

    def _make_ready(self) -> bool:
        """Return whether nobody else did."""
        self._load_plugins()  # not under the lock: another thread's plugin may be registering here
        with self.lock, owned_by(None), transaction.detached():
            if self._ready or self._preparing or self._hook is None:
                return False
            self._preparing = True
            try:
                self._hook(self)
                self._ready = True
            finally:
                self._preparing = False
        return True

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Undo every op and implementation registered inside the block if the block raises."""
        with self.lock, transaction.begin():
            yield

    def check_settings(self) -> None:
        """Check every op and provider that the settings name.

        Raises:
            SettingError: a setting names an op that nobody declared, or an unknown provider.
        """
        self.ensure_ready()
        for name, origin in self.settings.configured_ops().items():
            try:
                op = self.op(name)
                for entries in self.settings.priorities(name):
                    op.check_providers(entries)
            except IrError as error:
                raise SettingError(f"{origin}: {error}") from error

    def _warn_of_unknown_ops(self) -> None:
        # No error yet: a plugin, or the program itself, may declare the op later.
        for name, origin in self.settings.configured_ops().items():
            if name not in self._ops:
                warnings.warn(
                    f"{origin}: no op {name!r} is declared yet. {did_you_mean(name, self._ops)}",
                    UnknownOpWarning,
                    stacklevel=2,
                )

    def _reset_ops(self) -> None:
        with self.lock:
            self.version += 1
            for op in self._ops.values():
                op.reset()


_default = Registry("opweave")
_current = _default


def current_registry() -> Registry:
    """Return the registry that declarations and look-ups go to."""
    return _current


def find_op(name: str) -> IrOp:
    """Return the op called *name* in the current registry (UnknownOpError if there is none)."""
    return _current.op(name)


def unpickled(name: str, namespace: str) -> IrOp:
    """Return the op that a pickle refers to.

    Raises:
        UnknownOpError: nobody has declared it in this process.
    """
    registry = _registries.get(namespace)
    if registry is None:
        raise UnknownOpError(
            f"unknown op {name!r} of the registry {namespace!r}, which does not exist here. "
            f"{did_you_mean(namespace, _registries)} Declare the op in a registry of that "
            "namespace (ir.isolated_registry(namespace)) before it is loaded."
        )
    return registry.op(name)


_fresh = itertools.count()


@contextmanager
def isolated_registry(namespace: str | None = None) -> Iterator[Registry]:
    """Make an empty registry the current one inside the block; for tests and compatibility shims.

    Args:
        namespace: of its torch ops; by default a new one each time, since torch cannot define an op
            twice.
    """
    global _current
    previous = _current
    _current = Registry(namespace or f"opweave_isolated_{next(_fresh)}")
    try:
        yield _current
    finally:
        _current = previous


@overload
def register_op(native: NativeFunction, /) -> IrOp: ...


@overload
def register_op(
    *,
    name: str | None = None,
    activations: Sequence[str] | None = None,
    allow_inplace: bool = False,
    composite: bool = False,
    native_traits: Iterable[str] = (),
    keeps_strides: Sequence[str] = (),
    override: bool = False,
) -> Callable[[NativeFunction], IrOp]: ...


def register_op(
    native: NativeFunction | None = None,
    /,
    *,
    name: str | None = None,
    activations: Sequence[str] | None = None,
    allow_inplace: bool = False,
    composite: bool = False,
    native_traits: Iterable[str] = (),
    keeps_strides: Sequence[str] = (),
    override: bool = False,
) -> IrOp | Callable[[NativeFunction], IrOp]:
    """Declare an op: the decorated PyTorch function is its native implementation.

    The function is the op's meaning (values, shapes, strides, dtypes), what runs where no kernel
    does, and what kernels are tested against. Use it bare or with options.

    Args:
        name: the op's name; by default the function's.
        activations: the tensor parameters that ``maybe_inplace`` donates; by default those whose
            names start with ``x``.
        allow_inplace: whether the op has ``maybe_inplace``. Needs as many activations as outputs.
        composite: the native implementation is written in other IR ops, so that the compiler can
            find it in a graph.
        native_traits: what the native implementation promises; always ``differentiable``.
        keeps_strides: activations, such as a cache, whose output has the strides that came in, gaps
            included (contiguous if elements overlap); a kernel may then reuse views of any layout.
            Other activations are reused only if they are contiguous.
        override: replace an earlier declaration of the same name, as when a notebook cell runs
            again. Implementations of the earlier op are dropped with it.

    Raises:
        InvalidNameError: the name is no name of an op.
        InvalidOpError: the function's signature cannot be an op's.
        DuplicateOpError: there is an op of that name.
        UnknownTraitError: nobody declared such a trait.
    """

    def decorate(function: NativeFunction) -> IrOp:
        op = IrOp(
            function,
            _current,
            name=name,
            activations=activations,
            allow_inplace=allow_inplace,
            composite=composite,
            native_traits=native_traits,
            keeps_strides=keeps_strides,
        )
        return _current.add(op, override=override)

    return decorate if native is None else decorate(native)
