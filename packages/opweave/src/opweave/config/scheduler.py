"""The configuration of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from opweave.config.checks import check_choice, check_count, check_flag
from opweave.config.origin import Config
from opweave.ir.errors import SettingError

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class SchedulerConfig(Config):
    """Batch sizes and the order of requests.

    Attributes:
        max_num_seqs: the maximum number of sequences per step.
        max_num_batched_tokens: the maximum number of tokens per step, decode and prefill together.
        max_model_len: the maximum number of tokens of a prompt and its answer; None: the model's
            context, or less if the cache holds less.
        policy: ``"fcfs"`` (first come, first served), or ``"priority"``: the lowest number runs
            first, ties in order of arrival. A request preempts those with higher numbers if memory
            is short; they are recomputed later.
        enable_chunked_prefill: split long prompts over several steps, together with decodes.
            Without it, *max_num_batched_tokens* must be at least *max_model_len*.

    Raises:
        SettingError: (a ValueError) a value is out of range or conflicts with another.
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
                f"max_num_seqs={self.max_num_seqs}, so not every sequence can get a token. Raise "
                "the former or lower the latter."
            )
