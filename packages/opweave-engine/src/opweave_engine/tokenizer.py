"""Text to token ids and back."""

from __future__ import annotations

import codecs
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from opweave.config import EngineConfig
from opweave_engine.errors import EngineError, PromptError, TokenizerError, require
from opweave_engine.load.checkpoint import FILE, Checkpoint, generation_folder

# Tokenizer settings besides tokens: the supported ones, and warnings about others.


_log = logging.getLogger(__name__)

_CONFIG = "tokenizer_config.json"


def follow_settings(backend: Any, checkpoint: Checkpoint, bos: int | None, eos: int | None) -> None:
    """Make *backend*, a ``tokenizers.Tokenizer``, encode as transformers does at inference.

    Disables padding and truncation, and applies ``split_special_tokens``. Logs unsupported settings
    that would change the tokens.

    Args:
        backend: its special tokens were added.
        checkpoint: where ``tokenizer_config.json`` is.
        bos, eos: the ids that begin and end a text; None: there is no such token.
    """
    for name in ("padding", "truncation"):
        if (setting := getattr(backend, name)) is not None:
            _log.info("tokenizer.json: %s=%s is disabled at inference", name, setting)
    backend.no_padding()
    backend.no_truncation()
    config = checkpoint.json(_CONFIG) or {}
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    for note in _notes(backend, config, bos, eos):
        _log.warning("%s: %s", checkpoint.path / _CONFIG, note)


def has_token_types(checkpoint: Checkpoint) -> bool:
    """Return whether the tokenizer gives the model token type ids; transformers' default."""
    names = (checkpoint.json(_CONFIG) or {}).get("model_input_names")
    return not isinstance(names, list) or "token_type_ids" in names


def _notes(backend: Any, config: dict[str, Any], bos: int | None, eos: int | None) -> list[str]:
    """Return a note for each setting that is not followed."""
    notes = []
    ids = backend.encode("").ids
    begins = ids[:1] == [bos]
    for name, adds in (("bos", begins), ("eos", ids[begins:][-1:] == [eos])):
        configured = config.get(f"add_{name}_token")
        if isinstance(configured, bool) and configured != adds:
            notes.append(
                f"add_{name}_token={configured} is not followed: the post-processor in "
                f"tokenizer.json decides, and {'adds it' if adds else 'does not add it'}"
            )
    if config.get("clean_up_tokenization_spaces") is True and type(backend.model).__name__ != "BPE":
        notes.append("clean_up_tokenization_spaces=True is not followed: text is not cleaned up")
    return notes


# The bytes of tokens in byte-level and byte-fallback vocabularies.


# GPT-2 writes a byte as a character that can be seen: as itself, or as one of those from U+0100 on.
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = sorted(set(range(256)).difference(_VISIBLE))
_ALPHABET = {
    **{chr(byte): byte for byte in _VISIBLE},
    **{chr(0x100 + place): byte for place, byte in enumerate(_HIDDEN)},
}
REPLACEMENT = "\ufffd"  # stands for bytes that are not valid UTF-8
_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")


def token_bytes(token: str, decoder: Mapping[str, Any]) -> bytes | None:
    r"""Return the bytes of *token*, or None if the vocabulary is not one of bytes.

    Args:
        token: as the vocabulary writes it.
        decoder: what ``tokenizer.json`` says of the decoder.

    Examples:
        >>> token_bytes("æ¼", {"type": "ByteLevel"})
        b'\xe6\xbc'
        >>> token_bytes("<0xE6>", {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]})
        b'\xe6'
    """
    if is_byte_level(decoder) and _ALPHABET.keys() >= set(token):
        return bytes(map(_ALPHABET.__getitem__, token))
    if has_byte_tokens(decoder) and (match := _ONE_BYTE.fullmatch(token)):
        return bytes.fromhex(match[1])
    return None


def is_byte_level(decoder: Mapping[str, Any]) -> bool:
    """Return whether every token stands for bytes, as in GPT-2."""
    return "ByteLevel" in _kinds(decoder)


def has_byte_tokens(decoder: Mapping[str, Any]) -> bool:
    """Return whether some tokens stand for one byte each, as in Llama 2."""
    return not is_byte_level(decoder) and "ByteFallback" in _kinds(decoder)


def incomplete_end(text: bytes, *, is_strict: bool = False) -> bytes:
    r"""Return the bytes of an incomplete UTF-8 character at the end of *text*.

    Args:
        text: UTF-8, possibly with invalid bytes before the end.
        is_strict: return ``b""`` if there are invalid bytes.

    Examples:
        >>> incomplete_end("a漢".encode()[:-1])
        b'\xe6\xbc'
        >>> incomplete_end(b"\xff")
        b''
    """
    decoder = codecs.getincrementaldecoder("utf-8")("strict" if is_strict else "replace")
    try:
        decoder.decode(text)
    except UnicodeDecodeError:
        return b""
    left = decoder.getstate()[0]
    # CPython keeps the beginning of a surrogate, too, which is not a character.
    return left if len(left.decode(errors="replace")) == 1 else b""


def completes(begun: bytes, following: bytes) -> bool:
    """Return whether *following* begins with the rest of the UTF-8 character *begun*."""
    length = 2 if begun[0] < 0xE0 else 3 if begun[0] < 0xF0 else 4
    try:
        return len((begun + following)[:length].decode()) == 1
    except UnicodeDecodeError:
        return False


def _kinds(decoder: Mapping[str, Any]) -> set[str]:
    return {step.get("type", "") for step in decoder.get("decoders", [decoder])}


# Special and added tokens from the files next to ``tokenizer.json``.
#
# They are merged in the order that transformers uses: ``tokenizer_config.json``, then
# ``special_tokens_map.json`` and ``added_tokens.json``, which count only where the former has no
# ``added_tokens_decoder``.


_MAP, _ADDED = "special_tokens_map.json", "added_tokens.json"
_DECODER = "added_tokens_decoder"
_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
# In the order in which transformers adds them, which decides the ids of new ones.
_NAMED = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class SpecialTokens:
    """The special and added tokens of a checkpoint.

    Attributes:
        named: the text of each named token, such as ``bos_token`` or ``image_token``. Chat
            templates see these names.
        extra: special tokens without a name: a text, or an object with the flags of the token.
        added: tokens with their flags, by id.
        overrides: whether the flags in *added* replace those in ``tokenizer.json``.
    """

    named: Mapping[str, str]
    extra: Sequence[str | Mapping[str, Any]]
    added: Mapping[int, Mapping[str, Any]]
    overrides: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> SpecialTokens:
        """Read the files of *checkpoint*.

        Raises:
            CheckpointError: one of them is damaged.
        """
        config = dict(checkpoint.json(_CONFIG) or {})
        if _OLD_EXTRA in config and not config.get(_EXTRA):
            config[_EXTRA] = config.pop(_OLD_EXTRA)
        configured = config.get(_EXTRA)
        named = dict(configured) if isinstance(configured, dict) else {}
        extra = list(configured) if isinstance(configured, list) else []
        fields: dict[str, Any] = {k: v for k, v in config.items() if k.endswith("_token")}
        if isinstance(decoder := config.get(_DECODER), dict):
            added = {
                int(token): flags
                for token, flags in decoder.items()
                if token.isdecimal() and isinstance(flags, dict) and _text(flags)
            }
        else:
            older = dict(checkpoint.json(_MAP) or {})
            more = older.pop(_EXTRA, None)
            if more is None and configured is None:
                more = older.pop(_OLD_EXTRA, None)
            if isinstance(more, list):
                extra += [token for token in more if token not in extra]
            named |= more if isinstance(more, dict) else {}
            fields |= {k: v for k, v in older.items() if k.endswith("_token")}
            special = {*_texts(fields).values(), *map(_text, extra)}
            added = {}
            for text, token in (checkpoint.json(_ADDED) or {}).items():
                if isinstance(token, int) and text:
                    flags = {"special": text in special, "normalized": text not in special}
                    added[token] = {"content": text, **flags}
        extra = [token for token in extra if _text(token)]
        named = {**dict.fromkeys(_NAMED), **fields, **named}
        return cls(_texts(named), extra, added, isinstance(decoder, dict))

    def add_to(self, backend: Any) -> None:
        """Add the tokens that *backend*, a ``tokenizers.Tokenizer``, does not have yet."""
        make = require("tokenizers").AddedToken
        by_id = backend.get_added_tokens_decoder()
        present = {token.content: token for token in by_id.values()}
        new = {}
        for number, flags in sorted(self.added.items()):
            if number in by_id and not self.overrides:
                continue
            token = make(flags["content"], **{k: flags[k] for k in _FLAGS if k in flags})
            if repr(token) != repr(present.get(token.content)):
                new[token.content] = token
        for text in self.named.values():
            if text in new:
                new[text].special = True
            elif text not in present:
                new[text] = make(text, special=True)
        for entry in self.extra:
            text = _text(entry) or ""
            if text not in present and text not in new:
                flags = entry if isinstance(entry, Mapping) else {}
                flags = {k: v for k, v in flags.items() if k in _FLAGS}
                new[text] = make(text, **{**flags, "special": True})
        backend.add_tokens(list(new.values()))
        for number, flags in self.added.items():
            if (used := backend.token_to_id(flags["content"])) != number:
                _log.warning(
                    "the added token %r has the id %d in the files next to tokenizer.json, but "
                    "tokenizer.json gives it %s, which is used",
                    flags["content"], number, used,
                )  # fmt: skip


def _texts(tokens: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name, token in tokens.items() if (text := _text(token))}


def _text(token: object) -> str | None:
    """Return the text of a token, which JSON writes as a string or as an object with flags."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None


# The maximum number of characters that one token can stand for.


# By how much a normalizer can shorten a text. Unicode composes a character of at most four.
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1}
# Pre-tokenizers that cut, and leave nothing out; others may drop any amount of white space.
_CUTTERS = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}
_CUTTERS_UNLESS_REMOVING = {"Split", "Punctuation"}
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


def longest_token(backend: Any) -> int | None:
    """Return the maximum number of characters that one token of *backend* represents.

    None if it is unbounded: a part of the tokenizer drops characters, or maps any number of them to
    one token, such as an unknown word.

    Args:
        backend: a ``tokenizers.Tokenizer``.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True).keys()
    added = backend.get_added_tokens_decoder().values()
    shrinks = _shrinks(described(backend.normalizer))
    if (
        not vocabulary
        or shrinks is None
        or backend.truncation is not None
        or any(token.lstrip or token.rstrip for token in added)
        or not _covers(described(backend.pre_tokenizer), backend.model, vocabulary)
    ):
        return None
    return shrinks * max(map(len, vocabulary))


def described(part: Any) -> dict[str, Any]:
    """Return what ``tokenizer.json`` says of a part."""
    settings: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return settings


def _shrinks(normalizer: Mapping[str, Any]) -> int | None:
    if not normalizer:
        return 1
    if normalizer["type"] == "Sequence":
        factors = [_shrinks(step) for step in normalizer["normalizers"]]
        return None if None in factors else math.prod(factor or 1 for factor in factors)
    if normalizer["type"] == "Replace":
        old, new = normalizer["pattern"].get("String"), normalizer["content"]
        return -(-len(old) // len(new)) if old and new else None
    return _NORMALIZERS.get(normalizer["type"])


def _covers(pre_tokenizer: Mapping[str, Any], model: Any, vocabulary: AbstractSet[str]) -> bool:
    """Whether every character is kept, and no token has fewer characters than it represents."""
    if type(model).__name__ != "BPE" or not _keeps(pre_tokenizer):
        return False
    if model.byte_fallback and vocabulary >= _BYTES:
        return True
    alphabet: list[str] = require("tokenizers.pre_tokenizers").ByteLevel.alphabet()
    return _has_bytes(pre_tokenizer) and vocabulary >= set(alphabet)


def _keeps(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(map(_keeps, pre_tokenizer["pretokenizers"]))
    is_kept = pre_tokenizer.get("behavior") != "Removed"
    return kind is None or kind in _CUTTERS or (kind in _CUTTERS_UNLESS_REMOVING and is_kept)


def _has_bytes(pre_tokenizer: Mapping[str, Any]) -> bool:
    return pre_tokenizer.get("type") == "ByteLevel" or any(
        map(_has_bytes, pre_tokenizer.get("pretokenizers", ()))
    )


# The tokenizer.


Side = Literal["left", "right"]

_MAX_CHARACTER_BYTES = 4
_TOKENIZER = "tokenizer.json"
_BATCH_TOKENS = 1024  # fewer are decoded before another thread could run
_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")


class Tokenizer:
    """The tokenizer of a checkpoint, from its ``tokenizer.json``.

    Padding and truncation in the file are disabled, as they are in transformers: they were meant
    for training. Special and added tokens of the other files are added.

    Attributes:
        eos_token_ids: the ids that end a text: those of ``generation_config.json``,
            ``config.json`` and ``tokenizer_config.json`` together.
        bos_token_id: the id that begins a text, or None.
        special_ids: the ids of special tokens.

    Args:
        checkpoint: where the files are.
        generation: where ``generation_config.json`` is; None: there, too.

    Raises:
        TokenizerError: the file is missing or damaged.
    """

    def __init__(self, checkpoint: Checkpoint, generation: Checkpoint | None = None) -> None:
        self._backend = _load(checkpoint)
        tokens = SpecialTokens.of(checkpoint)
        tokens.add_to(self._backend)
        self._pieces: dict[int, str] = {}
        self._fixed: dict[int, tuple[str, str] | None] = {}
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        named = {name: self._backend.token_to_id(text) for name, text in tokens.named.items()}
        eos, bos = named.get("eos_token"), named.get("bos_token")
        configured = _configured_ids(checkpoint, generation, "eos")
        self.eos_token_ids = frozenset(configured if eos is None else [*configured, eos])
        self.bos_token_id = next(iter(_configured_ids(checkpoint, generation, "bos")), bos)
        follow_settings(self._backend, checkpoint, bos, eos)
        self._has_token_types = has_token_types(checkpoint)

    def lowercase(self) -> None:
        """Lowercase every text before it is split into tokens."""
        normalizers, present = require("tokenizers.normalizers"), self._backend.normalizer
        steps = [normalizers.Lowercase(), *([] if present is None else [present])]
        self._backend.normalizer = normalizers.Sequence(steps)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        keep: int | None = None,
        truncation_side: Side = "left",
    ) -> list[int]:
        """Return the ids of *text*, by default with the tokenizer's special tokens.

        Args:
            text: any.
            add_special_tokens: whether to add special tokens.
            keep: truncate to this many ids, including special ones; None: no truncation.
            truncation_side: the side that is truncated.

        Raises:
            PromptError: the text has an unpaired surrogate, which is not a valid character.
        """
        encoding = self._encoding(text, add_special_tokens=add_special_tokens)
        if keep is not None and len(encoding) > keep:
            encoding = self._encoding(text, add_special_tokens=False)
            added = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
            encoding.truncate(max(0, keep - added), direction=truncation_side)
            encoding = self._backend.post_process(encoding, None, add_special_tokens)
            return list(encoding.ids)[:keep]
        return list(encoding.ids)

    def encode_pair(
        self, first: str, second: str, *, keep: int | None = None, truncation_side: Side = "right"
    ) -> tuple[list[int], list[int]]:
        """Return the ids of a pair of texts with special tokens, and the type id of each token.

        Args:
            first, second: any texts.
            keep: truncate to this many ids, including special ones, the longer text first, as
                transformers' ``longest_first`` does; None: no truncation.
            truncation_side: the side on which both texts are truncated.

        Raises:
            PromptError: as for :meth:`encode`.
        """
        texts = [self._encoding(text, add_special_tokens=False) for text in (first, second)]
        added = self._backend.num_special_tokens_to_add(True)
        if keep is not None:
            room, sizes = max(0, keep - added), [len(text.ids) for text in texts]
            shorter = min(*sizes, room // 2)
            is_first = sizes[0] <= sizes[1]
            for text, is_shorter in zip(texts, (is_first, not is_first), strict=True):
                limit = shorter if is_shorter else room - shorter
                text.truncate(limit, direction=truncation_side)
        pair = self._backend.post_process(*texts, True)
        # Only a template for pairs sets type ids.
        types = list(pair.type_ids if added else pair.sequence_ids)
        if not self._has_token_types:
            types = [0] * len(types)
        return list(pair.ids)[:keep], types[:keep]

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Any:
        try:
            # A batch, since the library lets other threads run only while it works on one.
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            half = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if half is None:
                raise
            raise PromptError(
                f"The prompt has half of a surrogate pair, {text[half]!a} at {half}, which is not "
                "a character."
            ) from error
        return batch[0]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of *ids*; bytes that are not valid UTF-8 become U+FFFD."""
        if len(ids) < _BATCH_TOKENS:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        # A batch, since the library lets other threads run only while it works on one.
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token_id: int) -> str:
        """Return the text of one token inside of a text; of a part of a character, U+FFFD."""
        if (piece := self._pieces.get(token_id)) is None:
            # Decoders drop the space before the first token of a text.
            context = self.encode("a", add_special_tokens=False)
            text = self.decode([*context, token_id], skip_special_tokens=False)
            start = len(self.decode(context, skip_special_tokens=False))
            piece = self._pieces[token_id] = text[start:]
        return piece

    def fixed_text(self, token_id: int) -> tuple[str, str] | None:
        """Return what a token adds to a text, and its text alone; None: other tokens matter.

        The text before it must not be empty, and must end with a whole character.
        """
        if token_id not in self._fixed:
            is_fixed = self._adds_up and token_id not in self.special_ids
            piece = self.piece(token_id) if is_fixed else ""
            if REPLACEMENT in piece or _ONE_BYTE.fullmatch(self.token(token_id) or ""):
                piece = ""
            self._fixed[token_id] = (piece, self.decode([token_id])) if piece else None
        return self._fixed[token_id]

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes of one token; None if they are not known."""
        text = self.piece(token_id)
        if REPLACEMENT not in text:
            return text.encode("utf-8")
        token = self.token(token_id)
        return None if token is None else token_bytes(token, self._decoder)

    def bytes_in_text(self, token_id: int) -> bytes:
        """Return the bytes of one token; of an unknown one, those of its text."""
        content = self.bytes_of(token_id)
        return self.piece(token_id).encode() if content is None else content

    def incomplete_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes at the end of *ids* that tokens after them may make a character.

        Args:
            ids: tokens, without special ones if they are left out of the text.
        """
        if self.has_byte_tokens:
            parts = [token_bytes(self.token(token) or "", self._decoder) for token in ids]
            first = next((at for at in range(len(ids), 0, -1) if parts[at - 1] is None), 0)
            # One byte that is not valid UTF-8 spoils all bytes around it.
            return incomplete_end(b"".join(part or b"" for part in parts[first:]), is_strict=True)
        if self._is_byte_level:
            return incomplete_end(b"".join(map(self.bytes_in_text, ids[-_MAX_CHARACTER_BYTES:])))
        return b""

    @cached_property
    def has_byte_tokens(self) -> bool:
        """Whether a byte that has no token of its own is written as ``<0xE6>``."""
        return has_byte_tokens(self._decoder)

    @cached_property
    def _is_byte_level(self) -> bool:
        return is_byte_level(self._decoder)

    @cached_property
    def _adds_up(self) -> bool:
        """Whether a text is that of its tokens, but for parts of characters and its beginning."""
        steps = self._decoder.get("decoders", [self._decoder])
        kinds = [step.get("type") for step in steps]
        if kinds[3:] == ["Strip"] and steps[3]["stop"] == 0:
            kinds.pop()
        return kinds in (["ByteLevel"], ["Metaspace"], ["Replace", "ByteFallback", "Fuse"])

    @cached_property
    def _decoder(self) -> dict[str, Any]:
        return described(self._backend.decoder)

    @cached_property
    def longest_token(self) -> int | None:
        """Maximum number of characters that one token represents; None: unbounded."""
        return longest_token(self._backend)

    def to_json(self) -> str:
        """Return the tokenizer in the format of ``tokenizer.json``."""
        text: str = self._backend.to_str()
        return text

    def token(self, token_id: int) -> str | None:
        """Return how the vocabulary writes a token, or None if it has no such id."""
        token: str | None = self._backend.id_to_token(token_id)
        return token


class AbsentTokenizer(Tokenizer):
    """Substitute for the tokenizer of a checkpoint without one.

    Prompts must be token ids. The text of a token is its id, ``<17>``, so that streams have text as
    with a tokenizer.
    """

    def __init__(self, checkpoint: Checkpoint, generation: Checkpoint | None = None) -> None:
        self._path = checkpoint.path
        self.eos_token_ids = frozenset(_configured_ids(checkpoint, generation, "eos"))
        self.bos_token_id = next(iter(_configured_ids(checkpoint, generation, "bos")), None)
        self.special_ids, self.longest_token = frozenset(), None
        self.has_byte_tokens = False

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Any:
        raise TokenizerError(
            f"{self._path} has no tokenizer.json: give token ids instead of the text {text!r}."
        )

    def lowercase(self) -> None:
        """No-op: there are no texts."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(self.piece, ids))

    def piece(self, token_id: int) -> str:
        return f"<{token_id}>"

    def fixed_text(self, token_id: int) -> tuple[str, str]:
        return (self.piece(token_id),) * 2

    def incomplete_bytes(self, ids: Sequence[int]) -> bytes:
        return b""

    def token(self, token_id: int) -> str | None:
        return None


def tokenizer_of(checkpoint: Checkpoint, config: EngineConfig) -> Tokenizer:
    """Return the tokenizer of *checkpoint*, or a substitute if it has none.

    Raises:
        TokenizerError: it is damaged, or of another kind, which dummy weights do not need.
    """
    generation = generation_folder(checkpoint, config.generation_config)
    if checkpoint.has(_TOKENIZER):
        return Tokenizer(checkpoint, generation)
    if config.load_format != "dummy":
        if any(file for pattern in _TOKENIZER_FILES for file in checkpoint.path.glob(pattern)):
            return Tokenizer(checkpoint, generation)  # its error says how to convert the files
        _log.warning("%s has no tokenizer: prompts must be token ids", checkpoint.path)
    return AbsentTokenizer(checkpoint, generation)


def _configured_ids(checkpoint: Checkpoint, generation: Checkpoint | None, kind: str) -> list[int]:
    """Return the ids that end or begin a text, as the model's configuration files say."""
    configured: list[int] = []
    for folder, file in ((generation or checkpoint, FILE), (checkpoint, "config.json")):
        value = (folder.json(file) or {}).get(f"{kind}_token_id")
        ids: list[Any] = value if isinstance(value, list) else [value]
        if ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            configured += ids
        elif ids not in ([], [None]):
            _log.warning(
                "%s: %s_token_id=%r is ignored: it is neither a token id nor a list of them",
                folder.path / file, kind, value,
            )  # fmt: skip
    return configured


def _load(checkpoint: Checkpoint) -> Any:
    tokenizers = require("tokenizers")
    file = checkpoint.path / _TOKENIZER
    try:
        if checkpoint.gguf is not None:
            file = checkpoint.path
            return tokenizers.Tokenizer.from_str(json.dumps(checkpoint.json(_TOKENIZER)))
        if file.is_file():
            return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        if isinstance(error, EngineError):
            raise
        raise TokenizerError(f"{file} is damaged or of an unknown kind: {error}.") from error
    raise TokenizerError(
        f"{checkpoint.path} has no tokenizer.json. Checkpoints with another kind of tokenizer "
        "need it converted: load it with transformers and save it again."
    )
