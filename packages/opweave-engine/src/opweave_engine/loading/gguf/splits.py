"""How text is split before BPE, by ``tokenizer.ggml.pre``.

Source: the ``pre_tokenizer`` in the ``tokenizer.json`` of the models that the names stand for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from opweave_engine.errors import TokenizerError
from opweave_engine.loading.gguf.file import GgufFile

_PRE = "tokenizer.ggml.pre"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Splits:
    """The steps before BPE.

    Attributes:
        steps: pre-tokenizers, as ``tokenizer.json`` writes them.
        normalizer: likewise.
        ignores_merges: whether a word that is a token is taken whole.
        adds_bos: whether a text begins with the token for that, if the file does not say.
        is_default: whether the file does not name the model's own splits.
    """

    steps: list[dict[str, Any]]
    normalizer: dict[str, Any] | None = None
    ignores_merges: bool = False
    adds_bos: bool = False
    is_default: bool = False


def _bytes(*, splits: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits
    }  # fmt: skip


def _regex(*patterns: str) -> list[dict[str, Any]]:
    """Return the steps that isolate what each of *patterns* matches, one after the other."""
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return [*steps, _bytes(splits=False)]


_DIGITS = {"type": "Digits", "individual_digits": True}
_GPT2 = Splits([_bytes(splits=True)])
_LLAMA3 = Splits(_regex(_WORDS + r"|\p{N}{1,3}" + _REST), None, True, True)
_SMOLLM = Splits([_DIGITS, _bytes(splits=True)])
_QWEN2 = Splits(_regex(_WORDS + r"|\p{N}" + _REST), {"type": "NFC"})
# Source: llama.cpp's LLAMA_VOCAB_PRE_TYPE_DEFAULT, for files that name none or "default".
_DEFAULT = Splits(
    _regex(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),
    is_default=True,
)
_KINDS = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    **dict.fromkeys(("smollm", "starcoder", "refact"), _SMOLLM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("qwen2", "megrez"), _QWEN2),
    "deepseek-r1-qwen": replace(_QWEN2, adds_bos=True),
    "tekken": Splits(_regex(_CASED), None, True, True),
}


def splits_of(file: GgufFile) -> Splits:
    """Return how the tokenizer of *file* splits text.

    Raises:
        TokenizerError: it names a kind that is not supported.
    """
    kind = file.get(_PRE, str, "default")
    if kind not in _KINDS:
        raise TokenizerError(
            f"{file.path} has {_PRE}={kind!r}, which is not supported. Supported: "
            f"{', '.join(_KINDS)}."
        )
    return _KINDS[kind]
