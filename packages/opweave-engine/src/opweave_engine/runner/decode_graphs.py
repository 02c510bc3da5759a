"""Recorded forwards of decode batches, which replace the launches of a step by one."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import ceil

import torch
from torch import Tensor

from opweave.config import EngineConfig
from opweave.config.progress import ProgressBar
from opweave.platforms import Platform
from opweave.platforms.graphs import GraphRecorder
from opweave_engine.attention.batch import SequenceBatch
from opweave_engine.attention.layers import LayerCaches
from opweave_engine.cache import NULL_BLOCK
from opweave_engine.loading.checkpoint import Progress
from opweave_engine.models import ForwardContext, forward_context
from opweave_engine.runner.compilation import Forward
from opweave_engine.runner.step import SequenceStep, padded_tables

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
