"""Names that packages for vLLM import: context, ranks, quantization, Triton, platform."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from opweave import ir, layers
from opweave.layers import TensorParallel, tensor_parallel
from opweave_vllm.vllm_api import _custom_ops, config, current_platform, distributed
from opweave_vllm.vllm_api.forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
    set_forward_context,
)
from opweave_vllm.vllm_api.model_executor.layers.quantization import QuantizationConfig
from opweave_vllm.vllm_api.model_executor.utils import set_weight_attrs
from opweave_vllm.vllm_api.v1.attention.backends.utils import PAD_SLOT_ID


def test_the_forward_context_is_that_of_the_block() -> None:
    assert not is_forward_context_available()
    with pytest.raises(AssertionError, match="run the layer inside set_forward_context"):
        get_forward_context()
    found = config.VllmConfig()
    with set_forward_context({"layer": 1}, found, no_compile_layers={"layer": "it"}, num_tokens=3):
        assert get_forward_context().attn_metadata == {"layer": 1}
        assert get_forward_context().no_compile_layers == {"layer": "it"}
        with override_forward_context(ForwardContext(attn_metadata=2)):
            assert get_forward_context().attn_metadata == 2
        assert get_forward_context().attn_metadata == {"layer": 1}
    assert not is_forward_context_available()


def test_tensor_parallel_ranks() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert distributed.get_tensor_model_parallel_world_size() == 1
    assert distributed.tensor_model_parallel_all_reduce(x) is x
    both = TensorParallel(1, 2, lambda t: t * 2, lambda t, dim=-1: torch.cat([t, t], dim))
    with tensor_parallel(both):
        assert distributed.get_tensor_model_parallel_world_size() == 2
        assert distributed.get_tensor_model_parallel_rank() == 1
        assert distributed.get_tp_group().is_last_rank
        assert torch.equal(distributed.tensor_model_parallel_all_reduce(x), x * 2)
        assert distributed.tensor_model_parallel_all_gather(x, 0).shape == (4, 3)
    assert distributed.divide(6, 3) == 2
    with pytest.raises(AssertionError, match="7 is not divisible by 3"):
        distributed.divide(7, 3)
    first, second = distributed.split_tensor_along_last_dim(torch.ones(2, 4), 2, True)
    assert first.is_contiguous()
    assert first.shape == second.shape == (2, 2)


def test_a_quantization_config_can_be_derived() -> None:
    class Mine(QuantizationConfig):
        get_name = get_supported_act_dtypes = get_quant_method = lambda self, *args: None
        get_min_capability = get_config_filenames = from_config = lambda *args: None

    assert Mine().packed_modules_mapping == {}
    assert Mine.get_from_keys({"b": 2}, ["a", "b"]) == 2
    assert Mine.get_from_keys_or({}, ["a"], 3) == 3
    with pytest.raises(ValueError, match=r"none of \['a'\] is in the quantization config"):
        Mine.get_from_keys({}, ["a"])
    with pytest.raises(TypeError, match="abstract"):
        QuantizationConfig()  # type: ignore[abstract]


WITHOUT_TRITON = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else found(name, *rest)
from opweave_vllm.vllm_api.triton_utils import HAS_TRITON, tl, triton
@triton.autotune(configs=[triton.Config({}, num_warps=1)], key=["n"])
@triton.jit
def kernel(x, n: tl.constexpr): pass
assert not HAS_TRITON and callable(kernel)
try:
    kernel[(1,)](3, 4)
except (ModuleNotFoundError, TypeError) as error:
    print(error)
"""


def test_modules_with_triton_kernels_are_imported_without_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True
    )
    assert "needs Triton, which is not installed" in done.stdout


def test_the_platform_says_what_kernels_need() -> None:
    assert current_platform.fp8_dtype() is torch.float8_e4m3fn
    assert current_platform.dispatch_key == "CPU"
    assert current_platform.num_compute_units() == torch.get_num_threads()
    assert current_platform.opaque_attention_op()


def test_small_names() -> None:
    assert PAD_SLOT_ID == -1
    weight = torch.nn.Parameter(torch.zeros(2))
    set_weight_attrs(weight, {"output_dim": 0})
    assert weight.output_dim == 0  # type: ignore[attr-defined]
    out, x = torch.empty(2, 8), torch.randn(2, 8)
    _custom_ops.rms_norm(out, x, torch.ones(8), 1e-6)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
    assert layers.GroupShape.PER_TOKEN.is_per_token  # type: ignore[attr-defined]
    assert config.get_cached_compilation_config() is config.get_cached_compilation_config()


def test_priorities_are_set_as_attributes() -> None:
    found = config.VllmConfig()
    priorities = found.kernel_config.ir_op_priority
    priorities.rms_norm = "aten"  # type: ignore[attr-defined]
    assert priorities["rms_norm"] == ["aten"]
    with config.set_current_vllm_config(found):
        assert ir.policy_for(ir.ops.rms_norm).priority[0].provider == "aten"
    with pytest.raises(AttributeError, match="no priority is set for an op 'silu_and_mul'"):
        _ = priorities.silu_and_mul  # type: ignore[attr-defined]
