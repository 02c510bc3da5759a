"""The forward of a model: its input for one step, its compilation, and recorded decode graphs."""

from __future__ import annotations

import inspect
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from opweave.config import CompilationConfig, CompilationMode, EngineConfig
from opweave.config.terminal import ProgressBar
from opweave.ir.errors import did_you_mean
from opweave.platforms import Platform
from opweave.platforms.base import GraphRecorder
from opweave.plugins import resolve_obj_by_qualname
from opweave_engine.attention import LayerCaches, SequenceBatch
from opweave_engine.errors import InvalidArgumentError
from opweave_engine.kv_cache import NULL_BLOCK
from opweave_engine.load.checkpoint import Progress
from opweave_engine.models import ForwardContext, forward_context
from opweave_engine.sampling.sampler import SamplingRequest

# The input of a worker for one step: plain data that any process can read.


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """The part of one sequence that a forward pass computes.

    Attributes:
        request_id: the sequence.
        token_ids: the new tokens; at least one.
        start: the number of tokens before them, which are in the KV cache.
        tables: the block table of each group of layers.
        sampling: how to sample the next token; None: it is known.
        targets: the tokens that follow each of the first ones of *token_ids*, if their
            log-probabilities are requested; only with *sampling*.
    """

    request_id: str
    token_ids: list[int]
    start: int
    tables: tuple[tuple[int, ...], ...]
    sampling: SamplingRequest | None
    targets: Sequence[int] = ()

    def slot(self, group: int, position: int, block_size: int) -> int:
        """Return the cache slot of the token at *position* in a group of layers."""
        return self.tables[group][position // block_size] * block_size + position % block_size


def padded_tables(steps: Sequence[SequenceStep], group: int) -> list[list[int]]:
    """Return the block tables of a group of layers, padded with the null block to one length."""
    tables = [step.tables[group] for step in steps]
    width = max(map(len, tables))
    return [[*table, *[NULL_BLOCK] * (width - len(table))] for table in tables]


# Compilation of a model's forward.


Forward = Callable[[Tensor, Tensor], Tensor]

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
    if callable(_backend(config.backend)):
        return
    # torch loads all of its compiler to list the backends; the default is always one of them.
    is_default = config.backend == CompilationConfig.backend
    if not is_default and config.backend not in torch.compiler.list_backends(exclude_tags=()):
        raise InvalidArgumentError(
            f"compilation_config: backend {config.backend!r} is not a backend of torch.compile. "
            f"{did_you_mean(config.backend, torch.compiler.list_backends())}"
        )
    if config.compiles and config.backend_options:
        _check_options(config)


def _check_options(config: CompilationConfig) -> None:
    from opweave.compile import CompileOptions, compat

    if config.uses_passes:
        CompileOptions.parse(config.backend_options)
    elif config.backend == "inductor":
        known = compat.inductor_option_names()
        for name in config.backend_options:
            if name.replace("-", "_") not in known:
                raise InvalidArgumentError(
                    f"compilation_config: Inductor has no option {name!r}. "
                    f"{did_you_mean(name, sorted(known))} Those of opweave's passes need mode="
                    f"{CompilationMode.OPWEAVE_COMPILE.name}."
                )


def _backend(name: str) -> str | Callable[..., Any]:
    """Return the backend for ``torch.compile``: a registered name, or a function."""
    if ":" not in name:
        return name
    found: Callable[..., Any] = resolve_obj_by_qualname(name)
    return found


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
    compiling = config.compilation
    if not compiling.compiles:
        return [1]
    found = {1, 2}
    if compiling.uses_passes:
        found |= _sizes_of_passes(config)
    most = config.scheduler.max_num_batched_tokens
    return sorted(size for size in found if size <= most)


def _sizes_of_passes(config: EngineConfig) -> set[int]:
    from opweave.compile import CompileOptions
    from opweave.compile.sequence import MIN_ROWS

    options = CompileOptions.parse(config.compilation.backend_options)
    found = {size for low, high in options.ranges for size in (low, high + 1) if size > 0}
    ranks = config.parallel.tensor_parallel_size
    if options.sequence_parallelism and ranks > 1:
        found.add(MIN_ROWS * ranks)
    return found


# Recorded forwards of decode batches, which replace the launches of a step by one.


_log = logging.getLogger(__name__)

_LARGEST = 256  # sequences; beyond, kernels take longer than their launches
_NO_SLOT = -1


def decode_sizes(config: EngineConfig) -> list[int]:
    """Return the numbers of sequences to record graphs for, in ascending order."""
    most = min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
    given = config.compilation.decode_graph_sizes
    sizes = {1, 2, 4, *range(8, _LARGEST + 1, 8)} if given is None else set(given)
    return sorted(size for size in sizes if size <= most)


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Callable[[], None]
    results: list[Tensor]  # one: (size, hidden_size), overwritten by each replay


class DecodeGraphs:
    """The forwards of decode batches, one per number of sequences.

    A batch is padded to the next size: its padding reads the null block and writes nothing.

    Args:
        sizes: numbers of sequences, in ascending order; at least one.
        groups: the number of groups of attention layers.
        width: the number of blocks of the longest sequence.
        block_size: tokens per block.
        device: the device of the model.
    """

    def __init__(
        self, sizes: Sequence[int], groups: int, width: int, block_size: int, device: torch.device
    ) -> None:
        self._sizes, self._block_size = list(sizes), block_size
        largest = self._sizes[-1]
        # Static inputs: the recorded kernels read them at the same addresses in each replay.
        self._tokens = torch.zeros(2 + groups, largest, dtype=torch.int64, device=device)
        self._tokens[2:] = _NO_SLOT
        self._lengths = torch.ones(largest, dtype=torch.int32, device=device)
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._key_starts = self._starts.clone()
        self._tables = torch.full(
            (groups, largest, width), NULL_BLOCK, dtype=torch.int32, device=device
        )
        self._graphs: dict[int, _Graph] = {}

    def record(
        self,
        forward: Forward,
        caches: LayerCaches,
        platform: Platform,
        recorder: GraphRecorder,
        progress: Progress | None = None,
    ) -> None:
        """Record *forward* for every size.

        Args:
            forward: the model's forward.
            caches: of its layers.
            platform: of the device.
            recorder: of the device.
            progress: called with the number of graphs recorded so far and in total.

        Raises:
            RuntimeError: the device cannot record it.
        """
        # The tensors stay alive until the end, so that copies have other addresses.
        before = _tensors(caches)
        # The largest first: smaller graphs then fit into its memory.
        for done, size in enumerate(reversed(self._sizes)):
            if progress is not None:
                progress(done, len(self._sizes))
            context = ForwardContext(caches.step(self._batches(size)))
            results: list[Tensor] = []
            run = partial(self._run_forward, size, forward, context, platform, results)
            self._graphs[size] = _Graph(recorder.record(run), results)
        after = _tensors(caches)
        if [tensor.data_ptr() for tensor in after] != [tensor.data_ptr() for tensor in before]:
            raise RuntimeError("an attention backend does not update its cache in place")

    def run(self, steps: Sequence[SequenceStep]) -> Tensor | None:
        """Return the hidden states ``(sequences, hidden_size)`` of a step.

        They are overwritten by the next step.

        Returns:
            None if no graph has the step: it has prompts, or too many sequences.
        """
        count = len(steps)
        if count > self._sizes[-1] or any(len(step.token_ids) != 1 for step in steps):
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        self._fill(steps, size)
        graph = self._graphs[size]
        graph.replay()
        return graph.results[0][:count]

    def _run_forward(
        self,
        size: int,
        forward: Forward,
        context: ForwardContext,
        platform: Platform,
        results: list[Tensor],
    ) -> None:
        with platform.inference_mode(), forward_context(context):
            results[:] = [forward(self._tokens[0, :size], self._tokens[1, :size])]

    def _batches(self, size: int) -> dict[int, SequenceBatch]:
        return {
            group: SequenceBatch(
                query_starts=self._starts[: size + 1],
                seq_lens=self._lengths[:size],
                key_starts=self._key_starts[: size + 1],
                block_tables=table[:size],
                slot_mapping=self._tokens[2 + group, :size],
                num_decodes=size,
            )
            for group, table in enumerate(self._tables)
        }

    def _fill(self, steps: Sequence[SequenceStep], size: int) -> None:
        """Copy a step to the static inputs, and padding up to *size* sequences."""
        padding = size - len(steps)
        positions = [step.start for step in steps]
        lengths = [*(position + 1 for position in positions), *[1] * padding]
        rows = [[step.token_ids[0] for step in steps], positions]
        rows = [[*row, *[0] * padding] for row in rows]
        for group, table in enumerate(self._tables):
            tables = torch.tensor(padded_tables(steps, group), dtype=torch.int32)
            table[: len(steps), : tables.shape[1]].copy_(tables)
            table[len(steps) : size, 0] = NULL_BLOCK
            slots = [step.slot(group, step.start, self._block_size) for step in steps]
            rows.append([*slots, *[_NO_SLOT] * padding])
        self._tokens[:, :size].copy_(torch.tensor(rows, dtype=torch.int64))
        self._lengths[:size].copy_(torch.tensor(lengths, dtype=torch.int32))
        ends = [0, *accumulate(lengths)]
        self._key_starts[: size + 1].copy_(torch.tensor(ends, dtype=torch.int32))


def record_decode_graphs(
    forward: Forward,
    caches: LayerCaches,
    config: EngineConfig,
    platform: Platform,
    groups: int,
    max_model_len: int,
    device: torch.device,
    progress: Progress | None = None,
) -> DecodeGraphs | None:
    """Record a model's decode batches, and log if they run without graphs although they could.

    Args:
        forward: the model's forward.
        caches: of its layers.
        config: which sizes to record.
        platform: of the device.
        groups: the number of groups of layers.
        max_model_len: the maximum length of a sequence.
        device: of the model.
        progress: of loading; a progress bar then shows the number of graphs.

    Returns:
        None if the device records no graphs, or the model cannot be recorded.
    """
    sizes, recorder = decode_sizes(config), platform.graph_recorder()
    if recorder is None or not sizes:
        return None
    obstacle = _obstacle(config, caches)
    if obstacle is not None:
        _log.warning("decode steps run without graphs: %s", obstacle)
        return None
    bar = progress.stage("recording graphs") if isinstance(progress, ProgressBar) else None
    block_size = config.cache.block_size
    graphs = DecodeGraphs(sizes, groups, ceil(max_model_len / block_size), block_size, device)
    try:
        graphs.record(forward, caches, platform, recorder, bar)
    except RuntimeError as error:
        _log.warning(
            "decode steps run without graphs, because the device cannot record them: %s. Disable "
            "them with --enforce-eager, or cudagraph_capture_sizes=[] in the compilation config.",
            str(error).partition("\n")[0],
        )
        return None
    _log.info("recorded graphs of decode steps with %s sequences", ", ".join(map(str, sizes)))
    return graphs


def _obstacle(config: EngineConfig, caches: LayerCaches) -> str | None:
    """Return why the steps of a model cannot be recorded, or None."""
    ranks = config.parallel.tensor_parallel_size
    if ranks > 1:
        return f"with tensor_parallel_size={ranks}, ranks communicate, which is not recorded"
    if caches.states is not None:
        return "the model has recurrent layers, whose states are addressed by the host"
    return None


def _tensors(caches: LayerCaches) -> list[Tensor]:
    return [
        value
        for backend in caches.backends.values()
        for value in vars(backend).values()
        if isinstance(value, Tensor)
    ]
