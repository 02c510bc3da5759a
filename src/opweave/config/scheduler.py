"""What is computed together, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from opweave.config.checks import check_choice, check_count, check_flag
from opweave.config.origin import Config
from opweave.ir.errors import SettingError

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class SchedulerConfig(Config):
    """How requests share the model.

    Attributes:
        max_num_seqs: requests that run together.
        max_num_batched_tokens: tokens of one forward: those that are decoded, and parts of prompts.
        max_model_len: the most tokens of a prompt and its answer together; None: the model's
            context, or less if the cache holds less.
        policy: ``"fcfs"``: who comes first goes first; ``"priority"``: the lowest number goes
            first, among equals who comes first; it takes room from higher numbers, which are
            computed again later.
        enable_chunked_prefill: compute a long prompt in parts, beside what is decoded. Without it,
            a prompt is computed whole, so that *max_num_batched_tokens* must not be below
            *max_model_len*.

    Raises:
        SettingError: (a ValueError) a value is out of range, or does not fit the others.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_count(owner, "max_num_seqs", self.max_num_seqs)
        check_count(owner, "max_num_batched_tokens", self.max_num_batched_tokens)
        if self.max_model_len is not None:
            check_count(owner, "max_model_len", self.max_model_len, ", or None")
        check_choice(owner, "policy", self.policy, POLICIES)
        check_flag(owner, "enable_chunked_prefill", self.enable_chunked_prefill)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingError(
                f"{owner}: max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: not every sequence could get a token. Raise "
                "the one or lower the other."
            )
