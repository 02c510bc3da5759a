"""The placement of experts on ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opweave.layers.errors import LayerArgumentError, ShardingError
from opweave.layers.parallel import TensorParallel

STRATEGIES = ("linear", "round_robin")


@dataclass(frozen=True)
class ExpertPlacement:
    """The experts of one rank, and its shard of each.

    The ranks of a group are divided into ``ep_size`` subgroups of consecutive ranks. A subgroup has
    its own experts, whose intermediate dimension is sharded over its ``tp_size`` ranks.

    Attributes:
        num_experts: the number of experts.
        ep_rank, ep_size: the index of this rank's subgroup, and the number of subgroups.
        tp_rank, tp_size: the index of this rank in its subgroup, and the size of a subgroup.
        strategy: ``"linear"``: consecutive experts are in the same subgroup; ``"round_robin"``: in
            consecutive subgroups.

    >>> ExpertPlacement(5, ep_rank=0, ep_size=2).local_experts
    (0, 1, 2)
    >>> ExpertPlacement(5, ep_rank=1, ep_size=2, strategy="round_robin").local_experts
    (1, 3)
    """

    num_experts: int
    ep_rank: int = 0
    ep_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    strategy: str = "linear"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise LayerArgumentError(
                f"expert_placement_strategy={self.strategy!r}: not one of {', '.join(STRATEGIES)}."
            )

    @classmethod
    def of(
        cls, num_experts: int, parallel: TensorParallel, ep_size: int, strategy: str = "linear"
    ) -> ExpertPlacement:
        """Divide the ranks of *parallel* into *ep_size* subgroups.

        Raises:
            ShardingError: *ep_size* does not divide the number of ranks.
            LayerArgumentError: *ep_size* is not positive, or *strategy* is unknown.
        """
        if ep_size < 1:
            raise LayerArgumentError(f"ep_size={ep_size} must be at least 1.")
        if parallel.size % ep_size:
            raise ShardingError(
                f"ep_size={ep_size} does not divide the {parallel.size} ranks; each part must have "
                "as many of them."
            )
        tp_size = parallel.size // ep_size
        ep_rank, tp_rank = divmod(parallel.rank, tp_size)
        return cls(num_experts, ep_rank, ep_size, tp_rank, tp_size, strategy)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The experts of this rank, in the order of its weights."""
        everyone = range(self.num_experts)
        if self.strategy == "round_robin":
            return tuple(everyone[self.ep_rank :: self.ep_size])
        base, more = divmod(self.num_experts, self.ep_size)
        start = self.ep_rank * base + min(self.ep_rank, more)  # the first ranks have one more
        return tuple(everyone[start : start + base + (self.ep_rank < more)])

    def expert_map(self, device: torch.device | str | None = None) -> Tensor | None:
        """Return the index of each expert in this rank's weights, -1 for experts of other ranks.

        Shape ``(num_experts,)``, int32. None if this rank has all experts.
        """
        if self.ep_size == 1:
            return None
        places = {expert: place for place, expert in enumerate(self.local_experts)}
        found = [places.get(expert, -1) for expert in range(self.num_experts)]
        return torch.tensor(found, dtype=torch.int32, device=device)
