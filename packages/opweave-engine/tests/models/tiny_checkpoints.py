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
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

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
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
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
# The type of the fixture `checkpoint`: gives a directory, and transformers' model in it.
Checkpoints = Callable[[str], tuple[Path, Any]]


def hf_model(kind: str, **changes: Any) -> Any:
    """Return transformers' model of that kind, every weight of it random."""
    model_type, differences = KINDS[kind]
    config = AutoConfig.for_model(model_type, **{**SIZES, **differences, **changes})
    torch.manual_seed(sum(map(ord, kind)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                # Large enough that every part of the model shows in the logits.
                parameter.copy_(torch.randn_like(parameter) * 0.12)
    return model


def write_checkpoint(path: Path, kind: str, **changes: Any) -> Any:
    """Save a model of that kind with a tokenizer in *path*; return transformers' model."""
    model = hf_model(kind, **changes)
    model.save_pretrained(path)
    write_tokenizer(path)
    return model


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
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_input_names": names}))
    return model


def random_ids(seed: int, count: int) -> list[int]:
    """Return *count* token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()
    return ids
