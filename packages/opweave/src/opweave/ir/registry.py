"""The handles of ops, their registries, and priorities for a block of code."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, overload
from weakref import WeakValueDictionary

from torch.library import Library

from opweave import torch_compat, transaction
from opweave.ir import errors
from opweave.ir.codegen import Kind
from opweave.ir.dispatch import (
    Callee,
    CallSite,
    IrOpInplaceOverload,
    Path,
    TracedCallSite,
    dispatched,
)
from opweave.ir.errors import did_you_mean
from opweave.ir.op import IrOpImpl, OpDefinition
from opweave.ir.priority import Entries, parse
from opweave.ir.schema import Function
from opweave.ir.scope import Scope, Settings, current_scope, default_origin, entered, left_to_python
from opweave.ir.selection import policy_for
from opweave.ir.torch_ops import TorchOps, torch_ops_with
from opweave.registration import owned_by

# The handle of an op.


class IrOp(OpDefinition, Callee):
    """A functional operation: a name, a schema, a native implementation, and kernels for it.

    Created by :func:`opweave.ir.register_op`. Call it like the function it was declared with. Use
    :func:`opweave.ir.explain` to see which implementation a call runs.

    Attributes:
        registry: the registry of the op, with its settings.
    """

    maybe_inplace: IrOpInplaceOverload  # only with allow_inplace=True

    def __init__(self, native: Function, registry: Registry, **options: Any) -> None:
        """Create an op without registering it.

        Args:
            native: the function that defines it.
            registry: the registry that it will belong to.
            options: the options of :func:`register_op`.
        """
        super().__init__(native, registry.namespace, registry.settings, **options)
        self.registry = registry
        self.torch_ops = TorchOps(self, self._kernel_path)

    def define(self) -> None:
        """Define the torch ops and the call paths; called when the op enters its registry."""
        self._kernels: dict[Entries, Path] = {(): Path(self.torch_ops, Kind.KERNEL)}
        self._autograd = Path(self.torch_ops, Kind.AUTOGRAD)
        self.torch_ops.define(self._autograd)
        self.torch_op = self.torch_ops.default
        self._call = Path(self.torch_ops, Kind.CALL, callee=self)
        if self.allow_inplace:
            self.maybe_inplace = IrOpInplaceOverload(self, self.torch_ops)
        self._call_sites: dict[tuple[str, ...], CallSite] = {}  # grows without the lock

    def __reduce__(self) -> tuple[Any, ...]:
        registered = _registries.get(self.namespace)
        if registered is not self.registry or registered.ops.get(self.name) is not self:
            raise errors.UnknownOpError(  # it could not be loaded
                f"{self!r} cannot be pickled: it is no longer registered in {self.namespace!r}. "
                "Pickle the op that is registered under its name."
            )
        return unpickled, (self.name, self.namespace)

    # Priority

    def get_priority(self) -> list[str]:
        """Return the providers in the current order of priority, native last."""
        return [str(entry) for entry in policy_for(self).priority]

    def set_default(self, providers: Sequence[str]) -> None:
        """Prefer *providers* in the whole process, unless a stronger source overrides it.

        An empty list removes an earlier default.

        Raises:
            UnknownProviderError: a provider is not registered.
        """
        entries = parse(providers, default_origin(self.name)) if providers else None
        self.check_providers(entries or ())
        self.settings.set_default(self.name, entries)

    def set_priority(self, providers: Sequence[str]) -> AbstractContextManager[None]:
        """Prefer *providers* inside a ``with`` block; see :func:`opweave.ir.priority`."""
        return _op_priority(self, providers)

    def using(self, *providers: str) -> CallSite:
        """Return a callable that runs the op with *providers* before every other priority.

        ``ir.ops.rms_norm.using("triton!")(x, weight, 1e-6)``. In a compiled graph, the names are
        part of the graph.

        Raises:
            UnknownProviderError: a provider is not registered.
            SettingError: no provider is given, or a name is malformed.
        """
        if torch_compat.is_dynamo_compiling():
            return TracedCallSite(self.torch_ops, ",".join(providers))  # type: ignore[return-value]
        entries = parse(providers, f"call site .using({', '.join(map(str, providers))})")
        site = self._call_sites.get(providers)
        if site is None:
            self.check_providers(entries)
            site = self._call_sites.setdefault(providers, CallSite(self.torch_ops, entries))
        return site

    # Calling

    def __getattr__(self, name: str) -> Any:
        if name == "maybe_inplace":
            raise errors.DonationError(
                f"{self.name} ({self.site}) was not declared with allow_inplace=True, so there is "
                "no maybe_inplace. Call the op itself."
            )
        return object.__getattribute__(self, name)  # keeps the AttributeError of a property

    def dispatch(self, *args: Any, **kwargs: Any) -> IrOpImpl:
        """Return the implementation that a call with these arguments would run."""
        return dispatched(self, (), *args, **kwargs)

    @property
    def dispatch_source(self) -> str:
        """The Python source of the generated eager fast path."""
        self._call.ensure_prepared()
        return self._call.source

    def _kernel_path(self, entries: Entries) -> Path:
        path = self._kernels.get(entries)
        return path or self._kernels.setdefault(entries, Path(self.torch_ops, Kind.KERNEL, entries))

    def prepare(self) -> None:
        """Generate the fast paths of ``op(...)`` and ``op.maybe_inplace(...)``."""
        for path in self._own_paths():
            path.ensure_prepared()

    def reset(self) -> None:
        """Discard every generated function after a change of registrations or settings."""
        with self.registry.lock:
            self.registry.version += 1
            sites = [path for site in list(self._call_sites.values()) for path in site.paths]
            for path in (*self._own_paths(), self._autograd, *self._kernels.values(), *sites):
                path.reset()

    def _own_paths(self) -> list[Path]:
        return [self._call, *([self.maybe_inplace.path] if self.allow_inplace else [])]


@contextmanager
def _op_priority(op: IrOp, providers: Sequence[str]) -> Iterator[None]:
    entries = parse(providers, f"scope {op.name}.set_priority(...)")
    op.check_providers(entries)
    with entered(Scope(current_scope(), priorities={op: entries})):
        yield


class Target(NamedTuple):
    """The meaning of a torch op in a graph."""

    op: IrOp
    donates: bool  # it is the maybe_inplace overload
    annotated: bool  # it carries the call-site settings as arguments


def find_target(torch_op: object) -> Target | None:
    """Return the IR op that *torch_op*, the target of a graph node, represents, if any."""
    ops = torch_ops_with(torch_op)
    if ops is None or not isinstance(ops.op, IrOp):
        return None
    return Target(ops.op, torch_op is ops.maybe_inplace, torch_op is ops.annotated)


# Registries of ops: torch namespace, settings and first-use hook.


_registries: WeakValueDictionary[str, Registry] = WeakValueDictionary()


class Registry:
    """A table of ops.

    Args:
        namespace: the namespace of its torch ops (``torch.ops.<namespace>``), unique per registry.

    Attributes:
        namespace: as given.
        library: the :class:`torch.library.Library` of that namespace.
        settings: its priorities and requirements.
        lock: held during changes.
        version: number of changes of registrations and settings so far.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        _registries[namespace] = self
        self.library: Library = torch_compat.new_library(namespace)
        self.settings = Settings(self._reset_ops, self.ensure_ready)
        self.lock = self.settings.lock
        self._ops: dict[str, IrOp] = {}
        self._hook: Callable[[Registry], None] | None = None
        self._load_plugins: Callable[[], None] = lambda: None
        self._ready, self._preparing = True, False
        self.version = 0

    def __repr__(self) -> str:
        return f"<Registry {self.namespace!r} of {len(self._ops)} ops>"

    @property
    def ops(self) -> Mapping[str, IrOp]:
        """The declared ops by name, as they are now: other threads may register more."""
        return MappingProxyType(self._ops.copy())

    def op(self, name: str) -> IrOp:
        """Return the op called *name*; plugins that are not loaded yet may declare it.

        Raises:
            UnknownOpError: it is not declared. PluginError: nor could every plugin be loaded.
        """
        if str(name) not in self._ops and not (self._ready or self._preparing):
            with torch_compat.no_transforms():
                self._load_plugins()
        try:
            return self._ops[str(name)]
        except KeyError:
            raise errors.UnknownOpError(
                f"unknown op {name!r}. {did_you_mean(name, self._ops)}"
            ) from None

    def add(self, op: IrOp, *, override: bool = False) -> IrOp:
        """Add *op* and define its torch ops; *override* replaces an op of the same name.

        Raises:
            DuplicateOpError: the name is taken.
        """
        with self.lock:
            former = self._ops.get(op.name)
            if former is not None:
                is_own = former.site.is_in_opweave
                if is_own or not override:
                    advice = (
                        "opweave's own ops cannot be replaced"
                        if is_own
                        else "In a notebook, declare it again with override=True"
                    )
                    raise errors.DuplicateOpError(
                        f"op {op.name!r} is declared already, at {former.site}; this is {op.site}. "
                        "Choose another name, or register an implementation of the existing op "
                        f"with @ir.ops.{op.name}.register_impl. {advice}."
                    )
                former.torch_ops.remove()  # torch does not allow redefinition
            op.define()
            restored = partial(self._define_again, op, former)
            transaction.enter(f"op {op.name}", self._ops, op.name, op, restored)
            if former is not None:
                self._reset_ops()
        return op

    def _define_again(self, op: IrOp, former: IrOp | None) -> None:
        with self.lock:
            op.torch_ops.remove()
            if former is not None:
                former.define()
            self._reset_ops()

    def on_first_use(
        self, hook: Callable[[Registry], None], load_plugins: Callable[[], None] = lambda: None
    ) -> None:
        """Run ``hook(self)`` once, before the first selection in this registry.

        The hook loads kernel libraries and settings, so that importing opweave loads nothing.
        *load_plugins* runs before it, and before an op is reported as unknown. If one of them
        raises, both run again at the next use.
        """
        self._hook, self._load_plugins, self._ready = hook, load_plugins, False

    def ensure_ready(self) -> None:
        """Run the first-use hook if it has not run; other threads wait for it."""
        if self._ready:
            return
        with torch_compat.no_transforms():  # loaded code must not depend on the caller's transforms
            is_first = self._make_ready()
        if is_first:
            self._warn_of_unknown_ops()

    def _make_ready(self) -> bool:
        """Run the hook unless another thread did; return whether it ran."""
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
        """Check the ops and providers in the settings.

        Raises:
            SettingError: a setting names an unknown op or provider.
        """
        self.ensure_ready()
        for name, origin in self.settings.configured_ops().items():
            try:
                op = self.op(name)
                for entries in self.settings.priorities(name, op.impls):
                    op.check_providers(entries)
            except errors.IrError as error:
                raise errors.SettingError(f"{origin}: {error}") from error

    def _warn_of_unknown_ops(self) -> None:
        # Not an error yet: a plugin or the program may declare the op later.
        for name, origin in self.settings.configured_ops().items():
            if name not in self._ops:
                warnings.warn(
                    f"{origin}: op {name!r} is not declared yet. {did_you_mean(name, self._ops)}",
                    errors.UnknownOpWarning,
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
    """Return the registry that declarations and lookups use."""
    return _current


def find_op(name: str) -> IrOp:
    """Return the op called *name* in the current registry; raise UnknownOpError without one."""
    return _current.op(name)


def unpickled(name: str, namespace: str) -> IrOp:
    """Return the op that a pickle refers to.

    Raises:
        UnknownOpError: it is not declared in this process.
    """
    registry = _registries.get(namespace)
    if registry is None:
        raise errors.UnknownOpError(
            f"unknown op {name!r} of the registry {namespace!r}, which does not exist here. "
            f"{did_you_mean(namespace, _registries)} Declare the op in a registry of that "
            "namespace (ir.isolated_registry(namespace)) before it is loaded."
        )
    return registry.op(name)


_fresh = itertools.count()


@contextmanager
def isolated_registry(namespace: str | None = None) -> Iterator[Registry]:
    """Use a new, empty registry inside the block; for tests and compatibility shims.

    Args:
        namespace: the namespace of its torch ops; by default a unique one.
    """
    global _current
    previous = _current
    _current = Registry(namespace or f"opweave_isolated_{next(_fresh)}")
    try:
        yield _current
    finally:
        _current = previous


@overload
def register_op(native: Function, /) -> IrOp: ...


@overload
def register_op(
    *,
    name: str | None = None,
    activations: Sequence[str] | None = None,
    allow_inplace: bool = False,
    composite: bool = False,
    native_traits: Iterable[str] = (),
    keeps_strides: Sequence[str] = (),
    autocast: bool = True,
    override: bool = False,
) -> Callable[[Function], IrOp]: ...


def register_op(
    native: Function | None = None,
    /,
    *,
    name: str | None = None,
    activations: Sequence[str] | None = None,
    allow_inplace: bool = False,
    composite: bool = False,
    native_traits: Iterable[str] = (),
    keeps_strides: Sequence[str] = (),
    autocast: bool = True,
    override: bool = False,
) -> IrOp | Callable[[Function], IrOp]:
    """Declare an op with the decorated PyTorch function as its native implementation.

    The native function defines the op's values, shapes, strides and dtypes. It runs if no kernel
    supports a call, and kernels are tested against it. Use the decorator bare or with options.

    Args:
        name: the op's name; by default the function's.
        activations: the tensor parameters that ``maybe_inplace`` donates; by default those whose
            names start with ``x``.
        allow_inplace: whether the op has ``maybe_inplace``. Needs as many activations as outputs.
        composite: the native implementation is written in other IR ops, so that the compiler can
            recognize it in a graph.
        native_traits: promises of the native implementation, besides ``differentiable``.
        keeps_strides: activations, such as a cache, whose output has the strides of the input,
            gaps included (contiguous if elements overlap). Kernels may reuse them in any layout;
            other activations are reused only if they are contiguous.
        autocast: whether ``torch.autocast`` applies to the operators of the native implementation;
            kernels are then rejected under it. False for an op that is computed in dtypes of its
            own, such as float32: native and kernels run with autocast disabled.
        override: replace an earlier op of the same name and its implementations, for example when
            a notebook cell runs again.

    Raises:
        InvalidNameError: the name is not a valid name for an op.
        InvalidOpError: the function's signature cannot be an op's.
        DuplicateOpError: the registry already has an op of that name.
        UnknownTraitError: a trait does not exist.
    """

    def decorate(function: Function) -> IrOp:
        op = IrOp(
            function,
            _current,
            name=name,
            activations=activations,
            allow_inplace=allow_inplace,
            composite=composite,
            native_traits=native_traits,
            keeps_strides=keeps_strides,
            autocast=autocast,
        )
        return _current.add(op, override=override)

    return decorate if native is None else decorate(native)


# ``ir.priority``: priorities for a block of code, by op name.


@contextmanager
def priority(
    priorities: Mapping[str, str | Iterable[str]] | None = None, /, **by_op: str | Iterable[str]
) -> Iterator[None]:
    """Prefer these providers inside the block, in this thread or asyncio task only.

    Takes a mapping, keywords, or both: ``with ir.priority(rms_norm=["triton", "opweave_c"]): ...``.
    Scopes nest; the inner list comes before the outer one. Names refer to the current registry.

    Raises:
        UnknownOpError, UnknownProviderError: a name is not registered.
        SettingError: a list is malformed.
    """
    if priorities is not None and not isinstance(priorities, Mapping):
        raise errors.SettingError(
            "ir.priority takes priority lists by op name, such as "
            f"ir.priority(rms_norm=['native']), not {priorities!r}."
        )
    lists: dict[Hashable, Entries] = {}
    for name, names in {**(priorities or {}), **by_op}.items():
        op, entries = current_registry().op(name), parse(names, f"scope ir.priority({name}=...)")
        op.check_providers(entries)
        lists[op] = entries
    with entered(Scope(current_scope(), priorities=lists)):
        yield


left_to_python("ir.priority", priority)
left_to_python("op.set_priority", _op_priority)
