"""Small random checkpoints of every supported kind, written by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GptOssConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

BOS, EOS, PAD = 1, 2, 0
VOCABULARY = 320
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 3.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
# Name -> (model type, what differs from SIZES).
LLAMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "one_layer": ("llama", {"num_hidden_layers": 1}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    ),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "head_dim": ("llama", {"head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral_full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4,
                                "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
_MIXTURE: dict[str, Any] = {"num_experts_per_tok": 2}
_MIXTRAL: dict[str, Any] = {**_MIXTURE, "num_local_experts": 6}
_QWEN: dict[str, Any] = {**_MIXTURE, "num_experts": 6, "moe_intermediate_size": 40, "head_dim": 24}
_MAMBA: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 16,
    "n_groups": 2,
    "chunk_size": 4,
}
# The same of models that are made of layers.
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek_v3", {**_DEEPSEEK, "rope_parameters": YARN}),
    "deepseek_direct": (
        "deepseek_v3",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
        },
    ),
    "deepseek_one_layer": (
        "deepseek_v3",
        {**_DEEPSEEK, "num_hidden_layers": 1, "first_k_dense_replace": 0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_GEMMA,
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3_untied": (
        "gemma3_text",
        {**_GEMMA, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "mixtral": ("mixtral", _MIXTRAL),
    "mixtral_window": (
        "mixtral",
        {**_MIXTRAL, "sliding_window": 5, "tie_word_embeddings": True, "head_dim": 32},
    ),
    "mixtral_one_layer": ("mixtral", {**_MIXTRAL, "num_hidden_layers": 1}),
    "qwen3_moe": ("qwen3_moe", {**_QWEN, "norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "qwen3_moe",
        {
            **_QWEN,
            "mlp_only_layers": [0],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
    ),
    "mamba2": ("mamba2", _MAMBA),
    "mamba2_one_group": (
        "mamba2",
        {**_MAMBA, "n_groups": 1, "use_bias": True, "use_conv_bias": False},
    ),
    "mamba2_tied": ("mamba2", {**_MAMBA, "tie_word_embeddings": True, "residual_in_fp32": False,
                               "conv_kernel": 3}),
    "mamba2_one_layer": ("mamba2", {**_MAMBA, "num_hidden_layers": 1}),
    "mamba2_limits": ("mamba2", {**_MAMBA, "time_step_limit": [0.3, 0.8], "chunk_size": 256}),
    "bert": ("bert", {}),
    "bert_one_layer": ("bert", {"num_hidden_layers": 1}),
    "bert_gelu_new": ("bert", {"hidden_act": "gelu_new", "type_vocab_size": 3}),
}  # fmt: skip
KINDS = LLAMAS | LAYERS
# The type of the fixture `checkpoint`: gives a directory, and transformers' model in it.
Checkpoints = Callable[[str], tuple[Path, Any]]


def hf_model(kind: str, **changes: Any) -> Any:
    """Return transformers' model of that kind, with random weights and *changes* of its config."""
    torch.manual_seed(sum(map(ord, kind)))
    model_type, differences = KINDS[kind]
    config = AutoConfig.for_model(model_type, **{**SIZES, **differences, **changes})
    factory = AutoModel if model_type == "bert" else AutoModelForCausalLM
    attention = {} if model_type == "mamba2" else {"attn_implementation": "eager"}
    return randomized(factory.from_config(config, **attention))


def randomized(model: Any) -> Any:
    """Give every weight a random value, large enough to show in the results."""
    model = model.float().eval()
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, weight in weights.items():
            if "e_score_correction_bias" in name:
                weight.copy_(torch.randn_like(weight) * 0.1)
            elif isinstance(weight, torch.nn.Parameter):
                center = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
                spread = 0.3 if "norm" in name.lower() else 0.12
                weight.copy_(center + spread * torch.randn_like(weight))
    return model


def gpt_oss_block() -> tuple[dict[str, Any], Any]:
    """Return a configuration of gpt-oss, and transformers' block of experts."""
    differences = {"num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 0.5}
    config = GptOssConfig(**{**SIZES, **differences})
    torch.manual_seed(5)
    return config.to_dict(), randomized(GptOssMLP(config))


def write_checkpoint(path: Path, kind: str, **changes: Any) -> Any:
    """Save a model of that kind with a tokenizer in *path*; return transformers' model."""
    model = hf_model(kind, **changes)
    model.save_pretrained(path)
    write_tokenizer(path)
    return model


def edit_config(path: Path, file: str = "config.json", **changes: Any) -> None:
    """Change values of a JSON file of a checkpoint, or write the file."""
    values = json.loads((path / file).read_text()) if (path / file).exists() else {}
    (path / file).write_text(json.dumps({**values, **changes}))


def write_tokenizer(path: Path, *, adds_bos: bool = True) -> None:
    """Save a byte-level tokenizer of 4 special tokens, the bytes, and a few merges."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the quick brown fox jumps over the lazy dog and then it sleeps — naïve façade, 東京 🙂 "
    tokenizer.train_from_iterator([text * 20], trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(path)


def write_cross_encoder(path: Path, kind: str, **changes: Any) -> Any:
    """Save a sequence classifier with one label; return transformers' model.

    Only BERT's tokenizer gives the second text another token type.
    """
    sizes = {**SIZES, "num_labels": 1, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4}
    config = AutoConfig.for_model(kind, **{**sizes, **changes})
    torch.manual_seed(sum(map(ord, kind)))
    model = AutoModelForSequenceClassification.from_config(config).float().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(path)
    write_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    second = int(kind == "bert")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair=f"<s> $A </s> $B:{second} </s>:{second}",
        special_tokens=[("<s>", BOS), ("</s>", EOS)],
    )
    tokenizer.save(str(path / "tokenizer.json"))
    names = ["input_ids", *(["token_type_ids"] if second else []), "attention_mask"]
    edit_config(path, "tokenizer_config.json", model_input_names=names)
    return model


def random_ids(seed: int, count: int) -> list[int]:
    """Return *count* token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()
    return ids
