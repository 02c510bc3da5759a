"""The prompts of a request, as tokens."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

from opweave_engine import ChatTemplate, PoolingParams, SamplingParams, Tokenizer
from opweave_engine.prompts import truncated
from opweave_engine.server.errors import ApiError
from opweave_engine.server.protocol.base import Input, for_header
from opweave_engine.server.protocol.chat import Conversation
from opweave_engine.server.state import ServerCall, ServerState
from opweave_engine.tokenizer import Side

Item = TypeVar("Item", bound=Sequence[object])
T = TypeVar("T")

# Sizes of texts are in characters, those of lists of token ids in tokens.
_INLINE_SIZE = 4096  # takes about a millisecond, less than passing it to a thread
_BATCH_SIZE = 65_536  # the tokenizers library takes up to 50 ms and cannot be interrupted
_MAX_SIZE = 1 << 20
_MAX_SIZE_PER_TOKEN = 32  # for each token of the context; few tokens have more characters


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        text: its text; None if the client sent tokens.
        ids: its tokens.
        cache_salt: shares cached prefixes only with prompts of the same salt.
    """

    text: str | None
    ids: list[int]
    cache_salt: str | None = None


@dataclass(frozen=True)
class Reading:
    """How to tokenize and truncate prompts.

    Attributes:
        add_special_tokens: add the tokenizer's special tokens.
        keep: the maximum number of tokens of a prompt; None: all.
        side: the side on which longer prompts are truncated.
    """

    add_special_tokens: bool = True
    keep: int | None = None
    side: Side = "left"

    def prompt(self, content: str | list[int], tokenizer: Tokenizer) -> Prompt:
        """Return a prompt; if it may be truncated, its text is detokenized from its tokens."""
        special = self.add_special_tokens
        ids = truncated(content, tokenizer, self.keep, side=self.side, add_special_tokens=special)
        text = content if isinstance(content, str) and len(ids) != self.keep else None
        return Prompt(text, ids)


async def read_prompts(
    content: Input,
    call: ServerCall,
    *,
    n: int = 1,
    at_once: int | None = None,
    reading: Reading,
    cache_salt: str | None = None,
) -> list[Prompt]:
    """Return the prompts of a request, in order.

    Args:
        content: one prompt or several.
        call: the request.
        n: the number of answers per prompt.
        at_once: the maximum number of prompts that the engine gets at one time; None: all.
        reading: how to tokenize and truncate prompts.
        cache_salt: the salt of all prompts.

    Raises:
        ApiError: the list is empty or too long, a prompt cannot fit into the context, or an error
            of :func:`read_all`.
        PromptError: a text contains half of a surrogate pair.
    """
    param, server = call.param, call.server
    is_one = isinstance(content, str) or (content and isinstance(content[0], int))
    contents = cast("list[str | list[int]]", [content] if is_one else content)
    if not contents:
        raise ApiError(f"{param} is empty; it must hold at least one prompt.", param=param)
    count = len(contents) if at_once is None else min(len(contents), at_once)
    server.admission.check(count * n, param=param if n == 1 else "n")
    for text in contents:
        if isinstance(text, str):
            check_length(text, call, reading)
    encode = partial(reading.prompt, tokenizer=server.engine.tokenizer)
    prompts = await read_all(encode, contents, call, size=_text_size)
    return [replace(prompt, cache_salt=cache_salt) for prompt in prompts]


async def read_pairs(
    pairs: Sequence[tuple[str, str]], call: ServerCall, *, reading: Reading, at_once: int
) -> tuple[list[Prompt], list[PoolingParams]]:
    """Return the prompt of each pair of texts, and its pooling parameters.

    Args:
        pairs: the pairs of a request.
        call: the request.
        reading: how to truncate pairs.
        at_once: the maximum number of pairs that the engine gets at one time.

    Raises:
        ApiError: there are too many pairs, a text cannot fit into the context, or as for
            :func:`read_all`.
    """
    call.server.admission.check(min(len(pairs), at_once), param=call.param)
    for text in {text for pair in pairs for text in pair}:
        check_length(text, call, reading)

    def encode(pair: tuple[str, str]) -> tuple[list[int], list[int]]:
        tokenizer, side = call.server.engine.tokenizer, reading.side
        return tokenizer.encode_pair(*pair, keep=reading.keep, truncation_side=side)

    encoded = await read_all(encode, pairs, call, size=lambda pair: sum(map(len, pair)))
    prompts = [Prompt(None, ids) for ids, _ in encoded]
    return prompts, [PoolingParams(token_type_ids=types) for _, types in encoded]


async def render(conversation: Conversation, call: ServerCall) -> str:
    """Return the text of a conversation; record the variables that the template ignores.

    Raises:
        ApiError: there is no chat template, too many requests are running, the deadline passes, or
            the server stops.
        ChatTemplateError, PromptError: the template refuses the messages, or they are malformed.
    """
    with call.places(1):
        text, unread = await call.as_guest(partial(_render, conversation, call.server))
    call.request.state.ignored += for_header(unread)
    return text


def _render(conversation: Conversation, server: ServerState) -> tuple[str, list[str]]:
    """Return the text of a conversation, and the paths of variables that the template ignores."""
    template = _template(conversation.chat_template, server)
    template.check_use(tools=conversation.shown_tools, documents=conversation.documents)
    text = template.render(conversation.for_template(), **conversation.template_arguments())
    variables = (conversation.chat_template_kwargs or {}).keys()
    unread = variables - template.chosen(conversation.shown_tools).traits.variables
    return text, [f"chat_template_kwargs.{name}" for name in sorted(unread)]


def _template(source: str | None, server: ServerState) -> ChatTemplate:
    """Return the template for a request, which may give a name or a template."""
    default = server.chat_template
    if source is None:
        if default is None:
            raise ApiError(
                "The model has no chat template: its checkpoint brings none. If it generates text, "
                "use /v1/completions, or start the server with --chat-template FILE.",
                code="no_chat_template",
            )
        return default
    if default is not None and (named := default.by_name(source)) is not None:
        return named
    if not server.config.trust_request_chat_template:
        names = "" if default is None else ", ".join(default.named)
        raise ApiError(
            "chat_template: templates in requests are not supported by this server, since they "
            "are programs; start it with --trust-request-chat-template."
            + (f" Names of templates: {names}." if names else ""),
            param="chat_template",
            code="unsupported",
        )
    return ChatTemplate(source, "of the request", server.special_tokens)


async def detokenize(ids: Sequence[int], call: ServerCall) -> str:
    """Return the text of *ids*.

    Raises:
        ApiError: an id is not in the vocabulary, or an error of :func:`read_all`.
    """

    def decode(ids: Sequence[int]) -> str:
        engine, tokenizer = call.server.engine, call.server.engine.tokenizer
        for token in set(ids):
            # The model may have more tokens than the tokenizer; those have no text.
            if token >= engine.vocab_size and tokenizer.token(token) is None:
                raise ApiError(f"The vocabulary has no token {token}.", param=call.param)
        return tokenizer.decode(ids, skip_special_tokens=False)

    (text,) = await read_all(decode, [ids], call)
    return text


async def read_all(
    work: Callable[[Item], T],
    items: Sequence[Item],
    call: ServerCall,
    *,
    size: Callable[[Item], int] = len,
) -> list[T]:
    """Return the result of *work*, which uses the tokenizer, for each text or list of token ids.

    Many items run in threads, in batches between which other requests have their turn. A long item
    cannot be interrupted, so it waits in a queue for long items only.

    Raises:
        ApiError: an item is too long, too many requests are running, the deadline passes, or the
            server stops.
        TokenizerError: there is no tokenizer.
    """
    server = call.server
    limit = max(_MAX_SIZE, _MAX_SIZE_PER_TOKEN * server.engine.max_model_len)
    for item in items:
        if size(item) > limit:
            unit = "tokens" if isinstance(item, list) else "characters"
            raise ApiError(
                f"{call.param} has {size(item)} {unit}, but the server takes at most {limit}. "
                "Send it in parts.",
                param=call.param,
                code="text_too_long",
            )

    def results(batch: Sequence[Item]) -> list[T]:
        return [work(item) for item in batch]

    if sum(map(size, items)) < _INLINE_SIZE:
        return results(items)
    complete: list[T] = []
    loop = asyncio.get_running_loop()
    with call.places(1):
        async with call.deadline.limit():
            for batch in _batches(items, size):
                is_long = size(batch[0]) >= _BATCH_SIZE
                threads = server.long_readers if is_long else server.readers
                complete += await loop.run_in_executor(threads, results, batch)
    return complete


def _text_size(prompt: str | list[int]) -> int:
    return len(prompt) if isinstance(prompt, str) else 0  # the tokenizer does not read token ids


def _batches(items: Sequence[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield *items* in order, in batches with fewer than ``_BATCH_SIZE`` characters or one item."""
    batch: list[Item] = []
    total = 0
    for item in items:
        total += size(item)
        if batch and total >= _BATCH_SIZE:
            yield batch
            batch, total = [], size(item)
        batch.append(item)
    if batch:
        yield batch


def check_length(text: str, call: ServerCall, reading: Reading) -> None:
    """Raise ApiError if *text* cannot fit into the context with any tokenization.

    This avoids tokenizing megabytes, which takes seconds.
    """
    engine = call.server.engine
    context_length = engine.max_model_len
    if len(text) <= context_length or reading.keep is not None:
        return
    longest = engine.tokenizer.longest_token
    if longest is not None and len(text) > longest * context_length:
        raise ApiError(
            f"The context has {context_length} tokens of at most {longest} characters, but the "
            f"prompt has {len(text)} characters. Shorten it.",
            param=call.param,
            code="context_length_exceeded",
        )


def check_context(
    prompts: list[Prompt],
    params: SamplingParams,
    call: ServerCall,
    *,
    limit: str,
    asks: bool = True,
) -> None:
    """Raise ApiError if a prompt and its answer together exceed the context.

    Args:
        prompts: the prompts of the request.
        params: the sampling parameters, with the maximum length of an answer.
        call: the request.
        limit: the request field of ``max_tokens``.
        asks: whether the request sets ``max_tokens``; the checkpoint's default is only a limit.
    """
    context_length = call.server.engine.max_model_len
    answer = params.max_tokens if asks and params.max_tokens is not None else 1
    least = ", which always needs one" if answer == 1 else ""
    for prompt in prompts:
        total = len(prompt.ids) + answer
        if total > context_length:
            raise ApiError(
                f"The context has {context_length} tokens, but the request asks for {total}: "
                f"{len(prompt.ids)} in the prompt and {answer} for the answer{least}. "
                "Shorten one of them.",
                param=limit if len(prompt.ids) < context_length else call.param,
                code="context_length_exceeded",
            )
