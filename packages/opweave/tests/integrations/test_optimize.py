"""``opweave.optimize``: modules of any model on opweave's ops, against the model as it was."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import opweave
from opweave import ir, transaction
from opweave.optimization.attention import attention

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
    "Gemma": (transformers.GemmaForCausalLM, {**GROUPED, "head_dim": 16}, {"rms_norm"}),
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


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
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


@pytest.mark.filterwarnings("ignore::opweave.ir.errors.GradientFallbackWarning")
@pytest.mark.parametrize(
    ("family", "dtype", "autocast"),
    [
        ("Llama", torch.float32, torch.bfloat16),
        ("Bert", torch.float32, torch.float16),
        ("Phi3", torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_autocast(family: str, dtype: torch.dtype, autocast: torch.dtype) -> None:
    """Results have the dtypes of the model as it was, with and without gradients."""
    model, ids = make(family, dtype), prompt()
    with torch.autocast("cpu", autocast):
        before = model(ids)[0]
        opweave.optimize(model)
        with torch.no_grad():
            after = model(ids)[0]
        differentiable = model(ids)[0]
    for result in (after, differentiable):
        assert result.dtype == before.dtype
        room = 0.06 * before.abs().max().item()
        torch.testing.assert_close(result, before, atol=room, rtol=0)


@pytest.mark.parametrize("mixed", [False, True])
def test_attention_under_autocast_returns_the_dtype_of_sdpa(mixed: bool) -> None:
    query = torch.randn(1, 4, 3, 16)
    key = query.bfloat16() if mixed else query
    with torch.autocast("cpu", torch.bfloat16):
        result, _ = attention(nn.Identity(), query, key, key, None)
    assert result.dtype == torch.bfloat16


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


LOADING = """
import sys, torch

config, model, ids = (torch.load(path, weights_only=False) for path in sys.argv[1:4])
with torch.no_grad():
    torch.save((type(model)(config).eval()(ids)[0].shape, model(ids)[0]), sys.argv[4])
"""


def test_another_process_loads_a_model(tmp_path: Path) -> None:
    """One that does not import opweave; also the configuration alone names a known attention."""
    model, ids = make("Qwen3"), prompt()
    opweave.optimize(model)
    paths = [tmp_path / name for name in ("config", "model", "ids", "logits")]
    for value, path in zip((model.config, model, ids), paths, strict=False):
        torch.save(value, path)
    subprocess.run([sys.executable, "-c", LOADING, *map(str, paths)], check=True)
    shape, result = torch.load(paths[-1])
    assert torch.equal(result, logits(model, ids))
    assert shape == result.shape
    model.config.save_pretrained(tmp_path)
    assert "opweave" not in (tmp_path / "config.json").read_text()


TOWER = {**SIZES, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def clip(text: str, vision: str) -> Any:
    config = transformers.CLIPConfig(
        text_config=TOWER, vision_config={**TOWER, "image_size": 16, "patch_size": 8}
    )
    kinds = {"text_config": text, "vision_config": vision}
    return transformers.CLIPModel._from_config(config, attn_implementation=kinds).eval()


def llava(text: str, vision: str) -> Any:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES),
        vision_config=transformers.CLIPVisionConfig(**TOWER, image_size=16, patch_size=8),
        image_token_index=5,
    )
    kinds = {"text_config": text, "vision_config": vision}
    model = transformers.LlavaForConditionalGeneration._from_config(
        config, attn_implementation=kinds
    )
    return model.eval()


@pytest.mark.parametrize(("text", "vision"), [("eager", "sdpa"), ("sdpa", "eager"), ("sdpa",) * 2])
@pytest.mark.parametrize("build", [clip, llava])
def test_each_part_of_a_model_has_an_attention_of_its_own(
    build: Callable[[str, str], Any], text: str, vision: str
) -> None:
    torch.manual_seed(0)
    model = build(text, vision)
    parts = model.config.text_config, model.config.vision_config

    def run() -> Any:
        ids = prompt().where(prompt() != 5, 6)
        ids[:, 2:6] = 5  # four image tokens
        with torch.no_grad():
            outputs = model(input_ids=ids, pixel_values=torch.ones(2, 3, 16, 16))
        return outputs[0]

    before = run()
    for _ in range(2):  # a second round finds the model as it was
        report = opweave.optimize(model)
        expected = ["opweave" if kind == "sdpa" else kind for kind in (text, vision)]
        assert [part._attn_implementation for part in parts] == expected
        count = sum("causal_attention" in ops for ops in report.replaced.values())
        assert count == 1 + expected.count("opweave"), "that of the whole model, too"
        torch.testing.assert_close(run(), before, atol=1e-5, rtol=1e-5)
        opweave.restore(model)
        assert [part._attn_implementation for part in parts] == [text, vision]
        assert torch.equal(run(), before)


def test_a_wrapped_model_of_transformers() -> None:
    model, ids = make("Llama"), prompt()
    wrapper = nn.Sequential(model)
    expected = logits(model, ids)
    report = opweave.optimize(wrapper)
    assert report.replaced["0"] == ("causal_attention", "bidirectional_attention")
    torch.testing.assert_close(logits(wrapper, ids), expected, atol=1e-5, rtol=1e-5)
    opweave.restore(wrapper)
    assert torch.equal(logits(wrapper, ids), expected)


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


@pytest.mark.filterwarnings("ignore::opweave.ir.errors.GradientFallbackWarning")
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(("family", "op"), [("Llama", "causal"), ("Bert", "bidirectional")])
def test_training_steps(family: str, op: str, padding: str) -> None:
    """Attention runs SDPA: without a mask as an op, with one as transformers does."""
    model, ids = make(family), prompt()
    mask = None if padding == "none" else torch.ones_like(ids)
    if mask is not None:
        mask[0, slice(4) if padding == "left" else slice(5, None)] = 0

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        result = model(ids, attention_mask=mask)[0]
        seen = result if mask is None else result[mask.bool()]
        seen.square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    before = step()
    opweave.optimize(model)
    with ir.record() as log:
        recorded = step()
    attention = {"aten": 2} if mask is None else None
    assert log.selected_impls.get(f"{op}_attention") == attention
    for after in (recorded, step()):
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)


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


class Gated(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(size, 2 * size)
        self.down_proj = nn.Linear(size, size)
        self.act_fn = nn.SiLU()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.dropout(self.act_fn(gate) * up))


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Plain(nn.Module):
    """An RMS norm."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.eps) * self.weight


def variant(forward: Callable[..., Tensor], **members: Any) -> type[nn.Module]:
    """Return a class like :class:`Plain` with this ``forward``."""
    return type("Variant", (Plain,), {"forward": forward, **members})


def _not_today() -> Tensor:
    raise RuntimeError("not today")


class Buffered(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Scaled(Plain):
    """An RMS norm whose weights are logarithms: like ``1 + weight`` if all of them are zero."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.eps) * self.weight.exp()


class Noisy(Plain):
    """An RMS norm with dropout in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class AnyWidthNorm(nn.Module):
    """A norm without weights that checks the width; ``Norm`` in the name makes it a candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.dim = 1e-6, 16

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self.dim
        return rms(x, self.eps)


# Modules that look like RMS norms, and why they are left alone. Those after the first four equal
# one on a random input of three dimensions.
LEFT_ALONE: dict[str, tuple[type[nn.Module], str]] = {
    "a sum": (
        variant(lambda self, x: x * torch.rsqrt(x.square().sum(-1, True) + 1e-6) * self.weight),
        "differs",
    ),
    "another dtype": (variant(lambda self, x: x.double() * self.weight), "returns torch.float64"),
    "another shape": (variant(lambda self, x: x[0] * self.weight), "returns"),
    "an error": (variant(lambda self, x: _not_today()), "not today"),
    "logarithms": (Scaled, "differs from rms_norm"),
    "training": (Noisy, "differs in training mode"),
    "a buffer": (Buffered, "buffers"),
    "an attribute": (
        variant(lambda self, x: Plain.forward(self, x) * self.scale, scale=1.0),
        "reads the attribute 'scale'",
    ),
    "an attribute that a method reads": (
        variant(
            lambda self, x: Plain.forward(self, x) * self._scale(),
            _scale=lambda self: self.options["scale"],
            options={"scale": 1.0},
        ),
        "reads the attribute 'options'",
    ),
    "absolute weights": (
        variant(lambda self, x: rms(x, self.eps) * self.weight.abs()), "other weights",
    ),
    "four dimensions": (
        variant(lambda self, x: Plain.forward(self, x) * (1 + (x.ndim == 4))),
        "differs from rms_norm",
    ),
    "one dimension": (
        variant(lambda self, x: Plain.forward(self, x) * (1 + (x.ndim == 1))),
        "differs from rms_norm",
    ),
    "no rows": (
        variant(lambda self, x: Plain.forward(self, x) if x.numel() else x.new_zeros(3)), "returns",
    ),
    "strides": (
        variant(lambda self, x: Plain.forward(self, x) * (1 if x.is_contiguous() else 2)),
        "differs from rms_norm",
    ),
    "float64": (
        variant(lambda self, x: rms(x.double(), self.eps).to(x.dtype) * self.weight), "float64",
    ),
    "finite values": (
        variant(lambda self, x: Plain.forward(self, torch.nan_to_num(x, nan=0.0))),
        "infinite or NaN",
    ),
    "another epsilon": (variant(lambda self, x: rms(x, 1e-2) * self.weight), "differs"),
    "a fixed epsilon": (variant(lambda self, x: rms(x, 1e-6) * self.weight), "another eps"),
    "two epsilons": (
        variant(lambda self, x: rms(x, self.variance_epsilon) * self.weight, variance_epsilon=1e-6),
        "another",
    ),
    "a call of its own": (
        variant(Plain.forward, __call__=lambda self, x: Plain.forward(self, x) * 2), "__call__",
    ),
    "no gradients": (variant(lambda self, x: Plain.forward(self, x.detach())), "gradients differ"),
    "one width": (AnyWidthNorm, "does not run on a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_modules_that_are_left_alone(name: str) -> None:
    kind, reason = LEFT_ALONE[name]
    module = kind()
    before, rng = dict(vars(module)), torch.get_rng_state()
    state = copy.deepcopy(module.state_dict())
    report = opweave.optimize(nn.Sequential(module))
    assert reason in report.kept["0"]
    assert report.replaced == {}
    assert "not replaced" in str(report)
    assert type(module) is kind
    assert vars(module) == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


class Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


@pytest.mark.parametrize(
    ("parts", "forward"),
    [
        (
            {"scale": nn.Parameter(torch.ones(()))},
            lambda self, x: Gated.forward(self, x) * self.scale,
        ),
        ({"after": nn.Identity()}, lambda self, x: self.after(Gated.forward(self, x))),
        ({"act_fn": Swish()}, Gated.forward),
    ],
    ids=["a weight", "a module", "an activation with a weight"],
)
def test_gated_mlps_with_more_parts_are_left_alone(
    parts: dict[str, Any], forward: Callable[..., Tensor]
) -> None:
    module = type("Variant", (Gated,), {"forward": forward})()
    for name, part in parts.items():
        setattr(module, name, part)
    assert set(opweave.optimize(module).replaced) == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize("inference", [False, True])  # inference tensors have no gradients
def test_modules_that_are_plain_are_replaced(inference: bool) -> None:
    with torch.inference_mode(inference):
        module = Plain()
    assert opweave.optimize(module).replaced == {"": ("rms_norm",)}


def test_norms_take_the_widths_of_the_module() -> None:
    model = nn.RMSNorm(64, eps=1e-6, elementwise_affine=False)
    assert opweave.optimize(model).replaced == {"": ("rms_norm",)}
    with pytest.raises(RuntimeError, match="64"):
        model(torch.randn(2, 32))
    plain, narrow = Plain(), torch.randn(2, 1)
    expected = plain(narrow)
    opweave.optimize(plain)
    assert torch.equal(plain(narrow), expected), "broadcast"


def test_a_kernel_that_raises_for_some_modules_is_named_and_counted() -> None:
    op, model = ir.ops.layer_norm, nn.Sequential(*(nn.LayerNorm(n) for n in (8, 4, 8, 4)))
    with transaction.begin() as entered:

        @op.register_impl("narrow_raises")
        def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
            if x.shape[-1] == 4:
                raise OSError("no bus")
            return functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon)

    try:
        with ir.priority(layer_norm=["narrow_raises"]):
            report = opweave.optimize(model)
    finally:
        entered.roll_back()
    assert [*report.kept] == ["1", "3"]
    (reason,) = set(report.kept.values())
    assert "no bus [in layer_norm:narrow_raises (" in reason
    assert any(line.split()[:2] == ["LayerNorm", "2"] for line in str(report).splitlines())


def test_settings_that_are_changed_afterwards() -> None:
    for module in (Plain(), nn.RMSNorm(16, eps=1e-6), nn.LayerNorm(16)):
        original, x = copy.deepcopy(module), torch.randn(2, 16)
        assert opweave.optimize(module).replaced
        for change in ({"eps": 0.5}, {"eps": 1}, {"weight": nn.Parameter(torch.randn(16))}):
            for each in (module, original):
                for name, value in change.items():
                    setattr(each, name, value)
            with torch.no_grad():
                torch.testing.assert_close(module(x), original(x))


def test_gated_mlps_whose_parts_are_changed_afterwards() -> None:
    gelu, dropout = Gated(), Gated()
    gelu.act_fn = nn.GELU()
    x = torch.randn(3, 16)
    for model in (gelu, dropout):
        assert opweave.optimize(model).replaced[""]
    gelu.act_fn.approximate = "tanh"
    dropout.dropout.p = 1.0
    original = copy.deepcopy(gelu)
    opweave.restore(original)
    with torch.no_grad():
        torch.testing.assert_close(gelu(x), original(x), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(dropout(x), dropout.down_proj.bias.expand(3, -1))
    dropout.dropout = nn.ReLU()
    original = copy.deepcopy(dropout)
    opweave.restore(original)
    with torch.no_grad():
        torch.testing.assert_close(dropout(x), original(x))


def test_gated_mlps_that_are_changed_afterwards() -> None:
    model, x = Gated(), torch.randn(3, 16)
    attributes = set(vars(model))
    assert opweave.optimize(model).replaced[""] == ("silu_and_mul",)
    copied = pickle.loads(pickle.dumps(model))
    for each in (model, copied):
        kept = copy.deepcopy(each)
        opweave.restore(kept)
        assert set(vars(kept)) == attributes
        seen: list[Tensor] = []
        each.act_fn.register_forward_hook(lambda *_, seen=seen: seen.append(x))
        with torch.no_grad():
            torch.testing.assert_close(each(x), kept(x))
        assert len(seen) == 1
        each.act_fn = kept.act_fn = nn.Tanh()
        with torch.no_grad():
            torch.testing.assert_close(each(x), kept(x))


def test_dropout_in_a_gated_mlp() -> None:
    model = Gated()
    model.dropout.p = 0.5
    assert "differs in training mode" in opweave.optimize(model).kept[""]


class Registered(nn.Linear):
    def __init_subclass__(cls, *, name: str) -> None:
        super().__init_subclass__()


def on_the_instance() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: nn.Linear(8, 8, dtype=torch.complex64), "complex64"),
        (lambda: nn.Linear(8, 8).to(torch.float8_e4m3fn), "float8_e4m3fn|Float8_e4m3fn"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "are parametrized"),
        (lambda: Registered(8, 8), "cannot be derived from: .*'name'"),
        (lambda: nn.LazyLinear(8), "uninitialized parameter"),
        (lambda: nn.Linear(4, 4, device="meta"), "meta device"),
        (on_the_instance, "on the instance"),
    ],
    ids=["complex", "float8", "parametrized", "class", "lazy", "meta", "instance"],
)
def test_linear_layers_that_are_left_alone(layer: Callable[[], nn.Module], reason: str) -> None:
    model = nn.Sequential(layer())
    kind = type(model[0])
    assert re.search(reason, opweave.optimize(model).kept["0"])
    assert type(model[0]) is kind


def test_tensors_of_other_kinds() -> None:
    model, ragged = nn.Sequential(nn.Linear(8, 8)), [torch.randn(3, 8), torch.randn(5, 8)]
    nested = torch.nested.nested_tensor(ragged, layout=torch.jagged)
    expected = model(nested).values()
    opweave.optimize(model)
    torch.testing.assert_close(model(nested).values(), expected)


def test_the_default_device_does_not_matter() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with torch.device("meta"):
        assert opweave.optimize(model).replaced == {"0": ("linear",)}


def test_a_bound_forward_outlives_the_replacement() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(3, 8)
    expected = layer(x)
    opweave.optimize(layer)
    bound = layer.forward
    opweave.restore(layer)
    assert torch.equal(bound(x), expected)


def test_parametrizations_and_restore() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8)
    expected = model(x)
    opweave.optimize(model)
    nn.utils.parametrizations.weight_norm(model[1])
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(ValueError, match=r"cannot restore '1': .*remove_parametrizations\(\)"):
        opweave.restore(model)
    assert type(model[0]) is not nn.Linear
    nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    opweave.restore(model)
    assert {type(layer) for layer in model} == {nn.Linear}
    torch.testing.assert_close(model(x), expected)
