"""Special and added tokens from the files next to ``tokenizer.json``.

They are merged in the order that transformers uses: ``tokenizer_config.json``, then
``special_tokens_map.json`` and ``added_tokens.json``, which count only where the former has no
``added_tokens_decoder``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opweave_engine.dependencies import require
from opweave_engine.loading.checkpoint import Checkpoint

_log = logging.getLogger(__name__)

_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_DECODER, _EXTRA, _OLD_EXTRA = (
    "added_tokens_decoder",
    "extra_special_tokens",
    "additional_special_tokens",
)
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
        given = config.get(_EXTRA)
        named = dict(given) if isinstance(given, dict) else {}
        extra = list(given) if isinstance(given, list) else []
        fields: dict[str, Any] = {k: v for k, v in config.items() if k.endswith("_token")}
        if isinstance(decoder := config.get(_DECODER), dict):
            added = dict(_decoded(decoder))
        else:
            older = dict(checkpoint.json(_MAP) or {})
            more = older.pop(_EXTRA, None)
            if more is None and given is None:
                more = older.pop(_OLD_EXTRA, None)
            extra += [each for each in more if each not in extra] if isinstance(more, list) else []
            named |= more if isinstance(more, dict) else {}
            fields |= {k: v for k, v in older.items() if k.endswith("_token")}
            added = _from_added_tokens(checkpoint, {*_texts(fields).values(), *map(_text, extra)})
        extra = [each for each in extra if _text(each)]
        named = {**dict.fromkeys(_NAMED), **fields, **named}
        return cls(_texts(named), extra, added, isinstance(decoder, dict))

    def add_to(self, backend: Any) -> None:
        """Add the tokens that *backend*, a ``tokenizers.Tokenizer``, does not have yet."""
        make = require("tokenizers").AddedToken
        there = backend.get_added_tokens_decoder()
        known = {token.content: token for token in there.values()}
        wanted = {}
        for number, flags in sorted(self.added.items()):
            if number in there and not self.overrides:
                continue
            token = make(flags["content"], **{k: flags[k] for k in _FLAGS if k in flags})
            if repr(token) != repr(known.get(token.content)):
                wanted[token.content] = token
        for text in self.named.values():
            if text in wanted:
                wanted[text].special = True
            elif text not in known:
                wanted[text] = make(text, special=True)
        for each in self.extra:
            text = _text(each) or ""
            if text not in known and text not in wanted:
                flags = each if isinstance(each, Mapping) else {}
                kept = {k: v for k, v in flags.items() if k in _FLAGS}
                wanted[text] = make(text, **{**kept, "special": True})
        backend.add_tokens(list(wanted.values()))
        self._check_ids(backend)

    def _check_ids(self, backend: Any) -> None:
        for token, flags in self.added.items():
            if (found := backend.token_to_id(flags["content"])) != token:
                _log.warning(
                    "the added token %r has the id %d in the files next to tokenizer.json, but "
                    "tokenizer.json gives it %s, which is used",
                    flags["content"], token, found,
                )  # fmt: skip


def _decoded(decoder: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for token, flags in decoder.items():
        if token.isdecimal() and isinstance(flags, dict) and _text(flags):
            yield int(token), flags


def _from_added_tokens(
    checkpoint: Checkpoint, special: set[str | None]
) -> dict[int, Mapping[str, Any]]:
    found: dict[int, Mapping[str, Any]] = {}
    for text, token in (checkpoint.json(_ADDED) or {}).items():
        if isinstance(token, int) and text:
            is_special = text in special
            found[token] = {"content": text, "special": is_special, "normalized": not is_special}
    return found


def _texts(tokens: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name, token in tokens.items() if (text := _text(token))}


def _text(token: object) -> str | None:
    """Return the text of a token, which JSON writes as a string or as an object with flags."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None
