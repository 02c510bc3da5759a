"""What the scheduler and the cache know of a request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from opweave.engine.errors import InvalidArgumentError

_arrivals = count()


def check_priority(priority: object) -> None:
    """Raise InvalidArgumentError unless *priority* is an integer."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidArgumentError(
            f"priority={priority!r} must be an integer; a lower number goes first."
        )


class Request:
    """The tokens of one answer, prompt included, and how many of them are computed.

    Args:
        request_id: its name; no other unfinished one has it.
        prompt_token_ids: at least one token.
        priority: a lower number goes first, where the policy asks for it.

    Attributes:
        token_ids: the prompt's, and those generated so far.
        num_computed_tokens: how many of them are in the cache.
        num_cached_tokens: how many of the prompt were in the cache when it was first scheduled;
            None before that.
        num_preemptions: how often it lost its blocks.
        uses_prefix: whether it may begin with what is in the cache.
        arrival: rises from request to request.
        block_hashes: of its first tokens, block by block, as the cache needs them.
    """

    def __init__(
        self, request_id: str, prompt_token_ids: Sequence[int], *, priority: int = 0
    ) -> None:
        self.request_id, self.priority, self.arrival = request_id, priority, next(_arrivals)
        self.token_ids = list(prompt_token_ids)
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
        """All tokens so far."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """How many of them are not in the cache; there is always one."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]
