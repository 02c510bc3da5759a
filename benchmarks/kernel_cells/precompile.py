"""Compiles for Inductor what will be measured, on all cores, before anything is timed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from kernel_cells.cell import Cell
from kernel_cells.contenders import Inductor, rejection

_WORTH_IT = 8


def precompile(families: Sequence[Sequence[Cell]]) -> Iterator[None]:
    """Fill Inductor's cache on disk; yields once for each family that is done.

    What fails here fails again where it is measured, and is reported there.
    """
    if len(families) < _WORTH_IT:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        for done in as_completed([pool.submit(_compile, cells[0]) for cells in families]):
            done.result()
            yield


def _compile(cell: Cell) -> None:
    torch.set_num_threads(cell.threads)
    with torch.inference_mode():
        inputs = cell.inputs()
        if rejection(cell, inputs) is None:
            Inductor(cell, inputs)
