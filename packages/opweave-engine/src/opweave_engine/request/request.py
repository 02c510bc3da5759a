"""One sequence, as seen by the scheduler and the cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from opweave_engine.errors import InvalidArgumentError

_arrivals = count()


def check_priority(priority: object) -> None:
    """Raise InvalidArgumentError unless *priority* is an integer."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidArgumentError(
            f"priority={priority!r} must be an integer; a lower number goes first."
        )


class Request:
    """The tokens of one output, including the prompt, and how many of them are computed.

    Args:
        request_id: a unique name.
        prompt_token_ids: at least one token.
        priority: the scheduling priority; with the priority policy, lower numbers go first.
        cache_salt: shares cached prefixes only with requests of the same salt.

    Attributes:
        token_ids: the prompt's tokens, followed by the generated ones.
        num_computed_tokens: the number of leading tokens in the KV cache.
        num_cached_tokens: the number of prompt tokens found in the prefix cache when it was first
            scheduled; None before that.
        num_preemptions: how often it was preempted.
        uses_prefix: whether it may start from a cached prefix.
        arrival: a number that increases from request to request.
        block_hashes: hashes of its leading full blocks, for the prefix cache.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        self.request_id, self.priority, self.arrival = request_id, priority, next(_arrivals)
        self.token_ids, self.cache_salt = list(prompt_token_ids), cache_salt
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.uses_prefix = True
        self.block_hashes: list[bytes] = []

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r}: {self.num_computed_tokens} of {self.num_tokens}>"

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far, including the prompt."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of tokens that are not in the KV cache; at least one."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]
