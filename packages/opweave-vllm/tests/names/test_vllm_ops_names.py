"""Names of vLLM that ops of other packages import: sizes, parameters, groups, ops, experts."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, functional

from opweave import layers
from opweave.ir.errors import SettingError
from opweave.ir.ops.fused_experts import EXPERT_ACTIVATIONS
from opweave.layers import TensorParallel, tensor_parallel
from opweave_vllm.vllm_api import _custom_ops, config, distributed, envs
from opweave_vllm.vllm_api.distributed.utils import is_weak_contiguous
from opweave_vllm.vllm_api.model_executor.layers import fused_moe
from opweave_vllm.vllm_api.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEQuantConfig,
    MoEActivation,
    activation,
)
from opweave_vllm.vllm_api.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from opweave_vllm.vllm_api.model_executor.layers.linear import LinearMethodBase
from opweave_vllm.vllm_api.model_executor.utils import replace_parameter, set_weight_attrs
from opweave_vllm.vllm_api.utils import math_utils
from opweave_vllm.vllm_api.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from opweave_vllm.vllm_api.v1.attention.backends.utils import split_decodes_and_prefills

LAYERS = "opweave_vllm.vllm_api.model_executor.layers"


def test_sizes() -> None:
    for n in range(1, 70):
        powers = [2**i for i in range(8)]
        assert math_utils.next_power_of_2(n) == min(p for p in powers if p >= n)
        assert math_utils.prev_power_of_2(n) == max(p for p in powers if p <= n)
        for m in range(1, 9):
            assert math_utils.round_up(n, m) == min(k for k in range(n, n + m) if k % m == 0)
            assert math_utils.round_down(n, m) == max(k for k in range(n + 1) if k % m == 0)
            assert math_utils.cdiv(n, m) * m == math_utils.round_up(n, m)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("activation", ["SiluAndMul", "GeluAndMul"]),
        ("conv", ["Conv3dLayer"]),
        ("fused_moe.layer", ["FusedMoE"]),
        ("layernorm", ["RMSNorm", "GemmaRMSNorm"]),
        ("linear", ["ColumnParallelLinear", "RowParallelLinear"]),
        ("logits_processor", ["LogitsProcessor"]),
        ("mamba.mamba_mixer2", ["MambaMixer2"]),
        ("mla", ["MLAModules"]),
        ("rotary_embedding", ["RotaryEmbedding", "get_rope"]),
        ("rotary_embedding.common", ["ApplyRotaryEmb"]),
        ("vocab_parallel_embedding", ["ParallelLMHead", "VocabParallelEmbedding"]),
    ],
)
def test_layers_have_vllms_module_names(module: str, names: list[str]) -> None:
    found = import_module(f"{LAYERS}.{module}")
    for name in names:
        assert getattr(found, name) is getattr(layers, name)
    assert all(hasattr(found, name) for name in found.__all__)


def test_the_method_of_a_layer_is_a_linear_method() -> None:
    assert isinstance(layers.ReplicatedLinear(4, 4).quant_method, LinearMethodBase)


def test_a_replaced_parameter_keeps_its_loader() -> None:
    layer = Linear(3, 2)
    set_weight_attrs(layer.weight, {"weight_loader": print, "output_dim": 0})
    new = torch.ones(4, dtype=torch.int8)
    new.is_packed = True  # type: ignore[attr-defined]
    replace_parameter(layer, "weight", new)
    assert layer.weight.equal(new)
    assert layer.weight.weight_loader is print  # type: ignore[attr-defined]
    assert layer.weight.is_packed
    assert not hasattr(layer.weight, "output_dim")
    address = layer.weight.data_ptr()
    replace_parameter(layer, "weight", new + 1, prefer_copy=True)
    assert layer.weight.data_ptr() == address
    assert layer.weight.tolist() == [2] * 4
    replace_parameter(layer, "weight", torch.ones(2), prefer_copy=True)
    assert layer.weight.dtype is torch.float32
    replace_parameter(layer, "bias", None)
    assert layer.bias is None
    assert "bias" in layer._parameters


def test_groups() -> None:
    x = torch.arange(8.0).view(2, 4)
    both = TensorParallel(1, 2, lambda t: t * 2, lambda t, dim=-1: torch.cat([t, t], dim))
    assert distributed.tensor_model_parallel_reduce_scatter(x) is x
    with tensor_parallel(both):
        scattered = distributed.tensor_model_parallel_reduce_scatter(x)
        assert scattered.equal(x[:, 2:] * 2)
        assert scattered.is_contiguous()
        assert distributed.get_ep_group().world_size == 2
        for get in (
            distributed.get_dp_group,
            distributed.get_pp_group,
            distributed.get_pcp_group,
            distributed.get_dcp_group,
        ):
            assert (get().world_size, get().rank_in_group) == (1, 0)
        with pytest.raises(AssertionError, match="3 is not divisible by 2"):
            distributed.tensor_model_parallel_reduce_scatter(torch.ones(2, 3))


def test_weakly_contiguous() -> None:
    x = torch.empty(4, 6)
    assert is_weak_contiguous(x)
    assert is_weak_contiguous(x.t())
    assert not is_weak_contiguous(x[:, :3])


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    monkeypatch.delenv("OPWEAVE_BATCH_INVARIANT", raising=False)
    assert envs.VLLM_BATCH_INVARIANT is False
    assert not envs.is_set("VLLM_BATCH_INVARIANT")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert envs.VLLM_BATCH_INVARIANT is True
    assert envs.is_set("VLLM_BATCH_INVARIANT")
    assert envs.VLLM_USE_V1
    monkeypatch.setitem(envs.environment_variables, "VLLM_MINE", lambda: 7)
    assert envs.VLLM_MINE == 7
    assert "VLLM_MINE" in dir(envs)
    with pytest.raises(AttributeError, match=r"'VLLM_USE_V11' .* Did you mean 'VLLM_USE_V1'"):
        _ = envs.VLLM_USE_V11


def test_passes() -> None:
    found = config.CompilationConfig(
        mode=3,
        options={"codegen": False},
        pass_config=config.PassConfig(eliminate_noops=False, fuse_norm_quant=False),
    )
    assert found.options == {"noop_elimination": False, "fusion": False, "codegen": False}
    assert config.CompilationConfig(pass_config=config.PassConfig()).options == {}
    with pytest.raises(SettingError, match="one switch for all"):
        config.PassConfig(fuse_norm_quant=True, fuse_act_quant=False)
    wanted = config.VllmConfig(compilation_config=found)
    assert config.get_current_vllm_config_or_none() is None
    with config.set_current_vllm_config(wanted):
        assert config.get_current_vllm_config_or_none() is wanted
        assert config.get_cached_compilation_config() is found


def test_expert_activations() -> None:
    assert [each.value for each in MoEActivation] == [*EXPERT_ACTIVATIONS]
    assert MoEActivation.from_str("gelu_pytorch_tanh") is MoEActivation.GELU_TANH
    assert MoEActivation.SILU.is_gated
    assert MoEActivation.SILU.without_mul() is MoEActivation.SILU_NO_MUL
    assert not MoEActivation.SILU_NO_MUL.is_gated
    assert MoEActivation.SITU.without_mul() is MoEActivation.SITU
    with pytest.raises(ValueError, match="unknown expert activation 'tanh'"):
        MoEActivation.from_str("tanh")
    x, out = torch.randn(3, 8), torch.empty(3, 4)
    assert activation.apply_moe_activation(MoEActivation.SILU, out, x) is out
    torch.testing.assert_close(out, functional.silu(x[:, :4]) * x[:, 4:])
    with pytest.raises(ValueError, match="has no alpha"):
        activation.apply_moe_activation(MoEActivation.SILU, out, x, alpha=1.0)
    with pytest.raises(ValueError, match=r"unknown constants \['gamma'\]"):
        activation.apply_moe_activation(MoEActivation.SILU, out, x, gamma=1.0)


def test_configurations_of_experts() -> None:
    ranks = FusedMoEParallelConfig(tp_size=2, tp_rank=1)
    found = FusedMoEConfig(8, 2, 16, 32, 8, torch.float32, moe_parallel_config=ranks)
    assert (found.tp_size, found.tp_rank, found.ep_size) == (2, 1, 1)
    with pytest.raises(AttributeError, match="no attribute 'tq_size'"):
        _ = found.tq_size
    quantized = FusedMoEQuantConfig.make(
        torch.int8, per_act_token_quant=True, w1_scale=torch.ones(2)
    )
    assert quantized.use_int8_w8a8
    assert quantized.is_quantized
    assert not quantized.use_fp8_w8a8
    assert not FusedMoEQuantConfig.make().is_quantized
    with pytest.raises(ValueError, match=r"block_shape=\[128, 128\] exclude each other"):
        FusedMoEQuantConfig.make(per_act_token_quant=True, block_shape=[128, 128])


def test_experts_without_a_router_cannot_be_built() -> None:
    class Mine(fused_moe.RoutedExperts):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine: .* derive from opweave.layers.FusedMoE"):
        Mine(8)
    with pytest.raises(TypeError, match="abstract"):
        fused_moe.FusedMoERouter()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="abstract"):
        AttentionBackend()  # type: ignore[abstract]


def batch(lengths: list[int], **options: Tensor) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    zeros = torch.zeros(len(lengths), dtype=torch.int32)
    total = int(starts[-1])
    return CommonAttentionMetadata(
        *(starts, starts, zeros, len(lengths), total, max(lengths), 0, zeros[:, None], zeros),
        **options,
    )


@pytest.mark.parametrize(
    ("lengths", "options", "expected"),
    [
        ([1, 1, 5, 9], {}, (2, 2, 2, 14)),
        ([1, 1], {}, (2, 0, 2, 0)),
        ([4, 1], {}, (0, 2, 0, 5)),
        ([2, 2, 1, 7], {"decode_threshold": 2}, (3, 1, 5, 7)),
        ([2, 2, 1, 7], {"decode_threshold": 2, "require_uniform": True}, (2, 2, 4, 8)),
        ([2, 2, 0], {"decode_threshold": 2, "require_uniform": True}, (3, 0, 4, 0)),
    ],
)
def test_decodes_come_first(
    lengths: list[int], options: dict[str, int], expected: tuple[int, ...]
) -> None:
    assert split_decodes_and_prefills(batch(lengths), **options) == expected  # type: ignore[arg-type]


def test_short_extends_can_be_prefills() -> None:
    prefilling = batch([1, 1, 5], is_prefilling=torch.tensor([False, True, True]))
    found = split_decodes_and_prefills(prefilling, treat_short_extends_as_decodes=False)
    assert found == (1, 2, 1, 6)
    with pytest.raises(ValueError, match="needs is_prefilling"):
        split_decodes_and_prefills(batch([1]), treat_short_extends_as_decodes=False)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (_custom_ops.silu_and_mul, functional.silu),
        (_custom_ops.gelu_and_mul, functional.gelu),
        (_custom_ops.gelu_tanh_and_mul, lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
def test_activation_ops(
    op: Callable[[Tensor, Tensor], None], expected: Callable[[Tensor], Tensor]
) -> None:
    x, out = torch.randn(3, 8), torch.empty(3, 4)
    op(out, x)
    torch.testing.assert_close(out, expected(x[:, :4]) * x[:, 4:])


def test_ops_that_write_to_their_arguments() -> None:
    x, out = torch.randn(3, 2, 4), torch.empty(3, 4)
    _custom_ops.moe_sum(x, out)
    torch.testing.assert_close(out, x.sum(1))
    layer = layers.RotaryEmbedding(4, 4, 16, 10000.0, True, torch.float32)
    positions, query, key = torch.arange(3), torch.randn(3, 8), torch.randn(3, 4)
    expected = layer.forward_native(positions, query, key)
    table = layer.cos_sin_cache
    _custom_ops.rotary_embedding(positions, query, key, 4, table, True)
    torch.testing.assert_close((query, key), expected)
    with pytest.raises(NotImplementedError, match="rotary_embedding does not support inverse"):
        _custom_ops.rotary_embedding(positions, query, key, 4, table, True, inverse=True)


def test_quantizing_ops() -> None:
    x = torch.randn(3, 8).clamp(-3, 3)
    for found, scale in (
        _custom_ops.scaled_fp8_quant(x),
        _custom_ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True),
        _custom_ops.scaled_fp8_quant(x, torch.tensor([0.02])),
        _custom_ops.scaled_fp8_quant(x, output=torch.empty(3, 8, dtype=torch.float8_e4m3fn)),
    ):
        assert found.dtype is torch.float8_e4m3fn
        torch.testing.assert_close(found.float() * scale, x, rtol=0.07, atol=0.01)
    assert _custom_ops.scaled_fp8_quant(x)[1].shape == (1,)
    for found, scale, zero in (
        _custom_ops.scaled_int8_quant(x),
        _custom_ops.scaled_int8_quant(x, torch.tensor([0.03])),
    ):
        assert zero is None
        torch.testing.assert_close(found.float() * scale, x, rtol=0, atol=0.02)
    with pytest.raises(NotImplementedError, match="scaled_int8_quant does not support azp"):
        _custom_ops.scaled_int8_quant(x, azp=torch.zeros(1))
    with pytest.raises(
        AttributeError, match=r"does not have _custom_ops.gptq_gemm; it has advance"
    ):
        _ = _custom_ops.gptq_gemm
