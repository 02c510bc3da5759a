"""The definition of an op: its declaration, its implementations and their properties.

:class:`OpDefinition` is all of an :class:`opweave.ir.IrOp` except its calls.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opweave import torch_compat, transaction
from opweave.ir import errors, rules
from opweave.ir.errors import described, did_you_mean
from opweave.ir.priority import NATIVE, Entries, Tunable, base_of, variants, without_values
from opweave.ir.schema import (
    Function,
    Schema,
    check_is_not_ours,
    check_op_name,
    check_provider_name,
    check_same,
)
from opweave.ir.scope import Settings
from opweave.ir.tolerance import DEFAULT_TOLERANCES, Tolerance
from opweave.registration import Owner, Site, caller_site, current_owner, way_out

# Spellings: plain PyTorch code that computes the same as an op.


# Below this size, Inductor's fused row-wise code is often as fast as a kernel, because a call of a
# kernel costs about 3 us.
ROWWISE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Spelling:
    """A function in plain PyTorch that computes the same as an op.

    The compiler recognizes the operators that the function traces to, and replaces them with a call
    of the op.

    Attributes:
        name: the function's name.
        function: the function; it has the op's parameters.
        call: a function with the same parameters that calls the op; None: call the op with the
            arguments unchanged.
        inputs: returns arguments to trace the function with; by default the op's input generator.
        marker: the name of an aten operator that is in every trace of the function. Graphs without
            it are not searched. Empty: search all graphs.
        constants: the parameters that must be inputs of the graph, such as weights.
        elements: the minimum size of the first argument, in elements, for which a kernel is faster
            than generated code. Code whose first argument may be smaller is not replaced.
    """

    name: str
    function: Callable[..., Any]
    call: Callable[..., Any] | None = None
    inputs: Callable[..., tuple[Any, ...]] | None = None
    marker: str = ""
    constants: tuple[str, ...] = ()
    elements: int = 0


# Implementations.


_editions: Counter[tuple[str, str, str]] = Counter()


@dataclass(frozen=True, eq=False)
class IrOpImpl:
    """A kernel for *op*.

    Attributes:
        op: the op it implements.
        provider: name of the kernel's library or backend (``"opweave_c"``, ``"triton"``), the same
            on all devices.
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

    op: OpDefinition
    provider: str
    impl_fn: Callable[..., Any]
    _: KW_ONLY
    traits: frozenset[str]
    site: Site
    owner: Owner | None = field(default_factory=current_owner)
    supported: bool = True
    unsupported_reason: str = ""
    supports_args: rules.Predicate | None = None
    inplace: bool = False
    functional_fn: Callable[..., Any] | None = None
    tunable: Tunable = field(default_factory=dict)
    edition: int = field(init=False)

    def __post_init__(self) -> None:
        native, name = self.op.native, f"{self.op.name!r}: implementation {self.provider!r}"
        check_same(native, self.impl_fn, f"{name} ({self.site})", self.tunable)
        if self.functional_fn is not None:
            check_same(native, self.functional_fn, f"{name}, functional= ({self.site})")
        if self.supports_args is not None:
            rules.check_predicate(self.supports_args, self.op.schema, name)
        key = (self.op.namespace, self.op.name, self.provider)
        object.__setattr__(self, "edition", _editions[key])
        _editions[key] += 1

    def __repr__(self) -> str:
        return f"<IrOpImpl {self.op.name}:{self.provider} from {self.site}>"

    @property
    def plain_fn(self) -> Callable[..., Any]:
        """``impl_fn`` for plain calls (:mod:`opweave.plain_call`): skips its own torch op."""
        function: Callable[..., Any] = getattr(self.impl_fn, "undispatched", self.impl_fn)
        return function

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
    def accepts(self) -> Callable[..., bool]:
        """The predicate as a function of the op's parameters."""
        predicate = self.supports_args
        if predicate is None:
            return lambda *args, **kwargs: True
        if isinstance(predicate, rules.Rule):
            return rules.evaluator(predicate, self.op.schema)
        return self.op.schema.function(
            f"_predicate({rules.named_call(predicate)})", _predicate=predicate
        )

    def rejection(self, values: Sequence[Any]) -> str | None:
        """Return why the predicate rejects *values* (one per parameter), or None if it accepts.

        Raises:
            PredicateFailedError: the predicate itself raised.
        """
        args, kwargs = self.op.schema.split(values)
        try:
            answer: object = self.accepts(*args, **kwargs)
            if not isinstance(answer, (bool, torch.SymBool)):
                raise TypeError(f"it returned {answer!r}")
            if answer:
                return None
        except Exception as error:
            if torch_compat.depends_on_data(error):
                return "its predicate reads a data-dependent size"
            layouts = [t.layout for t in values if isinstance(t, Tensor)]
            unusual = next((layout for layout in layouts if layout is not torch.strided), None)
            if unusual is not None and isinstance(self.supports_args, rules.Rule):
                return f"a tensor has the layout {unusual} (supports strided)"
            raise errors.PredicateFailedError(
                f"{self.op.name}: the predicate of provider {self.provider!r} ({self.place}) "
                f"raised {described(error)}. A predicate must return True or False for any "
                "arguments of the op; fix it, or leave the provider out of the priority."
                f"{self.way_out}"
            ) from error
        if isinstance(self.supports_args, rules.Rule):
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


def _name(function: Any) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", repr(function))
    return f"{name!r} ({code.co_filename}:{code.co_firstlineno})" if code else repr(name)


def _source(function: Callable[..., Any]) -> bytes:
    function = without_values(function)  # the provider names the values
    with suppress(OSError, TypeError):
        if (file := inspect.getsourcefile(function)) is not None:
            return Path(file).read_bytes()
    code = getattr(function, "__code__", None)
    parts = (code.co_code, code.co_consts, code.co_names) if code else (repr(function),)
    return repr(parts).encode()


# Lower bound of the memory traffic of a call, in bytes.


_LOOKUP_OPS = frozenset({"embedding", "masked_embedding"})


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in *values*, including those in lists and tuples."""
    tensors: list[Tensor] = []
    for value in values:
        items = value if isinstance(value, (list, tuple)) else (value,)
        tensors += [item for item in items if isinstance(item, Tensor)]
    return tensors


def shown(value: Any) -> str:
    """Format an argument: dtype, shape, device and unusual strides of a tensor."""
    if isinstance(value, Tensor):
        shape = ", ".join(map(str, value.shape))
        dtype = str(value.dtype).removeprefix("torch.")
        plain = value.layout is not torch.strided or value.is_contiguous()
        strided = "" if plain else f" strides {tuple(value.stride())}"
        return f"{dtype}[{shape}]{strided} {value.device}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    return repr(value)


def least_bytes(op: OpDefinition, values: Sequence[Any], results: Iterable[Any]) -> int | None:
    """Return the total size in bytes of the tensor arguments and results of a call.

    Args:
        op: the op.
        values: one value per parameter of *op*; symbolic sizes count as their hints.
        results: the outputs of the call.

    Returns:
        The number of bytes, or None for data-dependent sizes and for ops that read only a part of
        an argument, such as an embedding table or a KV cache.
    """
    if op.name in _LOOKUP_OPS or any("cache" in name for name in op.schema.names):
        return None
    total = 0
    for tensor in tensors_in([*values, *results]):
        count = torch_compat.size_hint(tensor.numel())
        if count is None:
            return None
        total += count * tensor.element_size()
    return total


# The definition of an op.


class OpDefinition:
    """An op without its calls: its declaration, implementations, inputs and tolerances.

    Attributes:
        name: the name in ``ir.ops`` and ``torch.ops``.
        namespace: the namespace of its registry.
        settings: the settings of its registry.
        native: the function that defines it.
        schema: its parameters and outputs.
        activations: the parameters that ``maybe_inplace`` donates, in the order of the schema.
        allow_inplace: whether it has ``maybe_inplace``.
        composite: whether native is written in other ops, so that the compiler can recognize it.
        keeps_strides: the activations whose outputs have the strides of the input.
        autocast: whether ``torch.autocast`` applies to calls; if not, they run with it disabled.
        site: where it was declared.
        owner: the plugin that declared it, if any.
        fake: the function that computes the metadata of the outputs for fake tensors.
        spellings: plain PyTorch functions that compute the same.
    """

    def __init__(
        self,
        native: Function,
        namespace: str,
        settings: Settings,
        *,
        name: str | None = None,
        activations: Sequence[str] | None = None,
        allow_inplace: bool = False,
        composite: bool = False,
        native_traits: Iterable[str] = (),
        keeps_strides: Sequence[str] = (),
        autocast: bool = True,
    ) -> None:
        """Check the declaration of an op; see :func:`opweave.ir.register_op`.

        Raises:
            InvalidNameError: the name is malformed or reserved.
            InvalidOpError: *native* cannot be an op, or the options do not fit it.
            UnknownTraitError: a trait does not exist.
        """
        if not inspect.isfunction(native):
            raise errors.InvalidOpError(
                f"an op must be declared with a Python function (def), not with {native!r}."
            )
        # Plain attributes: generated code and Dynamo read them without calling a property.
        self.name = check_op_name(native.__name__ if name is None else name)
        self.namespace, self.settings = namespace, settings
        self.native = native
        self.fake: Function = native
        self.schema = Schema.of(native, self.name)
        self.activations = _activations(self.schema, self.name, activations)
        if allow_inplace and len(self.activations) != self.schema.num_outputs:
            raise errors.InvalidOpError(
                f"op {self.name!r}: allow_inplace=True needs as many activations as outputs; found "
                f"activations {list(self.activations)} and {self.schema.num_outputs} output(s)."
            )
        for activation in sorted(set(keeps_strides).difference(self.activations)):
            raise errors.InvalidOpError(
                f"op {self.name!r}: keeps_strides names {activation!r}, which is not an "
                f"activation. {did_you_mean(activation, self.activations)}"
            )
        self.keeps_strides = frozenset(keeps_strides)
        self.allow_inplace, self.composite, self.autocast = allow_inplace, composite, autocast
        self.site, self.owner = caller_site(), current_owner()
        traits = rules.check_traits({rules.DIFFERENTIABLE, *native_traits})
        self._impls = {NATIVE: IrOpImpl(self, NATIVE, native, traits=traits, site=self.site)}
        # By provider; several implementations where the function has tunable parameters.
        self._groups: dict[str, Sequence[IrOpImpl]] = {NATIVE: [self._impls[NATIVE]]}
        self._tolerances = dict(DEFAULT_TOLERANCES)
        self._provider_tolerances: dict[tuple[str | None, torch.dtype], Tolerance] = {}
        self._input_generator: Callable[..., tuple[Any, ...]] | None = None
        self.spellings: tuple[Spelling, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name}{inspect.signature(self.native)} from {self.site}>"
        )

    def __str__(self) -> str:
        """The op's name and the first line of its docstring."""
        lines = (inspect.getdoc(self.native) or "").splitlines()
        return f"{self.name}: {lines[0]}" if lines else self.name

    @cached_property
    def bind(self) -> Callable[..., tuple[Any, ...]]:
        """Function that returns one value per parameter, defaults filled in.

        It raises TypeError as a call would.
        """
        function = self.schema.function(f"({''.join(f'{name}, ' for name in self.schema.names)})")
        function.__qualname__ = self.name  # shown in "missing argument" errors
        return function

    @property
    def activation_indices(self) -> list[int]:
        """The positions of the activations among the parameters."""
        return [i for i, name in enumerate(self.schema.names) if name in self.activations]

    def reset(self) -> None:
        """Discard the code generated for calls, after a change of registrations or settings."""

    # Implementations

    @property
    def impls(self) -> Mapping[str, IrOpImpl]:
        """Every registered implementation by provider, native first."""
        self.settings.ensure_ready()
        return MappingProxyType(self._impls)

    def register_impl(
        self,
        provider: str,
        *,
        supported: bool = True,
        unsupported_reason: str | None = None,
        supports_args: rules.Predicate | None = None,
        inplace: bool = False,
        functional: Function | None = None,
        traits: Iterable[str] = (),
        tunable: Tunable | None = None,
        override: bool = False,
    ) -> Callable[[Function], Function]:
        """Register the decorated function as an implementation of this op.

        Args:
            provider: name of the kernel's library or backend; unique for the op,
                ``[a-z_][a-z0-9_]*``.
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
        if functional is not None and not inplace:
            raise errors.InvalidOpError(
                f"{self.name}: functional= is for an in-place implementation (inplace=True); "
                "otherwise the decorated function is the functional one."
            )
        if inplace and not self.allow_inplace:
            raise errors.InvalidOpError(
                f"{self.name}: an in-place implementation needs an op declared with "
                f"allow_inplace=True; {self.name} ({self.site}) is not."
            )
        if not isinstance(supported, bool):
            raise errors.InvalidOpError(
                f"{self.name}: supported={supported!r} is neither True nor False."
            )

        def decorate(function: Function) -> Function:
            check_is_not_ours(provider, self.native, function)
            impls = [
                IrOpImpl(
                    self,
                    name,
                    variant,
                    supported=supported,
                    unsupported_reason=unsupported_reason or "not supported on this system",
                    supports_args=supports_args,
                    inplace=inplace,
                    functional_fn=functional,
                    traits=rules.check_traits(traits),
                    tunable=tunable or {},
                    site=caller_site(),
                )
                for name, variant in variants(self.name, provider, function, tunable or {})
            ]
            if (first := self._impls.get(provider)) is not None and not override:
                by = "" if first.owner is None else f" by the plugin {first.owner}"
                raise errors.DuplicateImplError(
                    f"{self.name}: provider {provider!r} is registered already{by}, at "
                    f"{first.site}; this is {impls[0].site}. Use another name, or override=True."
                )
            label = f"implementation {self.name}:{provider}"
            transaction.enter(label, self._groups, provider, impls, self._use_groups)
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
                raise errors.UnknownProviderError(
                    f"{self.name}: unknown provider {entry.provider!r} ({entry.origin}). "
                    f"{did_you_mean(entry.provider, self.impls)}"
                )

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
            raise errors.MissingInputGeneratorError(
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
        are the fields of :class:`opweave.ir.op.Spelling`.

        Raises:
            SchemaMismatchError: the function's signature differs from the op's.
        """

        def decorate(function: Function) -> Function:
            spelling = Spelling(function.__name__, function, **options)
            check_same(self.native, function, f"{self.name!r}: spelling {spelling.name!r}")
            self.spellings = (*self.spellings, spelling)
            return function

        return decorate

    def override_tolerance(
        self, dtype: torch.dtype, *, atol: float, rtol: float, provider: str | None = None
    ) -> None:
        """Set the tolerance for comparing implementations with native in *dtype*.

        With a *provider*, it holds for that one only, which rounds more than the definition.
        """
        if provider is None:
            self._tolerances[dtype] = Tolerance(atol, rtol)
        else:
            self._provider_tolerances[provider, dtype] = Tolerance(atol, rtol)

    def has_own_tolerance(self, dtype: torch.dtype, provider: str | None) -> bool:
        """Whether *provider* has a tolerance of its own in *dtype*."""
        return (provider, dtype) in self._provider_tolerances

    def get_tolerance(self, dtype: torch.dtype, provider: str | None = None) -> Tolerance:
        """Return the tolerance for comparing implementations with native in *dtype*.

        With a *provider*, return its own tolerance if it has one.

        Raises:
            MissingToleranceError: none is defined for the dtype.
        """
        if self.has_own_tolerance(dtype, provider):
            return self._provider_tolerances[provider, dtype]
        try:
            return self._tolerances[dtype]
        except KeyError:
            raise errors.MissingToleranceError(
                f"No tolerance defined for {dtype} of {self.name}. Known: "
                f"{', '.join(map(str, self._tolerances))}. Set one with override_tolerance."
            ) from None


def _activations(schema: Schema, op_name: str, names: Sequence[str] | None) -> tuple[str, ...]:
    tensors = [p.name for p in schema.tensors if not p.is_optional]
    if names is None:
        return tuple(name for name in tensors if name.startswith("x"))
    for name in names:
        if name not in tensors:
            raise errors.InvalidOpError(
                f"op {op_name!r}: activation {name!r} is not a required tensor parameter. "
                f"{did_you_mean(name, tensors)}"
            )
    return tuple(name for name in tensors if name in names)
