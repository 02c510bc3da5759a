"""Hypothesis strategies that tests share: random ops, implementations, priorities and arguments.

A :class:`Program` describes an op, its implementations and settings as plain data. It can be
built with opweave's API, and it can say by itself what ought to be chosen: the tests compare the
two. Every implementation adds a number of its own to the activations, so that a result tells who
made it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from opweave import ir
from opweave.ir import rules
from opweave.ir.errors import (
    NoImplementationError,
    PredicateFailedError,
    ProviderRejectedError,
    ProviderUnavailableError,
)
from opweave.ir.priority import SizeRange, parse

PROVIDERS = ("alpha", "beta", "gamma", "delta", "epsilon")
MARKS = {"native": 64, **{name: 2**i for i, name in enumerate(PROVIDERS)}}
PROVIDER_OF = {mark: name for name, mark in MARKS.items()}

KINDS: dict[str, tuple[str, list[Any]]] = {  # annotation, and the defaults to choose from
    "tensor": ("Tensor", []),
    "optional": ("Tensor | None", [None]),
    "list": ("list[Tensor]", []),
    "float": ("float", [0.5, 2.0]),
    "int": ("int", [0, 3]),
    "bool": ("bool", [True, False]),
    "str": ("str", ["a", "b"]),
    "optional_int": ("int | None", [None, 2]),
}
_REQUIRED = object()


@dataclass(frozen=True)
class Param:
    """One parameter of a random op."""

    name: str
    kind: str
    default: Any = _REQUIRED
    keyword_only: bool = False

    @property
    def source(self) -> str:
        default = "" if self.default is _REQUIRED else f" = {self.default!r}"
        return f"{self.name}: {KINDS[self.kind][0]}{default}"


@dataclass(frozen=True)
class Test:
    """A predicate: as opweave is told it, and as plain Python over the named arguments."""

    __test__ = False

    text: str
    rule: rules.Rule | None
    accepts: Callable[[Mapping[str, Any]], Any]

    def __and__(self, other: Test) -> Test:
        rule = self.rule & other.rule if self.rule and other.rule else None
        both = lambda v: self.accepts(v) and other.accepts(v)  # noqa: E731
        return Test(f"({self.text} and {other.text})", rule, both)

    def __or__(self, other: Test) -> Test:
        rule = self.rule | other.rule if self.rule and other.rule else None
        either = lambda v: self.accepts(v) or other.accepts(v)  # noqa: E731
        return Test(f"({self.text} or {other.text})", rule, either)


@dataclass(frozen=True)
class Impl:
    """One implementation of a random op."""

    provider: str
    supported: bool
    predicate: Test | None
    inplace: bool
    traits: frozenset[str]


@dataclass(frozen=True)
class Program:
    """An op with implementations and settings."""

    params: tuple[Param, ...]
    activations: tuple[str, ...]  # empty: the op has no maybe_inplace
    impls: tuple[Impl, ...]
    native_traits: frozenset[str]
    settings: dict[ir.Source, list[str]]  # process-wide lists by source
    tuned: tuple[tuple[int | None, list[str]], ...]  # lists by the largest number of tokens
    scopes: tuple[list[str], ...]  # outermost first
    call_site: list[str]
    required: frozenset[str]  # by a scope
    required_everywhere: frozenset[str]  # by a setting

    # Settings

    @property
    def declaration(self) -> str:
        parts: list[str] = []
        for p in self.params:
            if p.keyword_only and "*" not in parts:
                parts.append("*")
            parts.append(p.source)
        return ", ".join(parts)

    def _function(self, name: str, body: str, returns: str = "") -> Callable[..., Any]:
        namespace: dict[str, Any] = {"Tensor": Tensor, "operator": operator, "torch": torch}
        exec(f"def {name}({self.declaration}){returns}:\n    {body}", namespace)
        function: Callable[..., Any] = namespace[name]
        return function

    def _kernel(self, name: str, *, inplace: bool) -> Callable[..., Any]:
        outputs = self.activations or (self.params[0].name,)
        add = "{0}.add_({1})" if inplace else "{0} + {1}"
        results = ", ".join(add.format(x, MARKS[name]) for x in outputs)
        returned = (
            "Tensor" if len(outputs) == 1 else f"tuple[{', '.join(['Tensor'] * len(outputs))}]"
        )
        return self._function(name, f"return {results}", f" -> {returned}")

    def build(self) -> ir.IrOp:
        """Declare the op in the current registry, register everything, and apply the settings."""
        op = ir.register_op(
            name="random_op",
            activations=self.activations,
            allow_inplace=bool(self.activations),
            native_traits=self.native_traits,
        )(self._kernel("native", inplace=False))
        for impl in self.impls:
            predicate: Any = None
            if impl.predicate is not None:
                predicate = impl.predicate.rule
                if predicate is None:
                    predicate = self._function("accepts", f"return {impl.predicate.text}")
            op.register_impl(
                impl.provider,
                supported=impl.supported,
                supports_args=predicate,
                inplace=impl.inplace,
                traits=impl.traits,
            )(self._kernel(impl.provider, inplace=impl.inplace))
        settings = op.registry.settings
        for source, providers in self.settings.items():
            if source is ir.Source.SET_DEFAULT:
                op.set_default(providers)
            else:
                settings.set_priorities(source, {op.name: providers}, source.name)
        settings.require(ir.Source.ENVIRONMENT, self.required_everywhere, "a test")
        ranges = [
            SizeRange(limit, parse(names, "tuned") if names else ()) for limit, names in self.tuned
        ]
        settings.set_tuned({op.name: ranges} if ranges else {})
        return op

    # Expected results

    def order(self, call_site: list[str], tokens: int) -> list[tuple[str, bool]]:
        """Providers in the order to be tried, and whether each is strict: the design, restated."""
        strongest_first = [call_site, *reversed(self.scopes)]
        for source in ("COMMAND_LINE", "ENVIRONMENT", "CONFIG_FILE", "SET_DEFAULT"):
            strongest_first.append(self.settings.get(ir.Source[source], []))
        fitting = [names for limit, names in self.tuned if limit is None or tokens <= limit]
        strongest_first += fitting[:1]
        strongest_first.append(self.settings.get(ir.Source.PLATFORM, []))
        order: dict[str, bool] = {}
        for names in strongest_first:
            for name in names:
                order.setdefault(name.removesuffix("!"), name.endswith("!"))
        return list(order.items())

    def expected(
        self, values: Mapping[str, Any], *, gradient: bool, call_site: list[str]
    ) -> str | type[Exception]:
        """The provider that a call must run, or the error that it must raise."""
        required = self.required | self.required_everywhere
        required |= {"differentiable"} if gradient else set()
        native = Impl("native", True, None, False, self.native_traits | {"differentiable"})
        impls = {impl.provider: impl for impl in (native, *self.impls)}
        order = self.order(call_site, values[self.params[0].name].shape[0])
        if not required <= native.traits:
            order += [(i.provider, False) for i in self.impls if required <= i.traits]
        for name, strict in [*order, ("native", False)]:
            impl = impls[name]
            usable = impl.supported and required <= impl.traits
            if usable and impl.predicate is None:
                return name
            if usable and impl.predicate is not None:
                try:
                    answer = impl.predicate.accepts(values)
                except ZeroDivisionError:
                    return PredicateFailedError
                if impl.predicate.rule is None and not isinstance(answer, bool):
                    return PredicateFailedError
                if answer:
                    return name
            if strict:
                return ProviderRejectedError if usable else ProviderUnavailableError
        return NoImplementationError


def tensors(*, gradient: bool = False) -> st.SearchStrategy[Tensor]:
    """Small integer-valued tensors: contiguous, strided, transposed, expanded or empty."""

    @st.composite
    def make(draw: st.DrawFn) -> Tensor:
        dtype = draw(st.sampled_from([torch.float32, torch.float64]))
        full = torch.arange(24, dtype=dtype).reshape(4, 6) - draw(st.integers(0, 9))
        shape = draw(st.sampled_from(["plain", "sliced", "transposed", "expanded", "empty", "1-d"]))
        found = {
            "plain": full,
            "sliced": full[:, :4],
            "transposed": full.t(),
            "expanded": full[:1].expand(3, 6),
            "empty": full[:0],
            "1-d": full[0],
        }[shape]
        if gradient and draw(st.booleans()):
            leaf = found.clone().requires_grad_()
            return leaf * 1  # not a leaf: in-place implementations may write to it
        return found

    return make()


def arguments(param: Param, *, gradient: bool) -> st.SearchStrategy[Any]:
    """Values for one parameter."""
    tensor = tensors(gradient=gradient)
    strategies: dict[str, st.SearchStrategy[Any]] = {
        "tensor": tensor,
        "optional": st.none() | tensor,
        "list": st.lists(tensor, max_size=2),
        "float": st.sampled_from([0.25, 0.5, 2.0]),
        "int": st.integers(0, 4),
        "bool": st.booleans(),
        "str": st.sampled_from(["a", "b"]),
        "optional_int": st.none() | st.integers(0, 4),
    }
    return strategies[param.kind]


@st.composite
def calls(
    draw: st.DrawFn, program: Program, *, gradient: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """``(args, kwargs, every value by name)``: some by position, defaults left out or not."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    values: dict[str, Any] = {}
    by_position = draw(st.integers(0, len(program.params)))
    for i, p in enumerate(program.params):
        if p.default is not _REQUIRED and draw(st.booleans()):
            values[p.name] = p.default
            by_position = 0  # the rest needs keywords
            continue
        values[p.name] = draw(arguments(p, gradient=gradient))
        if i < by_position and not p.keyword_only:
            args.append(values[p.name])
        else:
            kwargs[p.name] = values[p.name]
            by_position = 0
    return tuple(args), kwargs, values


@st.composite
def _params(draw: st.DrawFn, num_activations: int) -> tuple[Param, ...]:
    params = [Param(f"x{i}", "tensor") for i in range(max(num_activations, 1))]
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=5))
    with_default = keyword_only = False
    for i, kind in enumerate(kinds):
        keyword_only = keyword_only or draw(st.integers(0, 3)) == 0
        default = _REQUIRED
        if KINDS[kind][1] and (with_default or draw(st.booleans())):
            default = draw(st.sampled_from(KINDS[kind][1]))
            with_default = True
        elif with_default:
            keyword_only = True  # a parameter without default may follow only there
        params.append(Param(f"{kind}_{i}", kind, default, keyword_only))
    return tuple(params)


def _tests_of(p: Param) -> list[Test]:
    """Predicates about one parameter, as rules where there is one for it."""
    n = p.name
    if p.kind in ("tensor", "optional"):
        free = f"{n} is None or " if p.kind == "optional" else ""

        def given(test: Callable[[Tensor], bool]) -> Callable[[Mapping[str, Any]], bool]:
            return lambda v: v[n] is None or test(v[n])

        found = [
            Test(
                f"({free}{n}.dtype == torch.float64)",
                rules.dtype(n, torch.float64),
                given(lambda t: t.dtype == torch.float64),
            ),
            Test(
                f"({free}{n}.is_contiguous())",
                rules.contiguous(n),
                given(lambda t: t.is_contiguous()),
            ),
            Test(f"({free}{n}.ndim == 2)", rules.ndim(n, 2), given(lambda t: t.ndim == 2)),
            Test(
                f"({free}{n}.shape[-1] % 4 == 0)",
                rules.last_dim_multiple_of(n, 4),
                given(lambda t: t.shape[-1] % 4 == 0),
            ),
            Test(f"({free}{n}.device.type == 'cpu')", rules.cpu(n), lambda v: True),
            Test(f"({free}{n}.is_cuda)", rules.cuda(n), given(lambda t: False)),
        ]
        if p.kind == "optional":
            found += [
                Test(f"({n} is None)", rules.is_none(n), lambda v: v[n] is None),
                Test(f"({n} is not None)", rules.not_none(n), lambda v: v[n] is not None),
            ]
        return found
    if p.kind == "list":
        return [Test(f"(len({n}) > 1)", None, lambda v: len(v[n]) > 1)]
    if p.kind == "float":
        return [Test(f"({n} > 0.4)", None, lambda v: v[n] > 0.4)]
    if p.kind == "int":
        return [
            Test(f"({n} % 2)", None, lambda v: v[n] % 2),
            Test(f"({n} in (1, 3))", rules.one_of(n, 1, 3), lambda v: v[n] in (1, 3)),
        ]
    if p.kind == "str":
        return [Test(f"({n} == 'a')", rules.one_of(n, "a"), lambda v: v[n] == "a")]
    if p.kind == "bool":
        return [Test(f"({n})", rules.one_of(n, True), lambda v: v[n])]
    return [Test(f"({n} is None)", rules.is_none(n), lambda v: v[n] is None)]


@st.composite
def predicates(draw: st.DrawFn, params: tuple[Param, ...]) -> Test:
    """A predicate over the parameters; now and then one that fails."""
    simple = [test for p in params for test in _tests_of(p)]
    first, second = params[0].name, params[-1].name
    if params[-1].kind in ("tensor", "optional") and len(params) > 1:
        same = f"({second} is None or {first}.dtype == {second}.dtype)"
        simple.append(
            Test(
                same,
                rules.same_dtype(first, second),
                lambda v: v[second] is None or v[first].dtype == v[second].dtype,
            )
        )
    simple += [
        Test("[]", None, lambda v: []),
        Test("(1 // 0)", None, lambda v: 1 // 0),
        Test("1", None, lambda v: 1),
    ]
    joined = st.recursive(
        st.sampled_from(simple),
        lambda inner: st.tuples(inner, inner, st.booleans()).map(
            lambda t: t[0] & t[1] if t[2] else t[0] | t[1]
        ),
        max_leaves=3,
    )
    return draw(joined)


def _priority(known: list[str]) -> st.SearchStrategy[list[str]]:
    entry = st.tuples(st.sampled_from(known), st.sampled_from(["", "", "", "!"])).map("".join)
    return st.lists(entry, min_size=1, max_size=3)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A random op with random implementations and settings."""
    num_activations = draw(st.integers(0, 2))
    params = draw(_params(num_activations))
    activations = tuple(f"x{i}" for i in range(num_activations))
    traits = st.frozensets(st.sampled_from(sorted(ir.TRAITS)))
    impls = [
        Impl(
            provider,
            supported=draw(st.sampled_from([True, True, True, False])),
            predicate=draw(st.none() | predicates(params)),
            inplace=num_activations > 0 and draw(st.booleans()),
            traits=draw(traits),
        )
        for provider in draw(st.lists(st.sampled_from(PROVIDERS), unique=True, max_size=4))
    ]
    known = ["native", *(impl.provider for impl in impls)]
    sources = st.sampled_from(
        [s for s in ir.Source if s.name not in ("CALL_SITE", "SCOPE", "TUNED", "NATIVE")]
    )
    limits = sorted(draw(st.sets(st.integers(2, 6), max_size=2)))  # of 0, 3, 4 or 6 tokens
    tuned = st.lists(st.sampled_from(known), max_size=2)
    none = st.just(frozenset[str]())
    invariant = st.just(frozenset({"batch_invariant"}))
    return Program(
        params,
        activations,
        tuple(impls),
        native_traits=draw(none | invariant),
        settings=draw(st.dictionaries(sources, _priority(known), max_size=3)),
        tuned=tuple((limit, draw(tuned)) for limit in [*limits, None])
        if draw(st.booleans())
        else (),
        scopes=tuple(draw(st.lists(_priority(known), max_size=2))),
        call_site=draw(st.just([]) | _priority(known)),
        required=draw(none | none | invariant),
        required_everywhere=draw(none | none | invariant),
    )
