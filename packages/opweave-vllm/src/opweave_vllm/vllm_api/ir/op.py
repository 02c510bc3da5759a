"""vLLM's interface of ops and implementations: opweave's objects with vLLM's names and errors."""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from operator import attrgetter
from typing import Any, ClassVar, overload

import torch

from opweave import ir, torch_compat, transaction
from opweave.ir import RESERVED_PROVIDERS, errors
from opweave.ir.codegen import functional
from opweave.ir.donation import refused
from opweave.ir.priority import ALWAYS_LAST, NATIVE, PriorityEntry, parse
from opweave.ir.selection import needs_gradient
from opweave.registration import Site
from opweave_vllm.vllm_api.ir.torch_wrap import torch_wrap_enabled

__all__ = ["RESERVED_PROVIDERS", "IrOp", "IrOpImpl", "IrOpInplaceOverload", "register_op"]

REGISTERS_FOR_CALLER = True  # see opweave.registration

_log = logging.getLogger(__name__)
_unregistered = itertools.count()  # numbers of ops outside the registry

Function = Callable[..., Any]


_BUILT_IN: dict[type[errors.IrError], type[Exception]] = {
    errors.DonationError: AssertionError,
    errors.DuplicateImplError: AssertionError,
    errors.DuplicateOpError: AssertionError,
    errors.InvalidNameError: AssertionError,
    errors.InvalidOpError: AssertionError,
    errors.MissingInputGeneratorError: RuntimeError,
    errors.MissingToleranceError: ValueError,
    errors.UnknownProviderError: AssertionError,
}

_ERROR_TYPES: dict[type, type[Exception]] = {
    kind: type(kind.__name__, (kind, built_in), {"__doc__": kind.__doc__})
    for kind, built_in in _BUILT_IN.items()
}


@contextmanager
def as_in_vllm() -> Iterator[None]:
    """Convert errors of the block so that ``except`` with vLLM's built-in class catches them."""
    try:
        yield
    except tuple(_BUILT_IN) as error:
        if type(error) not in _ERROR_TYPES:  # already converted
            raise
        raise _ERROR_TYPES[type(error)](*error.args) from error


def _delegated(name: str, doc: str) -> Any:
    """Return a property that reads *name* of the wrapped object."""
    return property(attrgetter(f"wrapped.{name}"), doc=doc)


class Registry(Mapping[str, "IrOp"]):
    """The ops of opweave's current registry, by name."""

    def __getitem__(self, name: str) -> IrOp:
        return wrapper_of(ir.current_registry().ops[name])

    def __iter__(self) -> Iterator[str]:
        return iter(ir.current_registry().ops)

    def __len__(self) -> int:
        return len(ir.current_registry().ops)


class IrOp:
    """An op; *wrapped* is opweave's object, which does the work.

    Created by :func:`register_op`. An op that is constructed directly is not registered, as in
    vLLM, and has a torch namespace of its own.
    """

    registry: ClassVar[Mapping[str, IrOp]] = Registry()

    def __init__(
        self,
        name: str,
        native_impl: Function,
        activations: Sequence[str] | None = None,
        allow_inplace: bool = False,
    ) -> None:
        registry = ir.Registry(f"opweave_vllm_api_{next(_unregistered)}")
        with as_in_vllm():
            op = ir.IrOp(
                native_impl,
                registry,
                name=name,
                activations=activations,
                allow_inplace=allow_inplace,
            )
            self._wrap(registry.add(op))

    def _wrap(self, wrapped: ir.IrOp) -> None:
        self.wrapped, self.name = wrapped, wrapped.name
        self._impls: dict[ir.IrOpImpl, IrOpImpl] = {}
        self._warned: set[str] = set()
        self._called = False
        if wrapped.allow_inplace:
            self.maybe_inplace = IrOpInplaceOverload(self)
        vars(wrapped)["vllm_api"] = self  # one wrapper per op, with the same lifetime

    def __repr__(self) -> str:
        return f"IrOp({self.name!r})"

    def __str__(self) -> str:
        _, separator, summary = str(self.wrapped).partition(": ")
        return f"{self!r}: {summary}" if separator else repr(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return wrapper_of, (self.wrapped,)

    def __getattr__(self, name: str) -> Any:
        if name == "maybe_inplace":
            return self.wrapped.maybe_inplace  # raises DonationError
        return object.__getattribute__(self, name)  # keeps the AttributeError of a property

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch_compat.is_dynamo_compiling():
            return self.wrapped(*args, **kwargs)
        if not self._called:
            self._called = True
            self._warn_if_unset()
        if torch_wrap_enabled():
            return self.wrapped(*args, **kwargs)
        return functional(self.dispatch(*args, **kwargs).wrapped)(*args, **kwargs)

    torch_op = _delegated("torch_op", "The torch op that represents the op in graphs.")
    native_fn = _delegated("native", "The function that the op was declared with.")
    allow_inplace = _delegated("allow_inplace", "Whether the op has ``maybe_inplace``.")
    activation_indices = _delegated("activation_indices", "The indices of the activations.")
    has_input_generator = _delegated("has_input_generator", "Whether it can generate inputs.")
    _schema_str = _delegated("schema.torch", "The schema in torch's notation.")

    @property
    def activations(self) -> list[str]:
        """The parameters that ``maybe_inplace`` donates."""
        return list(self.wrapped.activations)

    @property
    def _registration_stack(self) -> list[str]:
        return _registration_stack(self.wrapped.site)

    # Implementations

    @property
    def impls(self) -> Implementations:
        """Every registered implementation by provider, native first; ``del`` removes one."""
        return Implementations(self)

    def register_impl(
        self,
        provider: str,
        *,
        supported: bool = True,
        supports_args: Callable[..., bool] | None = None,
        inplace: bool = False,
    ) -> Callable[[Function], IrOpImpl]:
        """Register the decorated function as an implementation, and replace it by that.

        Raises:
            AssertionError: the provider is reserved, malformed or taken, or the op does not allow
                ``inplace``.
            ValueError: the schema of the function or the predicate differs from the op's.
        """
        with as_in_vllm():
            decorate = self.wrapped.register_impl(
                provider, supported=supported, supports_args=supports_args, inplace=inplace
            )

        def register(function: Function) -> IrOpImpl:
            with as_in_vllm():
                if supports_args is not None:
                    _check_signature(self, supports_args)
                decorate(function)
            # Not self.impls, which loads all kernels; plugins register before that.
            return self._impl(self.wrapped._impls[provider])

        return register

    def supported_providers(self) -> list[str]:
        """Return the providers that can run on this system."""
        return self.wrapped.supported_providers()

    def dispatch(self, *args: Any, **kwargs: Any) -> IrOpImpl:
        """Return the implementation that a call with these arguments would run."""
        self._warn_if_unset()
        return self._impl(self.wrapped.dispatch(*args, **kwargs))

    def _impl(self, impl: ir.IrOpImpl) -> IrOpImpl:
        return self._impls.setdefault(impl, IrOpImpl(self, impl))

    # Priority

    def get_priority(self) -> list[str]:
        """Return the providers that can be selected, in order; [] if no priority is set."""
        entries = ir.policy_for(self.wrapped).priority
        chosen = [entry for entry in entries if entry.origin != ALWAYS_LAST]
        return self._complete(chosen) if chosen else []

    def set_priority(self, priority: Sequence[str]) -> AbstractContextManager[None]:
        """Prefer these providers inside a ``with`` block, before those of enclosing blocks.

        Raises:
            AssertionError: a provider is not registered.
        """
        with as_in_vllm():
            return self.wrapped.set_priority(self._checked(priority, "set_priority(...)"))

    def set_default(self, priority: Sequence[str]) -> None:
        """Prefer these providers in the whole process, unless a stronger source overrides them.

        Raises:
            AssertionError: a provider is not registered.
        """
        with as_in_vllm():
            self.wrapped.set_default(self._checked(priority, "set_default(...)"))

    def _checked(self, priority: Sequence[str], origin: str) -> list[str]:
        """Return the reachable providers, including native if the others may reject arguments."""
        entries = parse(priority, origin) if priority else ()
        self.wrapped.check_providers(entries)
        complete = self._complete(entries)
        if complete[-1] == NATIVE and NATIVE not in priority:
            self._warn(
                "Op %s: no provider of the priority supports all arguments, so native may run. "
                "If a fallback to native is intended, put 'native' last."
            )
        return complete

    def _complete(self, entries: Sequence[PriorityEntry]) -> list[str]:
        """Return the reachable providers: up to the first that supports all arguments."""
        providers: list[str] = []
        for entry in entries:
            impl = self.wrapped.impls[entry.provider]
            if impl.supported or entry.strict:
                providers.append(str(entry))
            if impl.supported and impl.supports_all_args:
                return providers
        return [*providers, NATIVE]

    def _warn_if_unset(self) -> None:
        if not self.get_priority():
            self._warn("Op %s: priority not set; the native implementation is used.")

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _log.warning(message, self.name)

    # Fake, inputs and tolerances

    def register_fake(self, fn: Function) -> Function:
        """Use *fn* for shapes and dtypes of fake tensors."""
        return self.wrapped.register_fake(fn)

    def register_input_generator(self, fn: Callable[..., tuple[Any, ...]]) -> Any:
        """Register a function that makes arguments for tests."""
        return self.wrapped.register_input_generator(fn)

    def generate_inputs(self, **kwargs: Any) -> tuple[Any, ...]:
        """Make arguments; raise RuntimeError without a generator."""
        with as_in_vllm():
            return self.wrapped.generate_inputs(**kwargs)

    def override_tolerance(self, dtype: torch.dtype, *, atol: float, rtol: float) -> None:
        """Set the tolerance for comparing implementations with native in *dtype*."""
        self.wrapped.override_tolerance(dtype, atol=atol, rtol=rtol)

    def get_tolerance(self, dtype: torch.dtype) -> dict[str, float]:
        """Return ``{"atol": ..., "rtol": ...}``; raise ValueError for an unknown dtype."""
        with as_in_vllm():
            return self.wrapped.get_tolerance(dtype)._asdict()


class IrOpImpl:
    """An implementation of an op; *wrapped* is opweave's object."""

    def __init__(self, op: IrOp, wrapped: ir.IrOpImpl) -> None:
        self.op, self.wrapped = op, wrapped

    def __repr__(self) -> str:
        return f"IrOpImpl({self.op.name!r}, {self.provider!r})"

    provider = _delegated("provider", "The provider of the kernel.")
    impl_fn = _delegated("impl_fn", "The registered function.")
    supported = _delegated("supported", "Whether it can run on this system.")
    inplace = _delegated("inplace", "Whether it may write into the op's activations.")
    supports_all_args = _delegated("supports_all_args", "Whether there is no predicate.")

    def supports_args(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the predicate accepts these arguments."""
        return self.wrapped.rejection(self.op.wrapped.bind(*args, **kwargs)) is None

    def uuid(self) -> str:
        """Return a digest of the source files of the kernel and its predicate."""
        return self.wrapped.uuid()

    @property
    def _registration_stack(self) -> list[str]:
        return _registration_stack(self.wrapped.site)


class Implementations(Mapping[str, IrOpImpl]):
    """The implementations of an op by provider, native first."""

    def __init__(self, op: IrOp) -> None:
        self._op = op

    def __getitem__(self, provider: str) -> IrOpImpl:
        return self._op._impl(self._op.wrapped.impls[provider])

    def __iter__(self) -> Iterator[str]:
        return iter(self._op.wrapped.impls)

    def __len__(self) -> int:
        return len(self._op.wrapped.impls)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __delitem__(self, provider: str) -> None:
        """Remove an implementation.

        Raises:
            KeyError: the op has none of this provider, or it is the native one.
        """
        if provider not in self or provider == NATIVE:
            raise KeyError(provider)
        op = self._op.wrapped
        transaction.enter(
            f"removal of {op.name}:{provider}", op._groups, provider, None, op._use_groups
        )
        op._use_groups()


class IrOpInplaceOverload:
    """``op.maybe_inplace``: call the op and donate its activations."""

    def __init__(self, op: IrOp) -> None:
        self.op, self.name = op, f"{op.name}.maybe_inplace"

    @property
    def torch_op(self) -> Function:
        """The torch op that represents a donating call in graphs."""
        return self.op.wrapped.torch_ops.for_call((), donates=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        op = self.op.wrapped
        if torch_compat.is_dynamo_compiling() or torch_wrap_enabled():
            return op.maybe_inplace(*args, **kwargs)
        if _must_copy(op, args, kwargs):
            return self.op(*args, **kwargs)
        return self.op.dispatch(*args, **kwargs).impl_fn(*args, **kwargs)


def _registration_stack(site: Site) -> list[str]:
    r"""Return the site of a registration in the format of :func:`traceback.format_stack`.

    >>> _registration_stack(Site("nowhere.py", 3))
    ['  File "nowhere.py", line 3, in <registration>\n']
    """
    return traceback.format_list([traceback.FrameSummary(site.file, site.line, "<registration>")])


def _check_signature(op: IrOp, predicate: Callable[..., bool]) -> None:
    """Raise PredicateSignatureError unless *predicate* has all parameters of the op, as in vLLM."""
    if problem := _signature_problem(predicate, op.native_fn):
        raise errors.PredicateSignatureError(f"{op.name}: supports_args{problem}.")


def _signature_problem(predicate: Callable[..., bool], native: Function) -> str:
    if not callable(predicate):
        return f" must be a callable, not {predicate!r}"
    parameters = list(signature(predicate).parameters.values())
    expected = list(signature(native).parameters.values())
    if any(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters):
        return " must not have keyword-only parameters"
    if len(parameters) != len(expected):
        return (
            f": the number of parameters is {len(parameters)}; it must take all parameters of the "
            f"op, {[parameter.name for parameter in expected]}"
        )
    for parameter, other in zip(parameters, expected, strict=True):
        name, default = parameter.name, parameter.default
        if name != other.name:
            return f": {name!r} does not match native parameter {other.name!r}"
        if default is not parameter.empty and (default,) != (other.default,):
            return f": {name}={default!r} does not match native default {other.default!r}"
    return ""


def _must_copy(op: ir.IrOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a donating call must not write to its activations (gradients, shared memory)."""
    values = op.bind(*args, **kwargs)
    return needs_gradient(values) or bool(refused(op, values))


def wrapper_of(op: ir.IrOp) -> IrOp:
    """Return the unique ``IrOp`` that wraps opweave's *op*."""
    wrapper: IrOp | None = vars(op).get("vllm_api")
    if wrapper is None:
        wrapper = IrOp.__new__(IrOp)
        wrapper._wrap(op)
    return wrapper


@overload
def register_op(f: Function, /) -> IrOp: ...


@overload
def register_op(
    *,
    name: str | None = None,
    activations: Sequence[str] | None = None,
    allow_inplace: bool = False,
) -> Callable[[Function], IrOp]: ...


def register_op(
    f: Function | None = None,
    /,
    *,
    name: str | None = None,
    activations: Sequence[str] | None = None,
    allow_inplace: bool = False,
) -> IrOp | Callable[[Function], IrOp]:
    """Declare an op with the decorated function as its native implementation.

    Raises:
        AssertionError: the name is taken or malformed, or the function cannot be an op.
    """

    def decorate(function: Function) -> IrOp:
        with as_in_vllm():
            declare = ir.register_op(
                name=name, activations=activations, allow_inplace=allow_inplace
            )
            return wrapper_of(declare(function))

    return decorate if f is None else decorate(f)


def __getattr__(name: str) -> Any:
    if name == "vllm_ir_torch_lib":
        return ir.current_registry().library
    if name == "_ENABLE_TORCH_WRAP":
        return torch_wrap_enabled()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
