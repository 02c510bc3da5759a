"""The files of a checkpoint directory that a GGUF file stands for, its tokenizer among them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opweave.errors import shown
from opweave_engine.errors import TokenizerError
from opweave_engine.load.gguf import GgufFile, config_of

# How text is split before BPE, by ``tokenizer.ggml.pre``.
#
# Source: the ``pre_tokenizer`` in the ``tokenizer.json`` of the models that the names stand for.


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


# The ``tokenizer.json`` and ``tokenizer_config.json`` that a GGUF file's metadata stands for.
#
# Source: the keys ``tokenizer.ggml.*`` of
# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the splits that
# ``tokenizer.ggml.pre`` names are those of the models' published ``tokenizer.json``.


_log = logging.getLogger(__name__)

_MODEL, _TOKENS, _TYPES = (f"tokenizer.ggml.{key}" for key in ("model", "tokens", "token_type"))
_CONTROL, _USER_DEFINED = 3, 4  # of token_type
_SPACE = "▁"
# Control tokens that end an answer, which files do not always name as such.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")


def tokenizer_json(file: GgufFile) -> dict[str, Any]:
    """Return the object of a ``tokenizer.json``.

    Raises:
        TokenizerError: the tokenizer is of a kind that is not supported, or incomplete.
    """
    kind = file.metadata.get(_MODEL)
    if kind == "gpt2":
        pipeline = _byte_level(file)
    elif kind == "llama":
        pipeline = _sentence_piece(file)
    else:
        raise TokenizerError(
            f"{file.path} has {_MODEL}={kind!r}, which is not supported. Supported: 'gpt2' (BPE of "
            "bytes), 'llama' (SentencePiece)."
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(file)),
        "post_processor": _post_processor(file),
        **pipeline,
    }


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return the object of a ``tokenizer_config.json``, the chat templates included."""
    tokens = _tokens(file)
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := _id(file, key)) is not None:
            config[f"{name}_token"] = tokens[token]
    template = file.metadata.get("tokenizer.chat_template")
    named = file.metadata.get("tokenizer.chat_templates")
    if template is not None and isinstance(named, list) and named:
        others = {name: file.metadata.get(f"tokenizer.chat_template.{name}") for name in named}
        config["chat_template"] = {"default": template, **others}
    elif template is not None:
        config["chat_template"] = template
    return config


def end_tokens(file: GgufFile) -> list[int]:
    """Return the ids that end an answer."""
    named = (_id(file, key) for key in ("eos", "eot", "eom"))
    ids = {token for token in named if token is not None}
    tokens = _tokens(file)
    ids |= {i for i, kind in enumerate(_types(file)) if kind == _CONTROL and tokens[i] in _ENDS}
    return sorted(ids)


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.metadata.get(_TOKENS)
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise TokenizerError(f"{file.path} has no list of texts {_TOKENS}.")
    return tokens


def _types(file: GgufFile) -> list[int]:
    """Return the type of each token; an empty list if the file does not say."""
    types = file.metadata.get(_TYPES)
    return [] if types is None else _numbers(file, _TYPES, "iu").tolist()


def _numbers(file: GgufFile, key: str, kinds: str) -> NDArray[Any]:
    """Return the array *key*, which has a number for each token.

    Args:
        file: with that key.
        key: of the metadata.
        kinds: of dtypes that the numbers may have, as numpy abbreviates them.
    """
    numbers, count = file.metadata.get(key), len(_tokens(file))
    if isinstance(numbers, np.ndarray) and numbers.dtype.kind in kinds and len(numbers) == count:
        return numbers
    raise TokenizerError(f"{file.path} has no {key} with a number for each of the {count} tokens.")


def _id(file: GgufFile, kind: str) -> int | None:
    """Return the id of the *kind* of token, or None."""
    # llama.cpp writes the largest number, or -1, for a token that does not exist.
    token = file.get(f"tokenizer.ggml.{kind}_token_id", int, -1)
    count = len(_tokens(file))
    if token in (-1, 2**32 - 1):
        return None
    if not 0 <= token < count:
        raise TokenizerError(
            f"{file.path} has tokenizer.ggml.{kind}_token_id={token}, but {count} tokens."
        )
    return int(token)


def _flag(file: GgufFile, key: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, int):
        raise TokenizerError(
            f"{file.path} has tokenizer.ggml.{key}={shown(value)}; it must be a boolean."
        )
    return bool(value)


def _is_gemma(file: GgufFile) -> bool:
    return file.architecture.startswith("gemma")


def _added(file: GgufFile) -> Iterator[dict[str, Any]]:
    types = _types(file)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    named = {_id(file, kind) for kind in ("bos", "eos", "unknown", "padding")}
    for token, text in enumerate(_tokens(file)):
        kind = types[token] if types else None
        if kind == _CONTROL or token in named:
            yield {"id": token, "content": text, **flags, "special": True}
        elif kind == _USER_DEFINED and (text.strip(" ") or not _is_gemma(file)):
            yield {"id": token, "content": text, **flags, "special": False}


def _post_processor(file: GgufFile) -> dict[str, Any] | None:
    """Return what adds the first and the last token, where the file asks for it."""
    is_sentence_piece = file.metadata.get(_MODEL) == "llama"
    default = is_sentence_piece or splits_of(file).adds_bos
    sequence: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    for kind, place, absent in (("bos", 0, default), ("eos", 2, False)):
        token = _id(file, kind)
        if token is None or not _flag(file, f"add_{kind}_token", absent):
            continue
        text = _tokens(file)[token]
        sequence.insert(place, {"SpecialToken": {"id": text, "type_id": 0}})
        special[text] = {"id": text, "ids": [token], "tokens": [text]}
    if not special:
        return None
    return {
        "type": "TemplateProcessing",
        "single": sequence,
        "pair": [*sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }


def _byte_level(file: GgufFile) -> dict[str, Any]:
    """Return the parts of a BPE tokenizer of bytes."""
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not merges:
        raise TokenizerError(f"{file.path} has no list tokenizer.ggml.merges.")
    splits = splits_of(file)
    if splits.is_default:
        _log.warning(
            "%s does not name the model's pre-tokenizer (tokenizer.ggml.pre): text is split by "
            "llama.cpp's default rule, and tokens may differ from those of the model's training. "
            "Convert the model again with a current llama.cpp",
            file.path,
        )
    pairs = [merge.split(" ", 1) for merge in merges]
    if (wrong := next((m for m, p in zip(merges, pairs, strict=True) if len(p) < 2), None)) is not (
        None
    ):
        raise TokenizerError(f"{file.path} has the merge {wrong!r}, which is not a pair.")
    return {
        "normalizer": splits.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits.steps},
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": _bpe(_tokens(file), pairs, ignore_merges=splits.ignores_merges),
    }


def _sentence_piece(file: GgufFile) -> dict[str, Any]:
    """Return the parts of a SentencePiece tokenizer, as BPE with a byte for unknown characters.

    The pair with the best score is merged first; the score is that of the result.
    """
    tokens: Sequence[str] = _tokens(file)
    scores = _numbers(file, "tokenizer.ggml.scores", "f").tolist()
    prefix = _flag(file, "add_space_prefix", True)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    restored = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    begin = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    end = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    if _is_gemma(file):
        # Its file has runs of spaces in place of marks, and its scores are not in the order of the
        # merges; that of the tokens is.
        tokens = [text if text.strip(" ") else text.replace(" ", _SPACE) for text in tokens]
        scores = [-float(token) for token in range(len(tokens))]
    unknown = _id(file, "unknown")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*begin, replaced]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [restored, {"type": "ByteFallback"}, {"type": "Fuse"}, *end],
        },
        "model": {
            **_bpe(tokens, _merges(tokens, scores)),
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
    ids = {text: token for token, text in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for text, score in zip(tokens, scores, strict=True):
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right], left, right))
    return [[left, right] for *_, left, right in sorted(found)]


def _bpe(
    tokens: Sequence[str], merges: Sequence[Sequence[str]], *, ignore_merges: bool = False
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": {text: token for token, text in enumerate(tokens)},
        "merges": merges,
    }


# The JSON files of a checkpoint directory that a GGUF file stands for.


# Names of sampling parameters in the file, and those in generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def _generation(file: GgufFile) -> dict[str, Any]:
    values = {ours: file.metadata.get(f"general.sampling.{key}") for key, ours in _SAMPLING.items()}
    # The shortest decimal number that is the same float32: 0.6, not 0.6000000238.
    short = {k: float(str(np.float32(v))) if isinstance(v, float) else v for k, v in values.items()}
    sampling = {key: value for key, value in short.items() if value is not None}
    return {"eos_token_id": end_tokens(file), **sampling}


_FILES: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "config.json": config_of,
    "generation_config.json": _generation,
    "tokenizer.json": tokenizer_json,
    "tokenizer_config.json": tokenizer_config,
}
_NO_VOCABULARY = ("none", "no_vocab")  # llama.cpp's names for files without a tokenizer


def has_json(file: GgufFile, name: str) -> bool:
    """Return whether *file* stands for the JSON file *name*; without a vocabulary, for few."""
    kind = file.get("tokenizer.ggml.model", str, "none")
    return name == "config.json" or (name in _FILES and kind not in _NO_VOCABULARY)


def json_of(file: GgufFile, name: str) -> dict[str, Any] | None:
    """Return the object of the JSON file *name*, or None if *file* stands for no such file."""
    return _FILES[name](file) if has_json(file, name) else None
