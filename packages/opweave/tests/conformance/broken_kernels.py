"""A table of wrong kernels, by kind; ``opweave verify`` must reject each of them."""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opweave import ir
from opweave.ir.rules import cpu

KINDS: dict[str, tuple[str, str]] = {}
"""The kind and the op of each provider."""
_calls = itertools.count()
_kept: dict[Any, Any] = {}
Arguments = dict[str, Any]


def _eager(x: Any) -> bool:
    return type(x) is Tensor and not torch.compiler.is_compiling()


def _scaled(out: Any, arguments: Arguments) -> Any:
    """Damage every output a little more than the tolerance."""
    if isinstance(out, tuple):
        return (_scaled(out[0], arguments), *out[1:])
    return out * 1.25 if out.is_floating_point() and out.element_size() > 1 else out.flip(-1)


def wrong(
    kind: str, op_name: str, when: Callable[[Arguments], Any], damage: Any = _scaled, **options: Any
) -> None:
    """Register a kernel for an op that damages native's result under a condition."""
    op = getattr(ir.ops, op_name)
    names = list(inspect.signature(op.native).parameters)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, op.bind(*args, **kwargs), strict=True))
        out = op.native(*arguments.values())
        first = arguments[names[0]]
        return damage(out, arguments) if _eager(first) and when(arguments) else out

    functools.wraps(op.native, assigned=("__annotations__",))(kernel)
    provider = f"wrong_{len(KINDS)}"
    KINDS[provider] = kind, op_name
    op.register_impl(provider, **options)(kernel)


def _last(out: Tensor, arguments: Arguments) -> Tensor:
    out[..., -1:] = 0
    return out


def _always(arguments: Arguments) -> bool:
    return True


silu, rms, add_rms = "silu_and_mul", "rms_norm", "fused_add_rms_norm"

wrong("tail", silu, lambda a: a["x"].shape[-1] // 2 % 4 == 3, _last)
wrong("tail", rms, lambda a: a["x"].shape[-1] % 32 == 31, _last)
wrong("tail", "linear", lambda a: a["weight"].shape[0] % 8 == 5, _last)
wrong("alignment", silu, lambda a: a["x"].data_ptr() % 16)
wrong("alignment", rms, lambda a: a["weight"] is not None and a["weight"].data_ptr() % 8)
wrong("layout", silu, lambda a: a["x"].ndim == 2 and a["x"].stride(-1) == 2)
wrong("layout", "linear", lambda a: not a["weight"].is_contiguous() and a["x"].shape[0] == 1)
wrong("layout", rms, lambda a: a["x"].ndim == 3 and a["x"].stride(0) < a["x"].stride(1))
wrong("dtype", rms, lambda a: a["x"].dtype is torch.float16 and a["x"].shape[-1] > 512)
wrong("dtype", "layer_norm", lambda a: a["x"].dtype is torch.bfloat16 and a["bias"] is None)
wrong("scalar", rms, lambda a: a["variance_size"] == 7)
wrong("scalar", "causal_attention", lambda a: a["window"] == 1)
wrong("scalar", "causal_attention", lambda a: a["soft_cap"] and a["window"])
wrong("scalar", "rotary_embedding", lambda a: not a["is_neox_style"] and a["query"].shape[0] > 4)
wrong("optional", "linear", lambda a: a["bias"] is None and a["x"].shape[0] == 1)
wrong("optional", rms, lambda a: a["weight"] is None and a["x"].dtype is torch.float16)
wrong("sequence", "varlen_attention", lambda a: (a["cu_seqlens_q"].diff() == 1).all())
wrong("sequence", "varlen_attention", lambda a: len(a["cu_seqlens_q"]) > 6)
wrong("sequence", "paged_attention", lambda a: (a["seq_lens"] % a["key_cache"].shape[2] == 0).any())
wrong("large", silu, lambda a: a["x"].shape[0] > 65535)
wrong("large", rms, lambda a: a["x"].shape[-1] > 32768)
wrong("large", "embedding", lambda a: a["weight"].shape[0] > 65536)
wrong("large", "linear", lambda a: a["weight"].shape[0] > 10_000)
wrong("numbers", silu, lambda a: a["x"].isnan().any(), lambda out, a: out.nan_to_num(nan=0.0))
wrong("numbers", rms, lambda a: a["x"].abs().amax() > 1e4 if a["x"].numel() else False)
wrong("numbers", "topk_softmax", lambda a: a["gating_output"].isinf().any())
wrong("nondeterminism", rms, lambda a: a["x"].shape[0] > 300 and next(_calls) % 3 == 0)
wrong(
    "nondeterminism",
    silu,
    lambda a: a["x"].numel(),
    lambda out, a: out + torch.rand_like(out) * 1e-6,
)


def _unwritten(out: Tensor, arguments: Arguments) -> Tensor:
    new = torch.empty_like(out)
    new[..., :-1] = out[..., :-1]
    return new


def _reads_behind(out: Tensor, arguments: Arguments) -> Tensor:
    x = arguments["x"]
    ctypes.string_at(x.untyped_storage().data_ptr() + x.untyped_storage().nbytes(), 64)
    return out


def _reads_before(out: Tensor, arguments: Arguments) -> Tensor:
    ctypes.string_at(arguments["x"].untyped_storage().data_ptr() - 64, 64)
    return out


def _writes_behind(out: Tensor, arguments: Arguments) -> Tensor:
    if out.numel() % 16:
        ctypes.memset(out.data_ptr() + out.untyped_storage().nbytes(), 1, 4)
    return out


def _cached(key: Callable[[Tensor], Any]) -> Callable[[Tensor, Arguments], Tensor]:
    def damage(out: Tensor, arguments: Arguments) -> Tensor:
        weight = arguments["weight"]
        place = key, key(weight), weight.shape, weight.dtype
        kept = _kept.setdefault(place, (weight.clone(), weight))[0]
        result: Tensor = ir.ops.rms_norm.native(
            arguments["x"], kept, arguments["epsilon"], arguments["variance_size"]
        )
        return result

    return damage


def _has_weight(arguments: Arguments) -> bool:
    return arguments["weight"] is not None and arguments["weight"].numel() > 0


def _kept_result(out: Tensor, arguments: Arguments) -> Tensor:
    _kept[next(_calls)] = out.clone()
    return out


def _with_threads(out: Tensor, arguments: Arguments) -> Tensor:
    torch.set_num_threads(2 if torch.get_num_threads() == 1 else 1)
    return out


def _in_one_buffer(out: Tensor, arguments: Arguments) -> Tensor:
    place = out.shape, out.dtype, out.stride()
    result: Tensor = _kept.setdefault(place, torch.empty_like(out)).copy_(out)
    return result


wrong("memory", silu, lambda a: a["x"].shape[-1] > 2, _unwritten)
wrong("memory", silu, lambda a: a["x"].numel(), _reads_behind)
wrong("memory", silu, lambda a: a["x"].numel(), _reads_before)
wrong("memory", silu, lambda a: a["x"].numel(), _writes_behind)
wrong("memory", silu, lambda a: a["x"].numel(), _in_one_buffer)
wrong("cache", rms, _has_weight, _cached(Tensor.data_ptr))
wrong("cache", rms, _has_weight, _cached(lambda w: (w.data_ptr(), w._version)))
wrong("cache", rms, _has_weight, _cached(id))
wrong("leak", silu, lambda a: a["x"].numel(), _kept_result)
wrong("state", silu, _always, _with_threads)
wrong("crash", silu, lambda a: a["x"].shape[-1] == 34, lambda out, a: ctypes.string_at(8))
wrong("predicate", silu, lambda a: False, supports_args=lambda x: time.sleep(0.02) is None)
wrong("predicate", silu, lambda a: False, supports_args=lambda x: bool((x == x).all()))
wrong("gradient", "relu2", _always, lambda out, a: out.detach(), traits={"differentiable"})
wrong("invariance", rms, lambda a: a["x"].shape[0] > 700, lambda out, a: out * (1 + 1e-6),
      traits={"batch_invariant"}, supports_args=cpu("x"))  # fmt: skip
wrong("codes", "static_quant_int8", _always, lambda out, a: out.clamp(min=-127, max=126))
wrong("codes", "dynamic_per_token_quant_fp8", lambda a: a["x"].dtype is torch.bfloat16)
wrong("experts", "fused_experts", lambda a: (a["topk_ids"] < 0).any())
wrong("experts", "topk_softmax", lambda a: a["topk"] == 1 and a["gating_output"].shape[1] > 16)
