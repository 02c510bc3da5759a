"""Recorded forwards of decode batches, and the input of one forward."""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from opweave import ir
from opweave.config import EngineConfig
from opweave.config.terminal import ProgressBar
from opweave.layers import TensorParallel, current_tensor_parallel
from opweave.platforms import Platform
from opweave.platforms.base import GraphRecorder
from opweave_engine.attention import LayerCaches, SequenceBatch
from opweave_engine.errors import CommunicatorError
from opweave_engine.kv_cache import NULL_BLOCK
from opweave_engine.load.checkpoint import Progress
from opweave_engine.models import ForwardContext, forward_context
from opweave_engine.sampling.sampler import SamplingRequest

Forward = Callable[[Tensor, Tensor], Tensor]
Prediction = Callable[[Tensor, Tensor], list[Tensor]]
TokenIds = Callable[[Sequence["SequenceStep"]], Tensor]

# The input of a worker for one step: plain data that any process can read.


class SequenceStep(NamedTuple):
    """The part of one sequence that a forward pass computes.

    Attributes:
        request_id: the sequence.
        token_ids: the new tokens; at least one. ``[~row]`` is the token that this row of the step
            before has sampled, which only the device knows.
        start: the number of tokens before them, which are in the KV cache.
        tables: the block table of each group of layers.
        sampling: how to sample the next token; None: it is known.
        targets: the tokens that follow each of the first ones of *token_ids*, if their
            log-probabilities are requested; only with *sampling*.
    """

    request_id: str
    token_ids: list[int]
    start: int
    tables: tuple[Sequence[int], ...]
    sampling: SamplingRequest | None
    targets: Sequence[int] = ()


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host in memory from which *device* copies without waiting."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on *device*, without waiting for the copy."""
    return pinned(tensor, device).to(device, non_blocking=True)


def padded_tables(steps: Sequence[SequenceStep], group: int) -> Tensor:
    """Return the block tables of a group of layers, padded with the null block to one length.

    Returns:
        ``(sequences, blocks)``, int32, on the CPU.
    """
    tables, blocks = [step.tables[group] for step in steps], array("i")
    width = max(map(len, tables))
    for table in tables:
        blocks.extend(table)
        blocks.extend([NULL_BLOCK] * (width - len(table)))
    return torch.frombuffer(blocks, dtype=torch.int32).view(-1, width)


def cache_slots(steps: Sequence[SequenceStep], group: int, block_size: int) -> list[int]:
    """Return the cache slot of each new token in a group of layers."""
    return [
        table[position // block_size] * block_size + position % block_size
        for _, token_ids, start, tables, *_ in steps
        for table in (tables[group],)
        for position in range(start, start + len(token_ids))
    ]


# Recorded forwards of decode batches, which replace the launches of a step by one.


_log = logging.getLogger(__name__)

_MAX_SEQUENCES = 256  # beyond, kernels take longer than their launches
_NO_SLOT = -1


def decode_sizes(config: EngineConfig) -> list[int]:
    """Return the numbers of sequences to record graphs for, in ascending order."""
    most = min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
    sizes = config.compilation.decode_graph_sizes
    if sizes is None:
        sizes = (1, 2, 4, *range(8, _MAX_SEQUENCES + 1, 8))
    return sorted({size for size in sizes if size <= most})


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Callable[[], None]
    results: list[Tensor]  # of the prediction, overwritten by each replay


class DecodeGraphs:
    """The predictions of decode batches, one per number of sequences.

    A batch is padded to the next size: its padding reads the null block and writes nothing. The
    lengths are noted, and kernels that plan on the host do so before each replay.

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
        self._noted: dict[int, ir.HostLengths] = {}

    def record(
        self,
        predict: Prediction,
        caches: LayerCaches,
        platform: Platform,
        recorder: GraphRecorder,
        progress: Progress | None = None,
    ) -> None:
        """Record *predict*, for a model whose layers have *caches*, for every size.

        *progress* is called with the number of graphs recorded so far and in total.

        Raises:
            RuntimeError: the device cannot record it.
        """

        def recorded(size: int) -> _Graph:
            context, results = ForwardContext(caches.step(self._batches(size))), list[Tensor]()

            def run() -> None:
                with platform.inference_mode(), forward_context(context):
                    results[:] = predict(self._tokens[0, :size], self._tokens[1, :size])
                    if logits:  # one memory for the logits of all sizes
                        results[0] = logits[0][:size].copy_(results[0])

            return _Graph(recorder.record(run), results)

        # The tensors stay alive until the end, so that copies have other addresses.
        before = _tensors(caches)
        logits = list[Tensor]()
        # The largest first: smaller graphs then fit into its memory.
        for done, size in enumerate(reversed(self._sizes)):
            if progress is not None:
                progress(done, len(self._sizes))
            self._graphs[size] = recorded(size)
            logits = self._graphs[self._sizes[-1]].results[:1]
        after = _tensors(caches)
        if [tensor.data_ptr() for tensor in after] != [tensor.data_ptr() for tensor in before]:
            raise RuntimeError("an attention backend does not update its cache in place")

    def run(self, steps: Sequence[SequenceStep], ids: TokenIds) -> list[Tensor]:
        """Return the prediction of a step, whose tokens are *ids*; the next step overwrites it.

        Returns:
            Nothing if no graph has the step: it has prompts, or too many sequences.
        """
        count = len(steps)
        if count > self._sizes[-1] or any(len(s.token_ids) != 1 or s.targets for s in steps):
            return []
        size = self._sizes[bisect_left(self._sizes, count)]
        self._fill(steps, size)
        self._tokens[0, :count].copy_(ids(steps))
        graph = self._graphs[size]
        graph.replay()
        return [result[:count] for result in graph.results]

    def _batches(self, size: int) -> dict[int, SequenceBatch]:
        """Return the static inputs of *size* sequences, for each group of attention layers."""
        seq_lens, query_starts = self._lengths[:size], self._starts[: size + 1]
        self._noted[size] = ir.note_lengths(
            seq_lens, query_starts, [1] * size, range(size + 1), is_recorded=True
        )
        return {
            group: SequenceBatch(
                query_starts=query_starts,
                seq_lens=seq_lens,
                key_starts=self._key_starts[: size + 1],
                block_tables=table[:size],
                slot_mapping=self._tokens[2 + group, :size],
                num_decodes=size,
            )
            for group, table in enumerate(self._tables)
        }

    def _fill(self, steps: Sequence[SequenceStep], size: int) -> None:
        """Copy a step but its tokens to the static inputs, and padding up to *size* sequences."""
        padding = size - len(steps)
        positions = [step.start for step in steps]
        lengths = [*(position + 1 for position in positions), *[1] * padding]
        rows = array("q", [*positions, *[0] * padding])
        for group, table in enumerate(self._tables):
            tables = padded_tables(steps, group)
            _copy(table[: len(steps), : tables.shape[1]], tables)
            table[len(steps) : size, 0] = NULL_BLOCK
            rows.extend([*cache_slots(steps, group, self._block_size), *[_NO_SLOT] * padding])
        _copy(self._tokens[1:, :size], torch.frombuffer(rows, dtype=torch.int64).view(-1, size))
        _copy(self._lengths[:size], torch.tensor(lengths, dtype=torch.int32))
        ends = [0, *accumulate(lengths)]
        _copy(self._key_starts[: size + 1], torch.tensor(ends, dtype=torch.int32))
        self._noted[size].update(lengths)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(pinned(source, target.device), non_blocking=True)


class _EveryRank:
    """A recorder that records on every rank, or on none.

    After each recording, the ranks agree whether all have it. After a failure they call no further
    collective, so that none waits.

    Args:
        recorder: the recorder of this rank.
        ranks: the ranks, and the collective that agrees.
        device: the device of the collective.
    """

    def __init__(
        self, recorder: GraphRecorder, ranks: TensorParallel, device: torch.device
    ) -> None:
        self._recorder, self._ranks, self._device = recorder, ranks, device
        self._agrees = ranks.size > 1

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        runs: list[None] = []

        def counted() -> None:
            run()
            runs.append(None)

        with self.agreement():
            try:
                return self._recorder.record(counted)
            except RuntimeError as error:
                if runs or not self._agrees:
                    raise
                # Other ranks wait in the collectives of this run, which only a recording skips.
                raise CommunicatorError(
                    f"rank {self._ranks.rank} of {self._ranks.size}: a decode step failed before "
                    f"it was recorded: {error}. Try --enforce-eager, or fewer sequences."
                ) from error

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Raise RuntimeError after the block if it did so on any rank."""
        error = None
        try:
            yield
        except RuntimeError as failure:
            error = failure
        if self._agrees:
            failed = torch.tensor([error is not None], dtype=torch.int32, device=self._device)
            self._agrees = not self._ranks.all_reduce(failed).item()
            if not self._agrees:
                error = error or RuntimeError("another rank cannot record them")
        if error is not None:
            raise error


def record_decode_graphs(
    predict: Prediction,
    caches: LayerCaches,
    config: EngineConfig,
    platform: Platform,
    max_model_len: int,
    device: torch.device,
    progress: Progress | None = None,
) -> DecodeGraphs | None:
    """Record a model's decode batches, and log if they run without graphs although they could.

    With tensor parallelism, all ranks call this function in a ``tensor_parallel`` block, and record
    if all can. Their collectives must be recordable.

    Args:
        predict: returns the logits of ids and positions, and what is sampled from them.
        caches: of its layers.
        config: which sizes to record.
        platform: of the device.
        max_model_len: the maximum length of a sequence.
        device: of the model.
        progress: of loading; a progress bar then shows the number of graphs.

    Returns:
        None if the device records no graphs, or the model cannot be recorded.

    Raises:
        CommunicatorError: this rank failed where others wait for it.
    """
    sizes, recorder = decode_sizes(config), platform.graph_recorder()
    if recorder is None or not sizes:
        return None
    obstacle, ranks = "", current_tensor_parallel()
    if (count := config.parallel.tensor_parallel_size) > 1 and ranks.unrecorded:
        obstacle = f"with tensor_parallel_size={count}, {ranks.unrecorded}"
    elif caches.states is not None:
        obstacle = "the model has recurrent layers, whose states are addressed by the host"
    if obstacle:
        _log.warning("decode steps run without graphs: %s", obstacle)
        return None
    bar = progress.stage("recording graphs") if isinstance(progress, ProgressBar) else None
    size = config.cache.block_size
    graphs = DecodeGraphs(sizes, caches.num_groups, ceil(max_model_len / size), size, device)
    every_rank = _EveryRank(recorder, ranks, device)
    try:
        with every_rank.agreement():
            graphs.record(predict, caches, platform, every_rank, bar)
    except RuntimeError as error:
        _log.warning(
            "decode steps run without graphs, because the device cannot record them: %s. Disable "
            "them with --enforce-eager, or cudagraph_capture_sizes=[] in the compilation config.",
            str(error).partition("\n")[0],
        )
        return None
    _log.info("recorded graphs of decode steps with %s sequences", ", ".join(map(str, sizes)))
    return graphs


def _tensors(caches: LayerCaches) -> list[Tensor]:
    return [
        value
        for backend in caches.backends.values()
        for value in vars(backend).values()
        if isinstance(value, Tensor)
    ]
