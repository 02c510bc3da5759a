"""Kernels that are wrong on purpose, each in its own way, and the check that finds it."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from opweave import ir
from opweave.conformance import Subject
from opweave.ir import donation, rules
from opweave.ir.rules import ALIAS_SAFE, BATCH_INVARIANT, DIFFERENTIABLE, ROUNDS_LESS, ROWWISE
from opweave.ir.testing import restored

PROVIDER = "broken"
rms_norm = ir.ops.rms_norm
add_rms_norm = ir.ops.fused_add_rms_norm
silu_and_mul = ir.ops.silu_and_mul


class Specimen(NamedTuple):
    """A kernel, and the check that finds out what is wrong with it."""

    name: str
    caught_by: str
    place: Callable[[], Any]  # a context in which it is registered, with its op and provider

    @contextmanager
    def registered(self) -> Iterator[Subject]:
        """Have the kernel registered inside the block."""
        with self.place() as (op, provider):
            yield Subject(op, provider)


ZOO: list[Specimen] = []
Kernel = Callable[..., Any]
Pair = tuple[Tensor, Tensor]


def specimen(op: ir.IrOp, caught_by: str, **options: Any) -> Callable[[Kernel], Kernel]:
    """Keep the decorated function as a kernel for *op*; it may take the rest by position."""

    def keep(kernel: Kernel) -> Kernel:
        functools.wraps(op.native, assigned=())(kernel)

        @contextmanager
        def place() -> Iterator[tuple[ir.IrOp, str]]:
            with restored(op):
                op.register_impl(PROVIDER, **options)(kernel)
                yield op, PROVIDER

        ZOO.append(Specimen(kernel.__name__, caught_by, place))
        return kernel

    return keep


def own_op(caught_by: str, provider: str = PROVIDER) -> Callable[[Kernel], Kernel]:
    """Keep what the decorated function declares: an op of its own, with what is wrong."""

    def keep(declare: Kernel) -> Kernel:
        @contextmanager
        def place() -> Iterator[tuple[ir.IrOp, str]]:
            with ir.isolated_registry():
                yield declare(), provider

        ZOO.append(Specimen(declare.__name__, caught_by, place))
        return declare

    return keep


def rows(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor]:
    return (torch.randn(num_tokens, hidden_size, device=device).to(dtype),)


# Values


@specimen(silu_and_mul, "determinism")
def returns_the_same_memory_every_time(x: Tensor) -> Tensor:
    found: Tensor = silu_and_mul.native(x)
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return found
    return buffer_for(found.shape, found.dtype).copy_(found)


@functools.cache
def buffer_for(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@specimen(silu_and_mul, "determinism")
def returns_the_same_memories_in_turn(x: Tensor) -> Tensor:
    found: Tensor = silu_and_mul.native(x)
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return found
    return next(ring_for(found.shape, found.dtype)).copy_(found)


@functools.cache
def ring_for(shape: torch.Size, dtype: torch.dtype) -> Iterator[Tensor]:
    return itertools.cycle([torch.empty(shape, dtype=dtype) for _ in range(8)])


@specimen(silu_and_mul, "values")
def wrong_last_column(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    out[..., -1:] = 0
    return out


@specimen(silu_and_mul, "values")
def wrong_on_bfloat16_only(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out * 1.05 if x.dtype is torch.bfloat16 else out


@specimen(silu_and_mul, "values")
def wrong_for_odd_sizes(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    whole = out.shape[-1] // 2 * 2  # two at a time, and the rest is forgotten
    out[..., whole:] = 0
    return out


@specimen(silu_and_mul, "values")
def wrong_beyond_1024_tokens(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    out[1024:] = 0
    return out


@specimen(silu_and_mul, "values")
def writes_into_a_single_token(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    if x.shape[0] == 1:
        x.zero_()
    return out


@specimen(ir.ops.static_quant_int8, "values")
def every_code_one_too_large(x: Tensor, scale: Tensor) -> Tensor:
    codes: Tensor = ir.ops.static_quant_int8.native(x, scale)
    return codes.clamp(max=126) + 1


@specimen(ir.ops.paged_attention, "values")
def zeros_where_everybody_decodes(*args: Any) -> Tensor:
    out: Tensor = ir.ops.paged_attention.native(*args)
    query, seq_lens = args[0], args[4]
    return out * 0 if seq_lens.numel() == query.shape[0] > 2 else out


@specimen(ir.ops.paged_attention, "values")
def multiplies_the_rest_of_the_cache_by_zero(*args: Any) -> Tensor:
    out: Tensor = ir.ops.paged_attention.native(*args)
    out += 0 * args[2].sum()
    return out


@specimen(silu_and_mul, "dimensions")
def wrong_with_two_dimensions_of_rows(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out * 0 if x.ndim > 2 else out


@specimen(silu_and_mul, "combinations")
def wrong_for_odd_sizes_with_steps(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    if out.shape[-1] % 2 and not x.is_contiguous():
        out[..., -1:] = 0
    return out


@specimen(silu_and_mul, "threads")
def wrong_outside_the_main_thread(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out if threading.current_thread() is threading.main_thread() else out * 0


@specimen(silu_and_mul, "threads")
def wrong_with_three_threads(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out * 0 if torch.get_num_threads() == 3 else out


@specimen(silu_and_mul, "inference_mode")
def asks_for_versions(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or x._version >= 0:
        return silu_and_mul.native(x)  # type: ignore[no-any-return]
    raise AssertionError


@specimen(silu_and_mul, "extremes")
def loses_the_last_nan(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    out[..., -1:] = out[..., -1:].nan_to_num()
    return out


@specimen(rms_norm, "values")
def float64_through_float32(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    narrow = None if weight is None else weight.float()
    return rms_norm.native(x.float(), narrow, *rest).to(x.dtype)  # type: ignore[no-any-return]


@specimen(ir.ops.linear, "values", supports_args=rules.dtype("x", torch.bfloat16))
def accumulates_in_bfloat16(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    total = x.new_zeros((*x.shape[:-1], weight.shape[0]))
    for k in range(x.shape[-1]):
        total = total + x[..., k : k + 1] * weight[:, k]
    return total if bias is None else total + bias


@specimen(ir.ops.gelu_new, "values", supports_args=rules.dtype("x", torch.float32))
def rounds_to_float16_on_the_way(x: Tensor) -> Tensor:
    return ir.ops.gelu_new.native(x.half()).float()  # type: ignore[no-any-return]


@specimen(add_rms_norm, "values")
def swaps_its_outputs(x: Tensor, x_residual: Tensor, *rest: Any) -> Pair:
    out, total = add_rms_norm.native(x, x_residual, *rest)
    return total, out


# Options and optional tensors


@specimen(rms_norm, "options")
def epsilon_outside_of_the_root(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    out: Tensor = rms_norm.native(x, weight, 0.0, variance_size)
    measured = x.double()[..., :variance_size].square().mean(-1, keepdim=True).sqrt()
    return (out * (measured / (measured + epsilon))).to(x.dtype)


@specimen(ir.ops.gelu_and_mul, "options")
def ignores_an_option(x: Tensor, approximate: str = "none") -> Tensor:
    d = x.shape[-1] // 2
    return functional.gelu(x[..., :d]) * x[..., d:]


@specimen(rms_norm, "none")
def takes_no_weight_for_zero(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    given = x.new_zeros(x.shape[-1]) if weight is None else weight
    return rms_norm.native(x, given, *rest)  # type: ignore[no-any-return]


@specimen(rms_norm, "dtypes")
def ignores_a_weight_of_another_dtype(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    own = weight if weight is None or weight.dtype is x.dtype else None
    return rms_norm.native(x, own, *rest)  # type: ignore[no-any-return]


# Layouts


def contiguous_strides(x: Tensor) -> tuple[int, ...]:
    return torch.empty(x.shape, device="meta").stride()


@specimen(silu_and_mul, "layouts")
def ignores_strides(x: Tensor) -> Tensor:
    taken = x.as_strided(x.shape, contiguous_strides(x))
    return silu_and_mul.native(taken)  # type: ignore[no-any-return]


@specimen(silu_and_mul, "layouts")
def ignores_the_offset(x: Tensor) -> Tensor:
    return silu_and_mul.native(x.as_strided(x.shape, x.stride(), 0))  # type: ignore[no-any-return]


@specimen(silu_and_mul, "layouts")
def reads_past_the_row(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    if x.ndim == 2 and x.shape[0] and x.stride(0) > x.shape[1]:
        after = x.as_strided((x.shape[0], 1), x.stride(), x.storage_offset() + x.shape[1])
        out[:, -1:] += after
    return out


@specimen(silu_and_mul, "layouts")
def wrong_with_rows_repeated(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    if 0 in x.stride():
        out[1:] = 0
    return out


# Empty batches and extreme numbers


@specimen(silu_and_mul, "empty")
def fails_on_an_empty_batch(x: Tensor) -> Tensor:
    x.abs().max()
    return silu_and_mul.native(x)  # type: ignore[no-any-return]


@specimen(silu_and_mul, "extremes")
def flushes_nan(x: Tensor) -> Tensor:
    return silu_and_mul.native(x).nan_to_num(nan=0.0)  # type: ignore[no-any-return]


@specimen(rms_norm, "extremes", supports_args=rules.dtype("x", torch.float16))
def squares_in_float16(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    measured = x[..., :variance_size].square().float().mean(-1, keepdim=True)
    y = x.float() * torch.rsqrt(measured + epsilon)
    return (y if weight is None else y.to(weight.dtype) * weight).to(x.dtype)


# Metadata


@own_op("metadata", "native")
def wrong_fake() -> ir.IrOp:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    op = ir.register_op(doubled)
    op.register_input_generator(rows)
    op.register_fake(lambda x: x.new_empty((x.shape[0], 2 * x.shape[1])))
    return op


@specimen(rms_norm, "metadata")
def wrong_dtype(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    return rms_norm.native(x, weight, *rest).float()  # type: ignore[no-any-return]


@specimen(silu_and_mul, "metadata")
def wrong_strides(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out.transpose(0, -1).contiguous().transpose(0, -1)


@specimen(add_rms_norm, "metadata")
def returns_one_output_of_two(x: Tensor, x_residual: Tensor, *rest: Any) -> Pair:
    return add_rms_norm.native(x, x_residual, *rest)[:1]  # type: ignore[no-any-return]


# Memory


@specimen(silu_and_mul, "mutation")
def mutates_its_input(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    x[..., : x.shape[-1] // 2] = out
    return out


@specimen(silu_and_mul, "mutation")
def writes_around_its_input(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    if x.ndim == 2 and x.shape[0] and x.stride(0) > x.shape[1]:
        x.as_strided((x.shape[0], 1), x.stride(), x.storage_offset() + x.shape[1]).zero_()
    return out


@own_op("mutation")
def returns_a_view_of_its_input() -> ir.IrOp:
    def clamped(x: Tensor) -> Tensor:
        return x.clamp(-1e30, 1e30)

    op = ir.register_op(clamped)
    op.register_input_generator(rows)
    op.register_impl(PROVIDER)(lambda x: x.view(x.shape))
    return op


@specimen(add_rms_norm, "mutation")
def returns_two_views_of_one_memory(
    x: Tensor, x_residual: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    both = torch.stack(add_rms_norm.native(x, x_residual, *rest))
    return both[0], both[1]


@specimen(silu_and_mul, "determinism")
def leaves_a_number_unwritten(x: Tensor) -> Tensor:
    right: Tensor = silu_and_mul.native(x)
    out = torch.empty_like(right)
    out[1:] = right[1:]
    out[:1, 1:] = right[:1, 1:]
    return out


@specimen(silu_and_mul, "determinism")
def not_deterministic(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out + out * torch.rand_like(out) * torch.finfo(x.dtype).eps * 2


@specimen(rms_norm, "staleness")
def keeps_what_it_made_of_a_weight(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    if weight is None or torch.compiler.is_compiling() or type(weight) is not Tensor:
        return rms_norm.native(x, weight, *rest)  # type: ignore[no-any-return]
    return rms_norm.native(x, prepared(weight)[0], *rest)  # type: ignore[no-any-return]


@functools.cache
def prepared(weight: Tensor) -> tuple[Tensor, Tensor]:
    return weight.clone(), weight  # kept, or another tensor could have its identity


@specimen(ir.ops.embedding, "staleness")
def keeps_the_ids(input_ids: Tensor, weight: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or type(weight) is not Tensor:
        return ir.ops.embedding.native(input_ids, weight)  # type: ignore[no-any-return]
    return ir.ops.embedding.native(prepared(input_ids)[0], weight)  # type: ignore[no-any-return]


@specimen(silu_and_mul, "global_state")
def changes_the_default_dtype(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return silu_and_mul.native(x)  # type: ignore[no-any-return]


@specimen(silu_and_mul, "global_state")
def leaves_grad_mode_on(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    torch.set_grad_enabled(True)
    return out


@specimen(silu_and_mul, "global_state")
def draws_random_numbers(x: Tensor) -> Tensor:
    torch.rand(1)
    return silu_and_mul.native(x)  # type: ignore[no-any-return]


# Donation


@functools.wraps(add_rms_norm.native, assigned=())
def right_add_rms_norm(x: Tensor, x_residual: Tensor, *rest: Any) -> Pair:
    return add_rms_norm.native(x, x_residual, *rest)  # type: ignore[no-any-return]


@specimen(add_rms_norm, "donation", inplace=True, functional=right_add_rms_norm)
def writes_the_wrong_donated_buffer(
    x: Tensor, x_residual: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    out, total = right_add_rms_norm(x, x_residual, *rest)
    return x.copy_(total), x_residual.copy_(out)


@specimen(add_rms_norm, "donation", inplace=True, functional=right_add_rms_norm)
def writes_into_the_weight(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    found = right_add_rms_norm(x, x_residual, weight, *rest)
    if weight is not None:
        weight.zero_()
    return found


@specimen(add_rms_norm, "aliases", inplace=True, functional=right_add_rms_norm, traits={ALIAS_SAFE})
def wrong_where_donations_overlap(
    x: Tensor, x_residual: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    out, total = right_add_rms_norm(x, x_residual, *rest)
    return x.copy_(out), x_residual.copy_(total)


@specimen(
    add_rms_norm, "donation", inplace=True, functional=right_add_rms_norm, traits={ALIAS_SAFE}
)
def keeps_the_strides_of_slices(x: Tensor, x_residual: Tensor, *rest: Any) -> Pair:
    out, total = right_add_rms_norm(x, x_residual, *rest)
    if donation.overlaps_itself(x):
        return out, total
    return x.copy_(out), total


# Traits


@specimen(rms_norm, "batch_invariance", traits={BATCH_INVARIANT})
def not_batch_invariant(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    out: Tensor = rms_norm.native(x, weight, *rest)
    return torch.nextafter(out, torch.zeros_like(out)) if x.shape[0] > 16 else out


@specimen(rms_norm, "batch_invariance", traits={BATCH_INVARIANT})
def not_batch_invariant_beyond_32(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    out: Tensor = rms_norm.native(x, weight, *rest)
    return torch.nextafter(out, torch.zeros_like(out)) if x.shape[0] > 32 else out


@own_op("rowwise", "native")
def not_rowwise() -> ir.IrOp:
    def centered(x: Tensor) -> Tensor:
        return x - x.mean(0)

    op = ir.register_op(native_traits={ROWWISE})(centered)
    op.register_input_generator(rows)
    return op


@specimen(rms_norm, "rounding", traits={ROUNDS_LESS})
def rounds_more_often(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide[..., :variance_size].square().mean(-1, keepdim=True) + epsilon)
    y = x * scale.to(x.dtype)
    return (y if weight is None else y.to(weight.dtype) * weight).to(x.dtype)


@specimen(rms_norm, "gradients", traits={DIFFERENTIABLE})
def wrong_gradient(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    measured = wide[..., :variance_size].detach().square().mean(-1, keepdim=True)
    y = wide * torch.rsqrt(measured + epsilon)
    return (y if weight is None else y.to(weight.dtype) * weight).to(x.dtype)


# Calls and predicates


def positional_only(kernel: Kernel) -> Kernel:
    @functools.wraps(kernel)
    def call(*args: Any) -> Any:
        return kernel(*args)

    return call


@specimen(silu_and_mul, "keywords")
@positional_only
def fails_with_keywords(x: Tensor) -> Tensor:
    return silu_and_mul.native(x)  # type: ignore[no-any-return]


@specimen(silu_and_mul, "predicate", supports_args=rules.cpu("x"))
def accepts_what_it_fails_on(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        raise RuntimeError("x must be contiguous")
    return silu_and_mul.native(x)  # type: ignore[no-any-return]


def is_small(x: Tensor) -> bool:
    return bool((x.abs() < 1e4).all())


@specimen(silu_and_mul, "predicate", supports_args=is_small)
def predicate_reads_numbers(x: Tensor) -> Tensor:
    return silu_and_mul.native(x)  # type: ignore[no-any-return]


def has_few_tokens(x: Tensor) -> bool:
    return x.shape[0] <= 16


@specimen(silu_and_mul, "predicate", supports_args=has_few_tokens)
def predicate_depends_on_the_batch(x: Tensor) -> Tensor:
    return silu_and_mul.native(x)  # type: ignore[no-any-return]


def knows_the_dtype(x: Tensor) -> bool:
    return {torch.float32: True, torch.bfloat16: True}[x.dtype]


@specimen(silu_and_mul, "predicate", supports_args=knows_the_dtype)
def predicate_raises(x: Tensor) -> Tensor:
    return silu_and_mul.native(x)  # type: ignore[no-any-return]


@specimen(rms_norm, "misfits")
def computes_what_native_refuses(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    cut = None if weight is None else weight[: x.shape[-1]]
    return rms_norm.native(x, cut, *rest)  # type: ignore[no-any-return]


# Compiled calls


@specimen(silu_and_mul, "compiled")
def wrong_where_it_is_traced(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out if type(x) is Tensor else out + 1


@specimen(silu_and_mul, "dynamic_shapes", supports_args=rules.ndim("x", 2))
def recompiles_for_each_size(x: Tensor) -> Tensor:
    tokens = int(x.shape[0])
    return silu_and_mul.native(x.reshape(tokens, -1))  # type: ignore[no-any-return]
