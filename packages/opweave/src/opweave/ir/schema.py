"""The schema of an op, read from the signature of its native function, and valid names."""

from __future__ import annotations

import inspect
import keyword
import math
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opweave import torch_compat
from opweave.ir.errors import InvalidNameError, InvalidOpError, SchemaMismatchError
from opweave.ir.priority import NATIVE
from opweave.packages import is_in_project

Function = Callable[..., Any]


# Valid names of ops and providers.


# The torch op with this suffix carries the settings of a call site as arguments.
ANNOTATED_SUFFIX = "_annotated"
ANNOTATIONS = ("using", "donate", "autocast")
RESERVED_PROVIDERS = frozenset({NATIVE, "unfused"})
"""Names that providers must not have."""
OWN_PROVIDERS = (
    "aten", "batch_invariant", "opweave_c", "opweave_c_int8", "opweave_c_invariant", "triton",
)  # fmt: skip
"""The providers that come with opweave."""
ADAPTERS = ("flag_gems", "flash_attn", "flashinfer", "liger", "quack", "sgl_kernel", "vllm_c")
"""Providers for kernels of other libraries, where these are installed."""

_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_NAME_ADVICE = "use lower-case letters, digits and underscores, not starting with a digit"


def check_op_name(name: object) -> str:
    """Return *name*; raise InvalidNameError if it is not a valid name for an op."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidNameError(f"op name {name!r} is invalid: {_NAME_ADVICE}.")
    if name.endswith(ANNOTATED_SUFFIX):
        raise InvalidNameError(f"op {name!r}: names must not end in {ANNOTATED_SUFFIX!r}.")
    if keyword.iskeyword(name) or torch_compat.is_taken_in_torch_ops(name):
        raise InvalidNameError(
            f"op {name!r}: the name is reserved by Python or torch.ops; choose another, such as "
            f"'{name}_op'."
        )
    return name


def check_provider_name(name: object) -> str:
    """Return *name*; raise InvalidNameError if it is not a valid name for a provider."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidNameError(f"provider name {name!r} is invalid: {_NAME_ADVICE}.")
    if name in RESERVED_PROVIDERS:
        raise InvalidNameError(
            f"provider {name!r} is reserved. The native implementation is the function that the "
            "op was declared with; choose another name."
        )
    return name


def check_is_not_ours(name: str, native: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Raise InvalidNameError if third-party *function* takes a provider name of opweave's.

    Applies to opweave's ops only. Their kernels are registered at the first use of an op, and
    would then find the name taken.
    """
    if (
        name in (*OWN_PROVIDERS, *ADAPTERS)
        and _is_of_opweave(native)
        and not _is_of_opweave(function)
    ):
        raise InvalidNameError(
            f"{native.__name__}: provider {name!r} comes with opweave. Choose another name, "
            f"such as 'my_{name}', and prefer it: {native.__name__}.set_default(['my_{name}'])."
        )


def _is_of_opweave(function: Callable[..., Any]) -> bool:
    module = getattr(function, "__module__", None) or ""
    return is_in_project(module)


# The schema of an op, read from the signature of its native function.


_EMPTY = inspect.Parameter.empty
_RESERVED_PARAMETERS = ("annotated", "autocast", "donate", "entries", "torch_op", "using")
_PARAMETER_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SCALAR_TYPES = frozenset({int, float, bool, str})


class Param(NamedTuple):
    """One parameter of an op."""

    name: str
    annotation: Any
    default: Any
    keyword_only: bool

    @property
    def has_default(self) -> bool:
        return self.default is not _EMPTY

    @property
    def is_tensor(self) -> bool:
        """Whether the parameter takes a Tensor (or None)."""
        return self.annotation is Tensor or Tensor in _union_members(self.annotation)

    @property
    def is_tensor_list(self) -> bool:
        """Whether the parameter takes a sequence of Tensors (some of them None), or None."""
        return any(item is Tensor or Tensor in _union_members(item) for item in self._items())

    @property
    def has_optional_items(self) -> bool:
        """Whether the parameter takes a sequence in which items may be None."""
        return any(type(None) in _union_members(item) for item in self._items())

    @property
    def is_optional(self) -> bool:
        """Whether the parameter takes None."""
        return type(None) in _union_members(self.annotation)

    def _items(self) -> list[Any]:
        """Return the item types of the sequences that the parameter takes."""
        members = _union_members(self.annotation) or (self.annotation,)
        return [item for member in members for item in typing.get_args(member)]


class Schema(NamedTuple):
    """The parameters of an op, the number of its outputs, and the torch schema string."""

    params: tuple[Param, ...]
    num_outputs: int
    returns_tuple: bool
    torch: str

    @classmethod
    def of(cls, function: Callable[..., Any], op_name: str) -> Schema:
        """Read the schema off a fully annotated function.

        Raises:
            InvalidOpError: the signature cannot be an op's.
        """
        check_returns(function, f"op {op_name!r}", InvalidOpError)
        hints = _hints(function)
        params = tuple(_params(function, op_name, hints))
        if not any(p.is_tensor or p.is_tensor_list for p in params):
            raise InvalidOpError(f"op {op_name!r} takes no Tensor; an op needs at least one.")
        count, returns_tuple = _outputs(hints.get("return"), op_name)
        try:
            torch_schema = torch.library.infer_schema(function, mutates_args=())
            torch_compat.parse_schema(op_name + torch_schema)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            reason = _default_problem(params) or _plain_reason(error)
            raise InvalidOpError(f"op {op_name!r} has no torch schema: {reason}") from error
        return cls(params, count, returns_tuple, torch_schema)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.params)

    @property
    def tensors(self) -> tuple[Param, ...]:
        return tuple(p for p in self.params if p.is_tensor)

    @property
    def tensor_lists(self) -> tuple[Param, ...]:
        return tuple(p for p in self.params if p.is_tensor_list)

    def param(self, name: str) -> Param:
        """Return the parameter called *name*; raise KeyError if it does not exist."""
        return {p.name: p for p in self.params}[name]

    @property
    def declaration(self) -> str:
        """The parameter list as Python source; ``_default_p`` stands for the default of ``p``."""
        parts: list[str] = []
        for p in self.params:
            if p.keyword_only and "*" not in parts:
                parts.append("*")
            parts.append(f"{p.name}=_default_{p.name}" if p.has_default else p.name)
        return ", ".join(parts)

    @property
    def defaults(self) -> dict[str, Any]:
        """The default values by the names that :attr:`declaration` refers to."""
        return {f"_default_{p.name}": p.default for p in self.params if p.has_default}

    def call(self, rename: Mapping[str, str] | None = None) -> str:
        """Return the source of an argument list that forwards every parameter.

        Args:
            rename: expressions to pass instead of the parameters of these names.
        """
        names = {p.name: (rename or {}).get(p.name, p.name) for p in self.params}
        return ", ".join(
            f"{p.name}={names[p.name]}" if p.keyword_only else names[p.name] for p in self.params
        )

    def function(self, body: str, **names: Any) -> Callable[..., Any]:
        """Compile a function of the parameters that returns the expression *body*.

        Args:
            body: Python source; it may refer to the parameters and to *names*.
            names: values by name, each starting with an underscore.
        """
        # No __name__ in the globals, because Dynamo would look them up in the module of that name.
        function: Callable[..., Any] = eval(
            f"lambda {self.declaration}: {body}", {**self.defaults, **names}
        )
        return function

    def split(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turn values in parameter order into ``(args, kwargs)``."""
        pairs = list(zip(self.params, values, strict=True))
        args = tuple(v for p, v in pairs if not p.keyword_only)
        return args, {p.name: v for p, v in pairs if p.keyword_only}


def check_same(
    native: Callable[..., Any], other: Callable[..., Any], label: str, extra: Collection[str] = ()
) -> None:
    """Check that *other* has the parameters and defaults of *native*, and the types it annotates.

    Args:
        native: the definition.
        other: the implementation.
        label: the implementation in words.
        extra: further parameters of *other*, which have defaults.

    Raises:
        SchemaMismatchError: the signatures differ.
    """
    if other is native:
        return
    check_returns(other, label, SchemaMismatchError)
    expected = inspect.signature(native)
    try:
        actual = inspect.signature(other)
    except (TypeError, ValueError) as error:
        raise SchemaMismatchError(f"{label} does not match native schema: {error}.") from error
    if extra:
        parameters = [p for name, p in actual.parameters.items() if name not in extra]
        actual = actual.replace(parameters=parameters)
    problem = _difference(expected, actual) or _type_difference(native, other)
    if problem:
        raise SchemaMismatchError(
            f"{label} does not match native schema: {problem}. "
            f"Found {_unannotated(actual)}, expected {_unannotated(expected)}."
        )


def check_returns(function: object, label: str, error: type[Exception]) -> None:
    """Raise *error* if *function* is an async or generator function."""
    tests = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(test(function) for test in tests):
        raise error(f"{label} is an async or generator function; it must return its results.")


def _difference(expected: inspect.Signature, actual: inspect.Signature) -> str | None:
    if list(expected.parameters) != list(actual.parameters):
        return f"parameters are {list(actual.parameters)}, not {list(expected.parameters)}"
    for name, native in expected.parameters.items():
        other = actual.parameters[name]
        if other.kind != native.kind:
            return f"{name!r} is {other.kind.description}, not {native.kind.description}"
        if other.default is not native.default and other.default != native.default:
            return f"the default of {name!r} is {_show(other.default)}, not {_show(native.default)}"
    return None


def _type_difference(native: Callable[..., Any], other: Callable[..., Any]) -> str | None:
    expected, actual = _hints(native), _hints(other)
    for name, hint in actual.items():
        if name in expected and hint != expected[name]:
            return f"{name!r} is annotated {hint}, not {expected[name]}"
    return None


def _params(function: Callable[..., Any], op_name: str, hints: Mapping[str, Any]) -> list[Param]:
    parameters = inspect.signature(function).parameters
    if not hints and parameters:
        raise InvalidOpError(
            f"op {op_name!r}: its parameters {list(parameters)} need "
            "type annotations that can be resolved where it is declared, such as Tensor, "
            "Tensor | None, float, int or str."
        )
    result = []
    for name, p in parameters.items():
        if p.kind not in _PARAMETER_KINDS:
            raise InvalidOpError(
                f"op {op_name!r}: parameter {name!r} is {p.kind.description}; an op takes named "
                "parameters only, positional-or-keyword or keyword-only."
            )
        if name == "self" or name.startswith("_") or not name.isascii():
            raise InvalidOpError(
                f"op {op_name!r}: a parameter may not be called {name!r}; names that start with an "
                "underscore, and 'self', are taken by generated code, and torch knows ASCII only."
            )
        if name in _RESERVED_PARAMETERS:
            raise InvalidOpError(
                f"op {op_name!r}: a parameter may not be called {name!r}; calls of torch ops carry "
                f"arguments of these names: {', '.join(_RESERVED_PARAMETERS)}. Choose another name."
            )
        if name not in hints:
            raise InvalidOpError(
                f"op {op_name!r}: parameter {name!r} needs a type annotation, such as Tensor, "
                "Tensor | None, float, int or str."
            )
        if not _is_default(p.default, hints[name]):
            kind = hints[name].__name__ if isinstance(hints[name], type) else hints[name]
            raise InvalidOpError(
                f"op {op_name!r}: the default {p.default!r} of {name!r} does not match its "
                f"annotation {kind}. Change one of them; a default of None needs '| None', and "
                "the default of a list can only be None."
            )
        keyword_only = p.kind is inspect.Parameter.KEYWORD_ONLY
        result.append(Param(name, hints[name], p.default, keyword_only))
    return result


def _is_default(value: object, annotation: Any) -> bool:
    """Whether torch accepts *value* as the default of a parameter with this annotation."""
    kinds = _union_members(annotation) or (annotation,)
    if value is _EMPTY or isinstance(value, (list, tuple, Tensor)):
        return value is _EMPTY
    is_plain = not _SCALAR_TYPES.isdisjoint(kinds)
    return not is_plain or type(value) in kinds or (type(value) is int and float in kinds)


def _default_problem(params: Iterable[Param]) -> str | None:
    """Describe the first default that a torch schema cannot express, if there is one."""
    for name, _, value, _ in params:
        is_odd = (
            (isinstance(value, float) and not math.isfinite(value))
            or (isinstance(value, int) and not -(2**63) <= value < 2**63)
            or (isinstance(value, str) and not (value.isprintable() and not {*value} & {*"\"\\'"}))
        )
        if is_odd:
            return (
                f"it cannot express the default {value!r} of {name!r} (numbers must be finite and "
                "fit into 64 bits; strings must not contain quotes, backslashes or control "
                "characters). Use None as the default, and set the value in the function."
            )
    return None


def _plain_reason(error: Exception) -> str:
    """Return torch's reason without its long list of valid types."""
    reason, listed, _ = " ".join(str(error).split()).partition("The valid types are")
    valid_types = (
        "An op takes Tensor, int, float, bool, str, torch.dtype and torch.device, list[...] of "
        "numbers, each of these | None, and list[Tensor] and list[Tensor | None]."
    )
    return reason + valid_types if listed else reason


def _outputs(returned: Any, op_name: str) -> tuple[int, bool]:
    if returned is Tensor:
        return 1, False
    members = typing.get_args(returned)
    if typing.get_origin(returned) is tuple and members and all(m is Tensor for m in members):
        return len(members), True
    raise InvalidOpError(
        f"op {op_name!r} is annotated to return {returned}; an op returns Tensor or "
        "tuple[Tensor, ...] of fixed length (an op is functional: it returns what it computes)."
    )


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # a name imported under TYPE_CHECKING only
        return {}


def _union_members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        return typing.get_args(annotation)
    return ()


def _unannotated(signature: inspect.Signature) -> str:
    bare = [p.replace(annotation=_EMPTY) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _show(default: Any) -> str:
    return "absent" if default is _EMPTY else repr(default)
