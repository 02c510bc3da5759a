"""``opweave.optimize``: modules of any model on opweave's ops, against the model as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import opweave

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
# Class, config, and the ops that the model must run.
FAMILIES: dict[str, tuple[Any, Any, set[str]]] = {
    "Llama": (transformers.LlamaForCausalLM, GROUPED, {"rms_norm"}),
    "Qwen2": (transformers.Qwen2ForCausalLM, GROUPED, {"rms_norm"}),
    "Qwen3": (transformers.Qwen3ForCausalLM, {**GROUPED, "head_dim": 16}, {"rms_norm"}),
    "Gemma": (
        transformers.GemmaForCausalLM,
        {**GROUPED, "head_dim": 16},
        {"rms_norm"},
    ),
    "Gemma2": (transformers.Gemma2ForCausalLM, {**GROUPED, "head_dim": 16}, {"rms_norm"}),
    "Phi3": (transformers.Phi3ForCausalLM, GROUPED, {"rms_norm", "silu_and_mul"}),
    "Olmo2": (transformers.Olmo2ForCausalLM, GROUPED, {"rms_norm"}),
    "Mixtral": (transformers.MixtralForCausalLM, GROUPED, {"rms_norm"}),
    "GPTNeoX": (transformers.GPTNeoXForCausalLM, SIZES, {"layer_norm"}),
    "OPT": (
        transformers.OPTForCausalLM,
        {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64},
        {"layer_norm"},
    ),
    "Bert": (transformers.BertModel, SIZES, {"layer_norm"}),
}


def make(family: str, dtype: torch.dtype = torch.float32) -> Any:
    cls, config, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = cls(cls.config_class(**config))
    for parameter in model.parameters():  # norms that do nothing would hide a wrong one
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model.to(dtype).eval()


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids)[0].float()


def prompt() -> Tensor:
    return torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers(family: str, dtype: torch.dtype) -> None:
    model, ids = make(family, dtype), prompt()
    before = logits(model, ids)
    report = opweave.optimize(model)
    after = logits(model, ids)
    room = 1e-5 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(after, before, atol=room * before.abs().max().item(), rtol=0)
    ran = {op for ops in report.replaced.values() for op in ops}
    assert ran >= {"linear", *FAMILIES[family][2]}
    opweave.restore(model)
    assert torch.equal(logits(model, ids), before)


def test_greedy_tokens_and_explanation() -> None:
    model, ids = make("Llama"), prompt()
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)
    opweave.optimize(model)
    assert torch.equal(model.generate(ids, **options), expected)
    static = model.generate(ids, cache_implementation="static", **options)
    assert torch.equal(static, expected)
    with torch.no_grad():
        ran = opweave.explain(model, ids).selected_impls
    assert ran["rms_norm"] == {"opweave_c": 5}
    assert sum(ran["linear"].values()) == 15
    assert "causal_attention" in ran


def test_sparse_attention_is_left_alone() -> None:
    """The tokens that an indexer leaves out are masked for transformers' own attention only."""
    latent = {"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "v_head_dim": 10}
    sparse = {"index_topk": 3, "index_n_heads": 8, "index_head_dim": 16, "first_k_dense_replace": 2}
    config = {**SIZES, **latent, **sparse, "qk_rope_head_dim": 8}
    torch.manual_seed(0)
    model = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**config)).eval()
    ids = prompt()
    before = logits(model, ids)
    opweave.optimize(model)
    torch.testing.assert_close(logits(model, ids), before, atol=1e-5, rtol=1e-5)


def test_padded_batches_take_the_mask() -> None:
    model, ids = make("Llama"), prompt()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask)[0]
        opweave.optimize(model)
        found = model(ids, attention_mask=mask)[0]
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)


def test_a_model_stays_what_it_was() -> None:
    model, ids = make("Qwen3"), prompt()
    names, classes = list(model.state_dict()), [type(m).__name__ for m in model.modules()]
    memory = [p.data_ptr() for p in model.parameters()]
    opweave.optimize(model)
    assert list(model.state_dict()) == names
    assert [type(m).__name__ for m in model.modules()] == classes
    assert [p.data_ptr() for p in model.parameters()] == memory
    assert all(isinstance(m, nn.Linear) for m in model.modules() if type(m).__name__ == "Linear")
    expected = logits(model, ids)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(logits(other, ids), expected)
        opweave.restore(other)
    assert opweave.optimize(model).outcomes == (), "a second call has nothing to do"
    double = logits(model.double(), ids)  # other dtypes run, too
    torch.testing.assert_close(double, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::opweave.ir.errors.GradientFallbackWarning")
def test_hooks_and_gradients() -> None:
    model, ids = make("Llama"), prompt()
    seen: list[str] = []
    model.model.norm.register_forward_hook(lambda *_: seen.append("norm"))
    model(ids)[0].square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    opweave.optimize(model)
    model(ids)[0].square().mean().backward()
    assert seen == ["norm", "norm"]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4, msg=name)


class Odd(nn.Module):
    """Looks like an RMS norm, but is not one."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)
        self.eps = 1e-6
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * self.weight


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6), "differs"),
        (lambda x: x.double(), "returns torch.float64"),
        (lambda x: x[0], "returns"),
        (lambda x: (_ for _ in ()).throw(RuntimeError("not today")), "not today"),
    ],
    ids=["sum", "double", "shape", "raises"],
)
def test_what_differs_is_left_alone(function: Callable[[Tensor], Tensor], reason: str) -> None:
    model = nn.Sequential(Odd(function))
    report = opweave.optimize(model)
    assert report.replaced == {}
    assert reason in report.kept["0"]
    assert "not replaced" in str(report)
    assert type(model[0]) is Odd


def test_an_epsilon_that_counts_is_seen() -> None:
    class Other(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.rms_norm(x, (8,), self.weight, 1e-2)

    model = nn.Sequential(Other(8, eps=1e-6))
    assert "differs" in opweave.optimize(model).kept["0"]


def test_modules_of_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-5)).eval()
    x = torch.randn(3, 16)
    expected = model(x)
    assert opweave.optimize(model).replaced == {
        "0": ("linear",),
        "1": ("layer_norm",),
        "2": ("rms_norm",),
    }
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert "count" in str(opweave.optimize(nn.Sequential(nn.Linear(4, 4))))
    assert str(opweave.optimize(nn.Sequential())) == "no module that opweave could replace"


def test_what_is_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"optimize\(\) takes a torch.nn.Module, not str"):
        opweave.optimize("llama")  # type: ignore[arg-type]


def test_a_forward_of_an_instance_is_left_alone() -> None:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    assert "on the instance" in opweave.optimize(nn.Sequential(layer)).kept["0"]


def test_parameters_without_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    assert "meta device" in opweave.optimize(model).kept["0"]
