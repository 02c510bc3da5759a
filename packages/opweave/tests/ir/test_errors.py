"""Every error says what was asked, what was found, what is possible, and how to fix it."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from ir.workloads import check
from opweave import ir, transaction
from opweave.config import KernelConfig
from opweave.ir import errors, rules
from opweave.ir.errors import SettingError

HERE = __file__
MODULES = ("opweave.errors", errors.__name__)


def forgetful(x: Tensor, weight: Tensor | None = None, *, epsilon: float = 1e-6):  # type: ignore
    norm(x, weight, epsilon=epsilon)


def norm(x: Tensor, weight: Tensor | None = None, *, epsilon: float = 1e-6) -> Tensor:
    return x + epsilon


@pytest.fixture
def op(registry: ir.Registry) -> ir.IrOp:
    found = ir.register_op(name="my_norm")(norm)
    found.register_impl("alpha", supports_args=rules.ndim("x", 2))(norm)
    found.register_impl("beta", supported=False, unsupported_reason="needs a tractor")(norm)
    return found


X = torch.ones(3)


def call_with_dtensor(op: ir.IrOp) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        with torch.no_grad():
            op(DTensor.from_local(X, mesh, [Replicate()]))
    finally:
        dist.destroy_process_group()


# error -> (what raises it, given the op; what its message names)
RAISED: dict[str, tuple[Callable[[ir.IrOp], Any], list[str]]] = {
    "InvalidNameError": (
        lambda op: ir.register_op(name="My-Norm")(norm),
        ["'My-Norm'", "lower-case letters, digits and underscores"],
    ),
    "InvalidOpError": (
        lambda op: ir.register_op(name="broken")(lambda x: x),
        ["'broken'", "'x'", "annotation", "Tensor | None"],
    ),
    "DuplicateOpError": (
        lambda op: ir.register_op(name="my_norm")(norm),
        ["'my_norm'", HERE, "Choose another name", "register_impl"],
    ),
    "DuplicateImplError": (
        lambda op: op.register_impl("alpha")(norm),
        ["my_norm", "'alpha'", HERE, "another name"],
    ),
    "SchemaMismatchError": (
        lambda op: op.register_impl("gamma")(lambda x, weight=None, *, eps=1e-6: x),
        [
            "'my_norm'",
            "'gamma'",
            "does not match native schema",
            "'eps'",
            "'epsilon'",
            "expected (x, weight=None, *, epsilon=1e-06)",
        ],
    ),
    "PredicateSignatureError": (
        lambda op: op.register_impl("gamma", supports_args=rules.cpu("wheight"))(norm),
        ["'wheight'", "Did you mean 'weight'?", "Known: weight, x"],
    ),
    "PredicateFailedError": (
        lambda op: [op.register_impl("gamma", supports_args=raises)(norm), op.using("gamma")(X)],
        [
            "my_norm",
            "'gamma'",
            "ZeroDivisionError",
            HERE,
            "True or False",
            "leave the provider out",
        ],
    ),
    "UnknownOpError": (
        lambda op: op.registry.op("mynorm"),
        ["'mynorm'", "Did you mean 'my_norm'?", "Known: my_norm"],
    ),
    "UnknownProviderError": (
        lambda op: op.using("alfa"),
        ["my_norm", "'alfa'", "call site", "Did you mean 'alpha'?", "Known: alpha, beta, native"],
    ),
    "UnknownTraitError": (
        lambda op: op.register_impl("gamma", traits={"differentable"})(norm),
        ["'differentable'", "Did you mean 'differentiable'?", "batch_invariant"],
    ),
    "ProviderUnavailableError": (
        lambda op: op.using("beta!")(X),
        [
            "my_norm",
            "'beta!'",
            "call site",
            "needs a tractor",
            "Available here: native, alpha",
            "'beta' instead of 'beta!'",
        ],
    ),
    "ProviderRejectedError": (
        lambda op: op.using("alpha!")(X),
        [
            "my_norm",
            "'alpha!'",
            "call site",
            "x: 1-d (supports 2-d)",
            "Available here: native",
            "'alpha' instead of 'alpha!'",
        ],
    ),
    "NoImplementationError": (
        lambda op: invariant(op)(X),
        [
            "my_norm",
            "native: is not batch_invariant, required by scope ir.require(...)",
            "to the priority, or drop the requirement",
        ],
    ),
    "TensorArgumentError": (lambda op: op("x"), ["my_norm", "x must be a Tensor", "str"]),
    "InvalidResultError": (
        lambda op: [op.register_impl("gamma")(forgetful), op.using("gamma")(X)],
        ["my_norm", "'gamma'", HERE, "must return one Tensor, found NoneType"],
    ),
    "DonationError": (
        lambda op: op.maybe_inplace,
        ["my_norm", HERE, "allow_inplace=True", "Call the op itself"],
    ),
    "MissingToleranceError": (
        lambda op: op.get_tolerance(torch.complex64),
        ["torch.complex64", "my_norm", "torch.float32", "override_tolerance"],
    ),
    "MissingInputGeneratorError": (
        lambda op: op.generate_inputs(),
        ["my_norm", "@ir.ops.my_norm.register_input_generator"],
    ),
    "TransactionClosedError": (
        lambda op: late_registration(op, "late"),
        ["implementation my_norm:late", "any more", "has failed"],
    ),
    "DTensorError": (call_with_dtensor, ["my_norm", "DTensor", "x.to_local()", "rowwise"]),
    "SettingError": (
        lambda op: ir.priority(my_norm="alpha,,beta").__enter__(),
        ["ir.priority(my_norm=...)", "''", "Separate names by commas", "name!"],
    ),
}


def raises(x: Tensor, weight: Tensor | None = None, *, epsilon: float = 1e-6) -> bool:
    return bool(1 // 0)


def invariant(op: ir.IrOp) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with ir.require("batch_invariant"):
            return op(x)

    return call


def late_registration(op: ir.IrOp, provider: str) -> None:
    """Register for a transaction that has failed, as a thread that it left behind may do."""
    with contextlib.suppress(KeyError), transaction.begin():
        late = contextvars.copy_context()
        raise KeyError
    late.run(lambda: op.register_impl(provider)(norm))


def leaves() -> Iterator[type]:
    for _, found in inspect.getmembers(errors, inspect.isclass):
        own = [c for c in found.__subclasses__() if c.__module__ in MODULES]
        if issubclass(found, errors.OpweaveError) and not own:
            yield found


def test_the_table_is_complete() -> None:
    assert {error.__name__ for error in leaves()} == set(RAISED)


@pytest.mark.parametrize("name", RAISED)
def test_what_an_error_says(op: ir.IrOp, name: str) -> None:
    act, fragments = RAISED[name]
    with pytest.raises(errors.IrError) as caught:
        act(op)
    assert type(caught.value).__name__ == name
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert inspect.getdoc(type(caught.value))


def test_errors_are_also_what_python_users_expect() -> None:
    assert issubclass(errors.UnknownOpError, (AttributeError, LookupError))
    assert issubclass(errors.DuplicateImplError, ValueError)
    assert issubclass(errors.SchemaMismatchError, ValueError)
    assert issubclass(errors.UnknownProviderError, LookupError)
    assert not hasattr(ir.ops.rms_norm, "maybe_inplace")
    assert not hasattr(ir.ops, "no_such_op")
    with pytest.raises(errors.UnknownOpError, match="Did you mean 'rms_norm'"):
        ir.ops.rmsnorm  # noqa: B018
    with pytest.raises(ImportError):
        exec("from opweave.ir.ops import no_such_op")


def line() -> int:
    return inspect.currentframe().f_back.f_lineno  # type: ignore[union-attr]


def test_duplicates_name_both_sites(op: ir.IrOp) -> None:
    first = line() + 1
    op.register_impl("gamma")(norm)
    with pytest.raises(errors.DuplicateImplError) as caught:
        op.register_impl("gamma")(norm)
    assert f"{HERE}:{first}" in str(caught.value)
    assert f"{HERE}:{first + 2}" in str(caught.value)
    first = line() + 1
    ir.register_op(name="twice")(norm)
    with pytest.raises(errors.DuplicateOpError) as caught_op:
        ir.register_op(name="twice")(norm)
    assert f"{HERE}:{first}" in str(caught_op.value)
    assert f"{HERE}:{first + 2}" in str(caught_op.value)


def test_a_failed_predicate_keeps_its_cause(op: ir.IrOp) -> None:
    op.register_impl("gamma", supports_args=raises)(norm)
    op.set_default(["gamma"])
    for call in (op, op, op.torch_op, op.dispatch, lambda x: ir.explain(op, x)):
        with pytest.raises(errors.PredicateFailedError) as caught:
            call(X)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_errors_of_a_kernel_are_its_own(op: ir.IrOp) -> None:
    def broken(x: Tensor, weight: Tensor | None = None, *, epsilon: float = 1e-6) -> Tensor:
        raise ArithmeticError("the kernel's own")

    op.register_impl("gamma")(broken)
    for call in (op.using("gamma"), op.using("gamma"), op.using("gamma!")):
        with pytest.raises(ArithmeticError, match="the kernel's own"):
            call(X)


def test_strict_errors_name_the_setting(op: ir.IrOp) -> None:
    op.registry.settings.set_priorities(
        ir.Source.ENVIRONMENT, {"my_norm": "alpha!"}, "environment OPWEAVE_IR_OP_PRIORITY__MY_NORM"
    )
    with pytest.raises(errors.ProviderRejectedError, match="OPWEAVE_IR_OP_PRIORITY__MY_NORM"):
        op(X)
    with ir.priority(my_norm=["native"]):
        assert torch.equal(op(X), X + 1e-6)


@pytest.mark.parametrize(
    "names", [[], [""], "", ["a b"], ["alpha", 3], [None], "alpha;beta", "!", ["!!"]]
)
def test_malformed_lists(op: ir.IrOp, names: Any) -> None:
    with pytest.raises(SettingError), ir.priority(my_norm=names):
        pass
    with pytest.raises(SettingError):
        KernelConfig(ir_op_priority={"my_norm": names})
    with pytest.raises(SettingError, match="a test"):
        op.registry.settings.set_priorities(ir.Source.PLATFORM, {"my_norm": names}, "a test")
    with pytest.raises(SettingError):
        op.using(*names)
    assert op.get_priority() == ["native"]


def test_configs_hold_any_op() -> None:
    config = KernelConfig(ir_op_priority={"plugins_op": "a, b!", "rms_norm": ["native"]})
    assert dict(config.ir_op_priority) == {"plugins_op": ["a", "b!"], "rms_norm": ["native"]}
    assert isinstance(config.ir_op_priority, ir.IrOpPriorityConfig)


# Invalid arguments: every provider raises the documented error.

# Mistakes

INPUT = torch.randn(2, 6)
Q, KV = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 8)
CU = torch.tensor([0, 3], dtype=torch.int32)


def dual_chunk(rows: int, chunk_size: int, local_size: int) -> tuple[Any, ...]:
    query, key = torch.randn(3, 16), torch.randn(3, 8)
    return query, key, torch.arange(3), torch.randn(rows, 8), 8, chunk_size, local_size


INVALID: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("silu_and_mul", (torch.randn(2, 5),), ValueError, "even"),
    ("silu_and_mul", (torch.tensor(1.0),), ValueError, "even"),
    ("mul_and_silu", (torch.randn(2, 5),), ValueError, "even"),
    ("gelu_and_mul", (torch.randn(2, 5),), ValueError, "even"),
    ("gelu_and_mul", (INPUT, "exact"), ValueError, "must be 'none' or 'tanh', not 'exact'"),
    ("rms_norm", (INPUT, None, 1e-6, 0), ValueError, "variance_size=0"),
    ("rms_norm", (INPUT, None, 1e-6, 7), ValueError, "variance_size=7.*6"),
    ("rms_norm", (INPUT[:0], None, 1e-6, 7), ValueError, "variance_size=7"),
    ("rms_norm", (INPUT, None, 1e-6, -1), ValueError, "variance_size=-1"),
    ("fused_add_rms_norm", (INPUT, INPUT.clone(), None, 1e-6, 7), ValueError, "variance_size=7"),
    *(
        ("rms_norm", (INPUT, weight, 1e-6), ValueError, "weight must have shape")
        for weight in (torch.ones(2, 6), torch.ones(1), torch.tensor(1.0))
    ),
    ("rms_norm", (INPUT.long(), None, 1e-6), ValueError, "not floating point"),
    ("embedding", (torch.tensor([13]), torch.randn(13, 2)), IndexError, "index"),
    ("embedding", (torch.tensor([-1]), torch.randn(13, 2)), IndexError, "index"),
    ("apply_rotary_emb", (torch.randn(3, 2, 8), *[torch.randn(3, 5)] * 2), ValueError, "10.*8"),
    (
        "rotary_embedding",
        (torch.randn(3, 16), torch.randn(3, 8), torch.arange(3), torch.randn(9, 10), 8),
        ValueError,
        "10.*8",
    ),
    (
        "rotary_embedding_single",
        (torch.randn(3, 16), torch.arange(3), torch.randn(9, 10), 8),
        ValueError,
        "10.*8",
    ),
    ("dual_chunk_rotary_embedding", dual_chunk(11, 6, 6), ValueError, "local_size=6"),
    ("dual_chunk_rotary_embedding", dual_chunk(11, 6, -1), ValueError, "local_size=-1"),
    ("dual_chunk_rotary_embedding", dual_chunk(10, 6, 1), ValueError, "10 rows.*need 11"),
    ("bidirectional_attention", (Q, KV[:, :, :1].expand(1, 3, 3, 8), KV), ValueError, "heads"),
    ("causal_attention", (Q, KV[:, :, :1].expand(1, 3, 3, 8), KV), ValueError, "heads"),
    (
        "causal_attention",
        (Q, KV.repeat(1, 1, 2, 1)[:, :, :3], KV.repeat(1, 1, 2, 1)[:, :, :3]),
        ValueError,
        "4 query heads, 3 key heads",
    ),
    ("causal_attention", (Q, KV, KV, None, 0), ValueError, "window=0"),
    ("causal_attention", (Q[:0], KV[:0], KV[:0], None, -2), ValueError, "window=-2"),
    ("varlen_attention", (Q[0], KV[0], KV[0], CU, CU, None, True, 0), ValueError, "window=0"),
    ("varlen_attention", (Q[0], KV[0], KV[0], CU, CU, None, False, 2), ValueError, "causal=True"),
    ("varlen_attention", (Q[0], KV[0, :, :1].expand(3, 3, 8), KV[0], CU, CU), ValueError, "heads"),
    *(
        (
            "fused_add_rms_norm",
            (INPUT, residual, None, 1e-6),
            ValueError,
            "x_residual must be .*2, 6",
        )
        for residual in (INPUT[0], INPUT[:1], INPUT[None], INPUT.double(), INPUT[:, :5])
    ),
    *(
        ("rms_norm_gated", (INPUT, weight, None, 1e-6), ValueError, "weight must have shape")
        for weight in (torch.randn(1), torch.randn(2, 6), torch.randn(3, 2, 6), torch.tensor(1.0))
    ),
]

LONG = torch.randn(2, 7, 2, 8)
DENSE = [
    (Q, KV, LONG[:1]),  # a kernel that trusted the number of values would read beyond the keys
    (Q, KV, KV[:, :2]),
    (Q, LONG, LONG),
    (Q, KV, LONG[:, :3]),
    (Q, KV.repeat(1, 1, 1, 2), KV),
    (Q[0], KV[0], KV[0]),
    (Q, KV[0], KV[0]),
]
PACKED = [(q[0], k[0], v[0]) for q, k, v in (DENSE[0], DENSE[1], DENSE[4])]
FOUND = r"query, key and value must be \(.*q, query_heads, head_size\), .*; found \("
BOUNDS = [(CU, CU[:1]), (CU, CU.float()), (CU.bool(), CU), (CU[None], CU[None]), (CU[0], CU[0])]
INVALID += [
    *(("causal_attention", tensors, ValueError, FOUND) for tensors in DENSE),
    *(("bidirectional_attention", tensors, ValueError, FOUND) for tensors in DENSE),
    *(("varlen_attention", (*tensors, CU, CU), ValueError, FOUND) for tensors in PACKED),
    ("varlen_attention", (Q, KV, KV, CU, CU), ValueError, FOUND),
    *(
        ("varlen_attention", (Q[0], KV[0], KV[0], *bounds), ValueError, "cu_seqlens_q.*; found")
        for bounds in BOUNDS
    ),
    ("varlen_attention", (Q[0], KV[0], KV[0], CU[:0], CU[:0]), ValueError, "cu_seqlens_q is empty"),
]


@pytest.mark.parametrize(
    ("name", "values", "error", "match"),
    INVALID,
    ids=[f"{name}-{i}" for i, (name, *_) in enumerate(INVALID)],
)
def test_documented_errors_whoever_is_chosen(
    name: str, values: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    op = getattr(ir.ops, name)
    for provider in op.supported_providers():
        for call in (op.using(provider), op.torch_op):
            with (
                torch.no_grad(),
                ir.priority({name: [provider]}),
                pytest.raises(error, match=match),
            ):
                call(*values)


WRONG_WEIGHT = [torch.randn(5), torch.randn(6, 1), torch.randn(12)[:7]]


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
@pytest.mark.parametrize("weight", WRONG_WEIGHT, ids=["5", "6x1", "7"])
def test_a_weight_that_does_not_fit_never_reads_beyond_memory(name: str, weight: Tensor) -> None:
    """Providers that check less than native must at least agree with it, or raise."""
    op = getattr(ir.ops, name)
    values = (INPUT,) * (2 if op.allow_inplace else 1) + (weight, 1e-6)
    try:
        expected = op.native(*values)
    except (RuntimeError, ValueError) as error:
        expected = error
    for provider in op.supported_providers():
        with torch.no_grad(), ir.priority({name: [provider]}):
            if isinstance(expected, Exception):
                with pytest.raises((RuntimeError, ValueError)):
                    op(*values)
            else:
                check(op, op(*values), expected, provider)
