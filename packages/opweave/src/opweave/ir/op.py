"""The handle of an op, :class:`IrOp`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from opweave import torch_compat, transaction
from opweave.ir import scope
from opweave.ir.codegen import Function, Kind
from opweave.ir.dispatch import Callee, CallSite, IrOpInplaceOverload, Path, TracedCallSite
from opweave.ir.errors import (
    DonationError,
    DuplicateImplError,
    MissingInputGeneratorError,
    MissingToleranceError,
    UnknownProviderError,
    did_you_mean,
)
from opweave.ir.impl import IrOpImpl, check_options
from opweave.ir.priority import NATIVE, Entries, Tunable, parse, variants
from opweave.ir.rules import Predicate, check_traits
from opweave.ir.schema import check_is_not_ours, check_provider_name, check_same
from opweave.ir.scope import op_priority
from opweave.ir.selection import needs_gradient, policy_for, select_here
from opweave.ir.spec import DEFAULT_TOLERANCES, OpSpec, Spelling, Tolerance
from opweave.ir.torch_ops import TorchOps
from opweave.registration import caller_site

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from opweave.ir.registry import Registry


class IrOp(Callee):
    """A functional operation: a name, a schema, a native implementation, and kernels for it.

    Created by :func:`opweave.ir.register_op`. Call it like the function it was declared with. Use
    :func:`opweave.ir.explain` to see which implementation a call runs.

    Attributes:
        spec: the immutable declaration; most of its fields are also attributes of the op.
        registry: the registry of the op, with its settings.
    """

    maybe_inplace: IrOpInplaceOverload  # only with allow_inplace=True

    def __init__(self, native: Function, registry: Registry, **options: Any) -> None:
        """Create an op without registering it.

        Args:
            native: the function that defines it.
            registry: the registry that it will belong to.
            options: the options of :meth:`OpSpec.of`.
        """
        self.spec = spec = OpSpec.of(native, **options)
        self.registry = registry
        # Plain attributes: generated code and Dynamo read them without calling a property.
        self.name, self.native, self.schema = spec.name, spec.native, spec.schema
        self.activations, self.keeps_strides = spec.activations, spec.keeps_strides
        self.allow_inplace, self.composite = spec.allow_inplace, spec.composite
        self.autocast = spec.autocast
        self.site, self.owner = spec.site, spec.owner
        self.fake: Function = native
        traits = spec.native_traits
        self._impls = {NATIVE: IrOpImpl(self, NATIVE, native, traits=traits, site=self.site)}
        # By provider; several implementations where the function has tunable parameters.
        self._groups: dict[str, Sequence[IrOpImpl]] = {NATIVE: [self._impls[NATIVE]]}
        self._tolerances = dict(DEFAULT_TOLERANCES)
        self._input_generator: Callable[..., tuple[Any, ...]] | None = None
        self.spellings: tuple[Spelling, ...] = ()

    def define(self) -> None:
        """Define the torch ops and the call paths; called when the op enters its registry."""
        self._kernels: dict[Entries, Path] = {(): Path(self, Kind.KERNEL)}
        self.torch_ops = TorchOps(self, self.registry.namespace)
        self.torch_op = self.torch_ops.default
        self._call = Path(self, Kind.CALL, callee=self)
        if self.allow_inplace:
            self.maybe_inplace = IrOpInplaceOverload(self)
        self._call_sites: dict[tuple[str, ...], CallSite] = {}  # grows without the lock

    def __repr__(self) -> str:
        return f"<IrOp {self.name}{inspect.signature(self.native)} from {self.site}>"

    def __str__(self) -> str:
        """The op's name and the first line of its docstring."""
        lines = (inspect.getdoc(self.native) or "").splitlines()
        return f"{self.name}: {lines[0]}" if lines else self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return self.registry.reduce(self)

    # Implementations

    @property
    def impls(self) -> Mapping[str, IrOpImpl]:
        """Every registered implementation by provider, native first."""
        self.registry.ensure_ready()
        return MappingProxyType(self._impls)

    def register_impl(
        self,
        provider: str,
        *,
        supported: bool = True,
        unsupported_reason: str | None = None,
        supports_args: Predicate | None = None,
        inplace: bool = False,
        functional: Function | None = None,
        traits: Iterable[str] = (),
        tunable: Tunable | None = None,
        override: bool = False,
    ) -> Callable[[Function], Function]:
        """Register the decorated function as an implementation of this op.

        Args:
            provider: who wrote the kernel; unique for the op, ``[a-z_][a-z0-9_]*``.
            supported: whether it can run on this system (library installed, device present).
            unsupported_reason: why it cannot, for error messages and ``explain``.
            supports_args: the supported arguments: a rule of :mod:`opweave.ir.rules`, or a
                function that returns bool and takes some of the op's parameters by name. None
                means all arguments.
            inplace: it may write its outputs into the op's activations and return those. Other
                implementations must return new memory.
            functional: an out-of-place form of an in-place kernel, for calls that do not donate.
                Without it, such calls copy the activations.
            traits: its promises, see :mod:`opweave.ir.rules`.
            tunable: values of keyword-only parameters of the function, such as
                ``{"block": (64, 128)}``. Each combination becomes an implementation
                ``provider[block=64]``, which ``opweave tune`` measures; *provider* alone has the
                defaults of the function.
            override: replace an earlier implementation from the same provider, for example when
                a notebook cell runs again.

        Raises:
            InvalidNameError: the provider's name is ill-formed, reserved, or opweave's own.
            DuplicateImplError: the provider is registered for this op already.
            SchemaMismatchError: the function's signature differs from the op's.
            PredicateSignatureError: the predicate's parameters do not fit the op's.
            InvalidOpError: ``inplace=True`` on an op without activations that match its outputs, or
                *tunable* does not fit the function.
            UnknownTraitError: a trait does not exist.
        """
        check_provider_name(provider)
        check_options(self, inplace=inplace, functional=functional, supported=supported)

        def decorate(function: Function) -> Function:
            check_is_not_ours(provider, self.native, function)
            made = [
                IrOpImpl(
                    self,
                    name,
                    variant,
                    supported=supported,
                    unsupported_reason=unsupported_reason or "not supported on this system",
                    supports_args=supports_args,
                    inplace=inplace,
                    functional_fn=functional,
                    traits=check_traits(traits),
                    tunable=tunable or {},
                    site=caller_site(),
                )
                for name, variant in variants(self.name, provider, function, tunable or {})
            ]
            if (first := self._impls.get(provider)) is not None and not override:
                by = "" if first.owner is None else f" by the plugin {first.owner}"
                raise DuplicateImplError(
                    f"{self.name}: provider {provider!r} is registered already{by}, at "
                    f"{first.site}; this is {made[0].site}. Use another name, or override=True."
                )
            label = f"implementation {self.name}:{provider}"
            transaction.enter(label, self._groups, provider, made, self._use_groups)
            self._use_groups()
            return function

        return decorate

    def _use_groups(self) -> None:
        self._impls = {impl.provider: impl for group in self._groups.values() for impl in group}
        self.reset()

    def supported_providers(self) -> list[str]:
        """Return the providers that can run on this system."""
        return [name for name, impl in self.impls.items() if impl.supported]

    def check_providers(self, entries: Entries) -> None:
        """Raise UnknownProviderError if an entry names no implementation of this op."""
        for entry in entries:
            if entry.provider not in self.impls:
                raise UnknownProviderError(
                    f"{self.name}: unknown provider {entry.provider!r} ({entry.origin}). "
                    f"{did_you_mean(entry.provider, self.impls)}"
                )

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
        entries = parse(providers, scope.default_origin(self.name)) if providers else None
        self.check_providers(entries or ())
        self.registry.settings.set_default(self.name, entries)

    def set_priority(self, providers: Sequence[str]) -> AbstractContextManager[None]:
        """Prefer *providers* inside a ``with`` block; see :func:`opweave.ir.priority`."""
        return op_priority(self, providers)

    def using(self, *providers: str) -> CallSite:
        """Return a callable that runs the op with *providers* before every other priority.

        ``ir.ops.rms_norm.using("triton!")(x, weight, 1e-6)``. In a compiled graph, the names are
        part of the graph.

        Raises:
            UnknownProviderError: a provider is not registered.
            SettingError: no provider is given, or a name is malformed.
        """
        if torch_compat.is_dynamo_compiling():
            return TracedCallSite(self, ",".join(providers))  # type: ignore[return-value]
        entries = parse(providers, f"call site .using({', '.join(map(str, providers))})")
        found = self._call_sites.get(providers)
        if found is None:
            self.check_providers(entries)
            found = self._call_sites.setdefault(providers, CallSite(self, entries))
        return found

    # Calling

    def __getattr__(self, name: str) -> Any:
        if name == "maybe_inplace":
            raise DonationError(
                f"{self.name} ({self.site}) was not declared with allow_inplace=True, so there is "
                "no maybe_inplace. Call the op itself."
            )
        return object.__getattribute__(self, name)  # keeps the AttributeError of a property

    def dispatch(self, *args: Any, **kwargs: Any) -> IrOpImpl:
        """Return the implementation that a call with these arguments would run."""
        return self.dispatch_at((), *args, **kwargs)

    def dispatch_at(self, entries: Entries, *args: Any, **kwargs: Any) -> IrOpImpl:
        """Return the implementation that a call would run at a call site with *entries*."""
        values = self.bind(*args, **kwargs)
        policy = policy_for(self, entries, differentiable=needs_gradient(values))
        return select_here(self, values, policy).impl

    def bind(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return one value per parameter, defaults filled in; raise TypeError as a call would."""
        return self._binder(*args, **kwargs)

    @cached_property
    def _binder(self) -> Callable[..., tuple[Any, ...]]:
        return self.schema.binder(self.name)

    @property
    def activation_indices(self) -> list[int]:
        """The positions of the activations among the parameters."""
        return [i for i, name in enumerate(self.schema.names) if name in self.activations]

    @property
    def dispatch_source(self) -> str:
        """The Python source of the generated eager fast path."""
        self.ensure_prepared(self._call)
        return self._call.source

    def kernel_path(self, entries: Entries) -> Path:
        """Return the path that the torch op's kernel runs for a call-site priority."""
        known = self._kernels.get(entries)
        return known or self._kernels.setdefault(entries, Path(self, Kind.KERNEL, entries))

    def ensure_prepared(self, path: Path) -> bool:
        """Generate the path's function unless it exists; return whether it was generated."""
        self.registry.ensure_ready()
        with self.registry.lock:
            if path.prepared:
                return False
            path.prepare()
            return True

    def reset(self) -> None:
        """Discard every generated function after a change of registrations or settings."""
        with self.registry.lock:
            self.registry.version += 1
            sites = [path for site in list(self._call_sites.values()) for path in site.paths]
            for path in (*self.own_paths(), *self._kernels.values(), *sites):
                path.reset()

    def own_paths(self) -> list[Path]:
        """Return the paths of ``op(...)`` and, if there is one, ``op.maybe_inplace(...)``."""
        return [self._call, *([self.maybe_inplace.path] if self.allow_inplace else [])]

    # Fake, inputs and tolerances

    def register_fake(self, function: Function) -> Function:
        """Use *function* instead of native for shapes, strides and dtypes of fake tensors."""
        check_same(self.native, function, f"{self.name!r}: fake implementation")
        self.fake = function
        return function

    def register_input_generator(self, function: Callable[..., tuple[Any, ...]]) -> Any:
        """Register a function that makes arguments for tests and benchmarks.

        It takes keyword arguments that all have defaults, including ``num_tokens`` and ``dtype``,
        and returns one value per parameter of the op.
        """
        self._input_generator = function
        return function

    @property
    def has_input_generator(self) -> bool:
        """Whether a function that makes arguments is registered."""
        return self._input_generator is not None

    @property
    def input_generator(self) -> Callable[..., tuple[Any, ...]]:
        """The function that makes arguments.

        Raises:
            MissingInputGeneratorError: none is registered.
        """
        if self._input_generator is None:
            raise MissingInputGeneratorError(
                f"No input generator for {self.name}: register one with "
                f"@ir.ops.{self.name}.register_input_generator."
            )
        return self._input_generator

    def generate_inputs(self, **options: Any) -> tuple[Any, ...]:
        """Make arguments for the op.

        Raises:
            MissingInputGeneratorError: none is registered.
        """
        return self.input_generator(**options)

    def register_spelling(self, **options: Any) -> Callable[[Function], Function]:
        """Let the compiler recognize this op in what the decorated function traces to.

        The function takes the op's parameters and computes the same in plain PyTorch; *options*
        are the fields of :class:`opweave.ir.spec.Spelling`.

        Raises:
            SchemaMismatchError: the function's signature differs from the op's.
        """

        def decorate(function: Function) -> Function:
            spelling = Spelling(function.__name__, function, **options)
            check_same(self.native, function, f"{self.name!r}: spelling {spelling.name!r}")
            self.spellings = (*self.spellings, spelling)
            return function

        return decorate

    def override_tolerance(self, dtype: torch.dtype, *, atol: float, rtol: float) -> None:
        """Set the tolerance for comparing implementations with native in *dtype*."""
        self._tolerances[dtype] = Tolerance(atol, rtol)

    def get_tolerance(self, dtype: torch.dtype) -> Tolerance:
        """Return the tolerance for comparing implementations with native in *dtype*.

        Raises:
            MissingToleranceError: none is defined for the dtype.
        """
        try:
            return self._tolerances[dtype]
        except KeyError:
            raise MissingToleranceError(
                f"No tolerance defined for {dtype} of {self.name}. Known: "
                f"{', '.join(map(str, self._tolerances))}. Set one with override_tolerance."
            ) from None
