"""Runs a model on one device: the worker, its model runner and its compiled forward."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opweave import ir
from opweave.config import CacheConfig, EngineConfig, compilation_config
from opweave.layers import SequenceStates
from opweave.layers.registry import warn_of_unused_ops, warn_of_unused_replacements
from opweave.platforms import Platform
from opweave.platforms.base import UnsupportedByPlatformError
from opweave_engine.attention import (
    LayerCaches,
    LayerGroup,
    SequenceBatch,
    cache_specs,
    layer_groups,
)
from opweave_engine.cache_plan import CachePlan
from opweave_engine.forward import (
    DecodeGraphs,
    SequenceStep,
    compiled_forward,
    graph_sizes,
    padded_tables,
    record_decode_graphs,
)
from opweave_engine.load.checkpoint import Progress
from opweave_engine.load.loader import as_language_model, load_model
from opweave_engine.models import ForwardContext, LanguageModel, forward_context
from opweave_engine.parts import part
from opweave_engine.sampling.sampler import (
    Sampled,
    Sampler,
    TokenLogprob,
    non_finite,
    token_logprobs,
)

# The number of CPU threads that torch's kernels use.


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Make kernels use *count* threads inside the block, in this process; None: no change.

    Other threads that have already used torch keep their number.
    """
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


# Builds a model's inputs from the scheduled steps, runs it, and samples tokens.


_log = logging.getLogger(__name__)

_SCORED = 64  # tokens of a prompt at once: each has a score for every token of the vocabulary


class ModelRunner:
    """Runs a model on packed sequences.

    A platform may name another class. :class:`Worker` calls its public
    methods.

    Args:
        model: the model, with its weights on *device*.
        config: the configuration of compilation and of blocks.
        platform: names the sampler and the attention backends.
        device: the device of the model.

    Attributes:
        progress: shows or receives the progress of loading.
    """

    progress: Progress | None = None

    def __init__(
        self, model: LanguageModel, config: EngineConfig, platform: Platform, device: torch.device
    ) -> None:
        self.model, self.config, self.platform, self.device = model, config, platform, device
        self._forward = compiled_forward(model, config.compilation)
        self._specs = cache_specs(model, model.dtype)
        self._groups = layer_groups(self._specs, config.cache.block_size)
        self._caches: LayerCaches | None = None
        self._max_model_len = 0
        self._graphs: DecodeGraphs | None = None
        sampler: type[Sampler] = part(platform, "get_sampler_cls", config)
        self._sampler = sampler()

    @property
    def groups(self) -> list[LayerGroup]:
        """The layers with a cache, grouped by retention."""
        return self._groups

    def allocate(self, plan: CachePlan) -> None:
        """Allocate the caches of all layers.

        Raises:
            UnsupportedCacheError: an attention backend does not support a layer's cache.
        """
        self._max_model_len = plan.max_model_len
        self._caches = LayerCaches(
            self.model,
            self._specs,
            self._groups,
            plan.num_blocks,
            plan.block_size,
            self.platform,
            self.device,
        )

    def warm_up(self) -> None:
        """Compile the model: run it on one token, and on every size at which a new graph begins.

        The first run selects every op, and the selection is logged. Then the decode steps are
        recorded, on devices that record graphs.
        """
        with ir.record() as record:
            self._run(self._blank(1), keeps=False)
        _log.info("kernels of the first forward:%s", _selections(record))
        for size in graph_sizes(self.config)[1:]:
            self._run(self._blank(size), keeps=False)
        assert self._caches is not None, "allocate() comes first"
        self._graphs = record_decode_graphs(
            self._forward,
            self._caches,
            self.config,
            self.platform,
            len(self._groups),
            self._max_model_len,
            self.device,
            self.progress,
        )
        self.progress = None

    def _blank(self, size: int) -> list[SequenceStep]:
        """Return steps with this number of tokens: a sequence in decode, and a prompt."""
        tables = tuple((0,) for _ in self._groups)
        counts = (1, size - 1) if size > 1 else (1,)
        return [SequenceStep("warm-up", [0] * count, 0, tables, None) for count in counts]

    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        """Compute the new tokens of the sequences, and write their caches.

        Args:
            steps: at least one; steps with one new token come first.

        Returns:
            The next token of each step with ``sampling``, in order.

        Raises:
            NonFiniteLogitsError: logits are not finite.
        """
        with self.platform.inference_mode():
            hidden = self._graphs.run(steps) if self._graphs is not None else None
            if hidden is None:
                hidden = self._run(steps)
            requests = [step.sampling for step in steps if step.sampling is not None]
            if not requests:
                return []
            ends = accumulate(len(step.token_ids) for step in steps)
            sampled = [end - 1 for end, step in zip(ends, steps, strict=True) if step.sampling]
            if len(sampled) < len(hidden):
                last = hidden[self._tensor(sampled, torch.int64)]
            else:  # every sequence has one new token, so nothing need be copied
                last = hidden
            logits = self.model.compute_logits(last)
            chosen = self._sampler(logits, requests)
            return self._with_prompt_logprobs(hidden, steps, chosen)

    def _with_prompt_logprobs(
        self, hidden: Tensor, steps: Sequence[SequenceStep], sampled: list[Sampled]
    ) -> list[Sampled]:
        ends = accumulate(len(step.token_ids) for step in steps)
        asking = [(end, step) for end, step in zip(ends, steps, strict=True) if step.sampling]
        complete = [
            one._replace(
                prompt_logprobs=self._prompt_logprobs(hidden[end - len(step.token_ids) :], step)
            )
            if step.targets
            else one
            for one, (end, step) in zip(sampled, asking, strict=True)
        ]
        broken = [
            row
            for row, one in enumerate(complete)
            if any(isnan(place[0].logprob) for place in one.prompt_logprobs)
        ]
        if broken:
            raise non_finite("NaN", broken)
        return complete

    def _prompt_logprobs(
        self, hidden: Tensor, step: SequenceStep
    ) -> tuple[tuple[TokenLogprob, ...], ...]:
        assert step.sampling is not None, f"{step.request_id=} has targets only"
        count = step.sampling.params.prompt_logprobs or 0
        found: list[tuple[TokenLogprob, ...]] = []
        for first in range(0, len(step.targets), _SCORED):
            targets = step.targets[first : first + _SCORED]
            logits = self.model.compute_logits(hidden[first : first + len(targets)])
            found += token_logprobs(logits, targets, [count] * len(targets))
        return tuple(found)

    def _run(self, steps: Sequence[SequenceStep], *, keeps: bool = True) -> Tensor:
        """Return the hidden states; if *keeps* is False, do not write to the caches."""
        assert self._caches is not None, "allocate() comes first"
        ids = [token for step in steps for token in step.token_ids]
        positions = [
            position
            for step in steps
            for position in range(step.start, step.start + len(step.token_ids))
        ]
        context = self._context(self._caches, steps, keeps)
        with self.platform.inference_mode(), forward_context(context):
            return self._forward(
                self._tensor(ids, torch.int64), self._tensor(positions, torch.int64)
            )

    def _context(
        self, caches: LayerCaches, steps: Sequence[SequenceStep], keeps: bool
    ) -> ForwardContext:
        counts = [len(step.token_ids) for step in steps]
        lengths = [step.start + count for step, count in zip(steps, counts, strict=True)]
        starts, key_starts = ([0, *accumulate(sizes)] for sizes in (counts, lengths))
        shared = {
            "query_starts": self._tensor(starts, torch.int32),
            "seq_lens": self._tensor(lengths, torch.int32),
            "key_starts": self._tensor(key_starts, torch.int32),
        }
        decodes = [*(count == 1 for count in counts), False].index(False)
        batches = {
            group: SequenceBatch(
                **shared,
                block_tables=self._tables(steps, group),
                slot_mapping=self._slots(steps, group, keeps),
                num_decodes=decodes,
            )
            for group in range(len(self._groups))
            if group != caches.state_group
        }
        return ForwardContext(caches.step(batches), self._states(caches, steps, keeps))

    def _states(
        self, caches: LayerCaches, steps: Sequence[SequenceStep], keeps: bool
    ) -> SequenceStates | None:
        if caches.states is None or caches.state_group is None:
            return None
        return SequenceStates.of(
            [len(step.token_ids) for step in steps],
            [step.start for step in steps],
            [step.tables[caches.state_group][0] if keeps else -1 for step in steps],
            caches.states,
            self.device,
        )

    def _tables(self, steps: Sequence[SequenceStep], group: int) -> Tensor:
        return self._tensor(padded_tables(steps, group), torch.int32)

    def _slots(self, steps: Sequence[SequenceStep], group: int, keeps: bool) -> Tensor:
        size = self.config.cache.block_size
        slots = [
            step.slot(group, position, size) if keeps else -1
            for step in steps
            for position in range(step.start, step.start + len(step.token_ids))
        ]
        return self._tensor(slots, torch.int64)

    def _tensor(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def _selections(record: ir.Record) -> str:
    """Return a line for each op and outcome: the chosen provider, and why others were rejected."""
    lines = []
    for explanation, _ in record.outcomes():
        chosen = next(v for v in explanation.verdicts if v.outcome == "chosen")
        others = [f"{v.provider}: {v.reason}" for v in explanation.verdicts if v is not chosen]
        lines.append(f"\n  {explanation.op:<28} {chosen.provider:<12} {'; '.join(others)}".rstrip())
    return "".join(sorted(lines))


# Worker: owns a device, its memory, and the model on it.


_HOST_MEMORY = 4 << 30  # largest default cache size in the host's memory, in bytes


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a loaded model that the engine needs.

    Attributes:
        config: the model's configuration, or None.
        vocab_size: the size of the vocabulary.
        context: the maximum context length; None: unlimited.
        groups: the layers with a cache, grouped by retention.
        memory: the cache size in bytes.
        free: free memory on the device in bytes; ``sys.maxsize`` if unknown.
        needs_whole_prompts: whether a step must take a prompt whole.
    """

    config: Any
    vocab_size: int
    context: int | None
    groups: tuple[LayerGroup, ...]
    memory: int
    free: int = sys.maxsize
    needs_whole_prompts: bool = False


def share_of_host(free: int) -> int:
    """Return the default cache size in bytes, given the host's *free* memory."""
    return min(free // 4, _HOST_MEMORY)


class Worker:
    """One rank of an engine.

    An executor calls, in this order: :meth:`init_device`, :meth:`load_model`, :meth:`facts`,
    :meth:`allocate`, :meth:`warm_up`, and :meth:`execute` for every step. Calls that may be in
    another process take and return plain data.

    Args:
        model: the directory of a checkpoint.
        config: the engine's configuration.
        platform: the platform of the device.
        rank: the worker's rank, and the index of its device on this machine.
    """

    def __init__(
        self, model: str | Path, config: EngineConfig, platform: Platform, rank: int = 0
    ) -> None:
        self.path, self.config, self.platform, self.rank = Path(model), config, platform, rank

    def init_device(self) -> None:
        """Initialize the device."""
        self.platform.set_device(self.rank)
        # Not earlier: a platform may register its device type with torch in set_device().
        kind = self.platform.device_type
        self.device = torch.device(kind) if kind == "cpu" else torch.device(kind, self.rank)
        self.platform.seed_all(self.config.seed)

    def load_model(self, progress: Progress | None = None) -> None:
        """Load the checkpoint.

        Args:
            progress: called with the number of tensors loaded so far and in total.

        Raises:
            EngineError, ModelError: the checkpoint is missing, damaged or not supported.
        """
        with compilation_config(self.config.compilation) as compiling, self.device:
            loaded = load_model(
                self.path,
                dtype=self.config.dtype,
                load_format=self.config.load_format,
                model_impl=self.config.model_impl,
                seed=self.config.seed,
                progress=progress,
            )
        warn_of_unused_ops(compiling)
        warn_of_unused_replacements()
        model = as_language_model(loaded).to(self.device)
        self.platform.post_load_model(model)
        runner: type[ModelRunner] = part(self.platform, "get_model_runner_cls", self.config)
        self.runner = runner(model, self.config, self.platform, self.device)
        self.runner.progress = progress

    def facts(self) -> ModelFacts:
        """Return the facts about the model that the engine needs."""
        model = self.runner.model
        return ModelFacts(
            getattr(model, "config", None),
            model.vocab_size,
            model.max_positions,
            tuple(self.runner.groups),
            self._cache_memory(self.config.cache),
            self._free_memory(),
            model.needs_whole_prompts,
        )

    def allocate(self, plan: CachePlan) -> None:
        """Allocate the cache.

        Raises:
            UnsupportedCacheError: an attention backend does not support a layer's cache.
        """
        self.runner.allocate(plan)

    def warm_up(self) -> None:
        """Compile the model, and select the implementation of every op."""
        self.runner.warm_up()
        self.platform.synchronize()

    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        """Compute one step; see :meth:`ModelRunner.execute`."""
        return self.runner.execute(steps)

    def _cache_memory(self, cache: CacheConfig) -> int:
        if cache.memory_bytes is not None:
            return cache.memory_bytes
        free, total = self.platform.memory_info(self.rank)
        if self.platform.capabilities.unified_memory:
            return share_of_host(free)
        return max(0, free - int(total * (1 - cache.memory_utilization)))

    def _free_memory(self) -> int:
        try:
            return self.platform.memory_info(self.rank)[0]
        except UnsupportedByPlatformError:
            return sys.maxsize
