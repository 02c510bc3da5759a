"""Runs a model on one device: the worker, its model runner and its compiled forward."""

from __future__ import annotations

import inspect
import logging
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from math import isnan
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.config import CompilationConfig, CompilationMode, EngineConfig, compilation_config
from opweave.ir.errors import did_you_mean
from opweave.layers import SequenceStates
from opweave.layers.registry import warn_of_unused_ops, warn_of_unused_replacements
from opweave.platforms import Platform
from opweave.platforms.base import UnsupportedByPlatformError
from opweave.plugins import resolve_obj_by_qualname
from opweave_engine.attention import LayerCaches, SequenceBatch, cache_specs, layer_groups
from opweave_engine.decode_graphs import (
    DecodeGraphs,
    Forward,
    SequenceStep,
    cache_slots,
    on_device,
    padded_tables,
    record_decode_graphs,
)
from opweave_engine.errors import InvalidArgumentError
from opweave_engine.kv_cache import CachePlan, LayerGroup
from opweave_engine.load.checkpoint import Progress
from opweave_engine.load.loader import as_language_model, load_model
from opweave_engine.models import ForwardContext, LanguageModel, forward_context
from opweave_engine.parts import part, supports
from opweave_engine.sampling.sampler import (
    Sampled,
    Sampler,
    TokenLogprob,
    non_finite,
    read_tokens,
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


# Compilation of a model's forward.


# Dynamo limits the graphs of one function, which the models of all engines in a process share.
# torch 2.13 can count them by engine; before, another engine may need torch.compiler.reset().
_BY_ENGINE = "isolate_recompiles"
_ISOLATED: dict[str, Any] = (
    {_BY_ENGINE: True} if _BY_ENGINE in inspect.signature(torch.compile).parameters else {}
)


def check_backend(config: CompilationConfig) -> None:
    """Check that the backend exists: one of torch's, or the ``"package.module:function"`` named.

    Raises:
        InvalidArgumentError: the backend of torch or the option of Inductor does not exist.
        OptionError: the option of opweave's passes does not exist.
        ReferenceNameError: (an ImportError) the function does not exist.
    """
    backend, options = config.backend, config.backend_options
    if callable(_backend(backend)):
        return
    # torch loads all of its compiler to list the backends; the default is always one of them.
    is_default = backend == CompilationConfig.backend
    if not is_default and backend not in torch.compiler.list_backends(exclude_tags=()):
        raise InvalidArgumentError(
            f"compilation_config: backend {backend!r} is not a backend of torch.compile. "
            f"{did_you_mean(backend, torch.compiler.list_backends())}"
        )
    if not config.compiles or not options:
        return
    from opweave.compile import CompileOptions, compat

    if config.uses_passes:
        CompileOptions.parse(options)
    elif backend == "inductor":
        names = compat.inductor_option_names()
        for name in options:
            if name.replace("-", "_") not in names:
                raise InvalidArgumentError(
                    f"compilation_config: Inductor has no option {name!r}. "
                    f"{did_you_mean(name, sorted(names))} Those of opweave's passes need mode="
                    f"{CompilationMode.OPWEAVE_COMPILE.name}."
                )


def _backend(name: str) -> str | Callable[..., Any]:
    """Return the backend for ``torch.compile``: a registered name, or a function."""
    if ":" not in name:
        return name
    function: Callable[..., Any] = resolve_obj_by_qualname(name)
    return function


def compiled_forward(model: nn.Module, config: CompilationConfig) -> Forward:
    """Return ``model(ids, positions)``, compiled for any number of tokens if *config* compiles.

    In mode ``OPWEAVE_COMPILE``, backend ``inductor`` means opweave's passes and then Inductor.
    """
    if not config.compiles:
        return model
    forward: Forward = torch.compile(
        model,
        backend="opweave" if config.uses_passes else _backend(config.backend),
        dynamic=True,
        fullgraph=config.mode != CompilationMode.STOCK_TORCH_COMPILE,
        options=dict(config.backend_options) or None,
        **_ISOLATED,
    )
    return forward


def graph_sizes(config: EngineConfig) -> list[int]:
    """Return the smallest number of tokens of each graph, in ascending order.

    A graph runs for all numbers up to the next graph's. Running the model once with each of these
    numbers compiles all graphs. ``torch.compile`` has one graph for one token and one for more;
    sequence parallelism, one for few and one for many tokens per rank; and ``compile_ranges``, one
    for each range.
    """
    if not config.compilation.compiles:
        return [1]
    sizes = {1, 2}
    if config.compilation.uses_passes:
        from opweave.compile import CompileOptions
        from opweave.compile.sequence import MIN_ROWS

        options = CompileOptions.parse(config.compilation.backend_options)
        sizes |= {size for low, high in options.ranges for size in (low, high + 1) if size > 0}
        ranks = config.parallel.tensor_parallel_size
        if options.sequence_parallelism and ranks > 1:
            sizes.add(MIN_ROWS * ranks)
    return sorted(size for size in sizes if size <= config.scheduler.max_num_batched_tokens)


# Builds a model's inputs from the scheduled steps, runs it, and samples tokens.


_log = logging.getLogger(__name__)

_SCORED_TOKENS = 64  # of a prompt at once: each has a score for every token of the vocabulary


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
        groups: the layers with a cache, grouped by retention.
        overlaps: whether :meth:`launch` samples plain requests without waiting for the device.
        progress: shows or receives the progress of loading.
    """

    progress: Progress | None = None

    def __init__(
        self, model: LanguageModel, config: EngineConfig, platform: Platform, device: torch.device
    ) -> None:
        self.model, self.config, self.platform, self.device = model, config, platform, device
        self._forward = compiled_forward(model, config.compilation)
        self._specs = cache_specs(model, model.dtype)
        self.groups = layer_groups(self._specs, config.cache.block_size)
        self._caches: LayerCaches | None = None
        self._max_model_len = 0
        self._graphs: DecodeGraphs | None = None
        sampler: type[Sampler] = part(platform, "get_sampler_cls", config)
        self._sampler = sampler()
        asked = config.scheduler.async_scheduling
        wanted = platform.capabilities.streams if asked is None else asked
        self.overlaps = wanted and supports(self._sampler, "launch", "__call__")
        self._sampled: Tensor | None = None

    def allocate(self, plan: CachePlan) -> None:
        """Allocate the caches of all layers.

        Raises:
            UnsupportedCacheError: an attention backend does not support a layer's cache.
        """
        self._max_model_len = plan.max_model_len
        self._caches = LayerCaches(
            self.model, self._specs, self.groups, plan, self.platform, self.device
        )

    def warm_up(self) -> None:
        """Compile the model: run it on one token, and on every size at which a new graph begins.

        The first run selects every op, and the selection is logged. Then the decode steps are
        recorded, on devices that record graphs.
        """
        # As execute() does: Dynamo recompiles for tensors from outside of inference mode.
        with self.platform.inference_mode():
            with ir.record() as record:
                self._run(self._blank(1), keeps=False)
            _log.info("kernels of the first forward:%s", _selections(record))
            for size in graph_sizes(self.config)[1:]:
                self._run(self._blank(size), keeps=False)
        assert self._caches is not None, "allocate() comes first"
        self._graphs = record_decode_graphs(
            self._predict, self._caches, self.config, self.platform, self._max_model_len,
            self.device, self.progress,
        )  # fmt: skip
        self.progress = None

    def _blank(self, size: int) -> list[SequenceStep]:
        """Return steps with this number of tokens: a sequence in decode, and prompts."""
        most = self._max_model_len
        counts = [1, *(min(most, size - first) for first in range(1, size, most))]
        tables = tuple((0,) * -(-max(counts) // self.config.cache.block_size) for _ in self.groups)
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
        return self.launch(steps)()

    def launch(self, steps: Sequence[SequenceStep]) -> Callable[[], list[Sampled]]:
        """Start a step; return a function that waits for the result of :meth:`execute`.

        Plain requests do not need the host, so the next step may be launched before. A platform's
        runner that replaces :meth:`execute` alone is not asked for this.
        """
        with self.platform.inference_mode():
            recorded = [] if self._graphs is None else self._graphs.run(steps, self._ids)
            rows, *tokens = recorded or [self._run(steps)]  # logits or hidden states
            requests = [step.sampling for step in steps if step.sampling is not None]
            if not requests:
                return list
            last, asking = rows, list[tuple[int, SequenceStep]]()
            if len(requests) < len(rows) or any(step.targets for step in steps):
                ends = accumulate([len(step.token_ids) for step in steps])
                asking = [(end, s) for end, s in zip(ends, steps, strict=True) if s.sampling]
                last, tokens = rows[self._tensor([end - 1 for end, _ in asking])], []
            logits = last if recorded else self.model.compute_logits(last)
            if self.overlaps and all(request.is_plain for request in requests):
                self._sampled = tokens[0] if tokens else self._sampler.launch(logits)
                return self._reader(self._sampled)
            sampled, broken = self._sampler(logits, requests), []
            for row, (end, step) in enumerate(asking):
                if step.targets:
                    scores = self._prompt_logprobs(rows[end - len(step.token_ids) : end], step)
                    sampled[row] = sampled[row]._replace(prompt_logprobs=scores)
                    if any(isnan(place[0].logprob) for place in scores):
                        broken.append(row)
            if broken:
                raise non_finite("NaN", broken)
            return lambda: sampled

    def _predict(self, ids: Tensor, positions: Tensor) -> list[Tensor]:
        """Return logits, and the tokens of plain requests."""
        logits = self.model.compute_logits(self._forward(ids, positions))
        return [logits, self._sampler.launch(logits)] if self.overlaps else [logits]

    def _reader(self, tokens: Tensor) -> Callable[[], list[Sampled]]:
        """Start to copy *tokens* to the host; return a function that waits for them."""
        streams = self.platform.capabilities.streams
        # A copy, because the next step may overwrite them. The event of a CPU is a no-op.
        copy = tokens.to("cpu", non_blocking=streams, copy=True)
        copied = torch.get_device_module(self.device if streams else "cpu").Event()
        copied.record()

        def read() -> list[Sampled]:
            copied.synchronize()
            return read_tokens(copy.tolist())

        return read

    def _prompt_logprobs(
        self, hidden: Tensor, step: SequenceStep
    ) -> tuple[tuple[TokenLogprob, ...], ...]:
        assert step.sampling is not None, f"{step.request_id=} has targets only"
        count = step.sampling.params.prompt_logprobs or 0
        scores: list[tuple[TokenLogprob, ...]] = []
        for first in range(0, len(step.targets), _SCORED_TOKENS):
            targets = step.targets[first : first + _SCORED_TOKENS]
            logits = self.model.compute_logits(hidden[first : first + len(targets)])
            scores += token_logprobs(logits, targets, [count] * len(targets))
        return tuple(scores)

    def _ids(self, steps: Sequence[SequenceStep]) -> Tensor:
        """Return the new tokens, which may be those that the step before has sampled."""
        ids = self._tensor(chain.from_iterable([step.token_ids for step in steps]))
        if self._sampled is None or steps[0].token_ids[0] >= 0:
            return ids
        # Negative tokens stand for logits that are not finite. The engine drops this step then.
        return self._sampled.index_select(0, ~ids).clamp_(min=0)

    def _run(self, steps: Sequence[SequenceStep], *, keeps: bool = True) -> Tensor:
        """Return the hidden states; if *keeps* is False, do not write to the caches."""
        counts, starts = [len(step.token_ids) for step in steps], [step.start for step in steps]
        lengths = list(map(add, starts, counts))
        positions = self._tensor(chain.from_iterable(map(range, starts, lengths)))
        with forward_context(self._context(steps, counts, lengths, keeps)):
            return self._forward(self._ids(steps), positions)

    def _context(
        self, steps: Sequence[SequenceStep], counts: list[int], lengths: list[int], keeps: bool
    ) -> ForwardContext:
        caches = self._caches
        assert caches is not None, "allocate() comes first"
        query_starts = list(accumulate(counts, initial=0))
        shared: dict[str, Any] = {
            "query_starts": self._tensor(query_starts, torch.int32),
            "seq_lens": self._tensor(lengths, torch.int32),
            "key_starts": self._tensor(accumulate(lengths, initial=0), torch.int32),
            "num_decodes": next((i for i, count in enumerate(counts) if count > 1), len(counts)),
        }
        ir.note_lengths(shared["seq_lens"], shared["query_starts"], lengths, query_starts)
        size, batches = self.config.cache.block_size, {}
        for group in range(len(self.groups)):
            if group != caches.state_group:
                slots = cache_slots(steps, group, size) if keeps else repeat(-1, sum(counts))
                tables = on_device(padded_tables(steps, group), self.device)
                batches[group] = SequenceBatch(
                    **shared, block_tables=tables, slot_mapping=self._tensor(slots)
                )
        states = None
        if caches.states is not None and caches.state_group is not None:
            slots = [step.tables[caches.state_group][0] if keeps else -1 for step in steps]
            first = [step.start for step in steps]
            states = SequenceStates.of(counts, first, slots, caches.states, self.device)
        return ForwardContext(caches.step(batches), states)

    def _tensor(self, values: Iterable[int], dtype: torch.dtype = torch.int64) -> Tensor:
        # Several times as fast as torch.tensor(), which looks at the type of every value.
        numbers = array("q" if dtype is torch.int64 else "i", values)
        return on_device(torch.frombuffer(numbers, dtype=dtype), self.device)


def _selections(record: ir.Record) -> str:
    """Return a line for each op and outcome: the chosen provider, and why others were rejected."""
    lines = []
    for explanation, _ in record.outcomes():
        chosen = next(v for v in explanation.verdicts if v.outcome == "chosen")
        others = [f"{v.provider}: {v.reason}" for v in explanation.verdicts if v is not chosen]
        lines.append(f"\n  {explanation.op:<28} {chosen.provider:<12} {'; '.join(others)}".rstrip())
    return "".join(sorted(lines))


# Worker: owns a device, its memory, and the model on it.


_MAX_HOST_BYTES = 4 << 30  # largest default cache size in the host's memory


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
    return min(free // 4, _MAX_HOST_BYTES)


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
                self.path, dtype=self.config.dtype, load_format=self.config.load_format,
                model_impl=self.config.model_impl, seed=self.config.seed, progress=progress,
            )  # fmt: skip
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
            getattr(model, "config", None), model.vocab_size, model.max_positions,
            tuple(self.runner.groups), self._cache_memory(), self._free_memory(),
            model.needs_whole_prompts,
        )  # fmt: skip

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

    def launch(self, steps: Sequence[SequenceStep]) -> Callable[[], list[Sampled]]:
        """Start one step; see :meth:`ModelRunner.launch`."""
        return self.runner.launch(steps)

    def _cache_memory(self) -> int:
        cache = self.config.cache
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
