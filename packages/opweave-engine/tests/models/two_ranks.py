"""Program of the two processes of a tensor-parallel group."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed, multiprocessing

from opweave.config.engine import ModelImpl
from opweave.layers import TensorParallel, tensor_parallel
from opweave_engine.load.loader import load_model

RANKS = 2


def run_ranks(folder: str, codegen: bool) -> None:
    """Run the ranks in forks of this process, which has imported torch."""
    options = {"nprocs": RANKS, "start_method": "fork"}
    multiprocessing.start_processes(_run_rank, (Path(folder), codegen), **options)


def _run_rank(rank: int, folder: Path, codegen: bool) -> None:
    """Run what ``cases.pt`` says, and save what comes out."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    try:
        with torch.inference_mode(), tensor_parallel(TensorParallel.from_process_group()):
            cases = torch.load(folder / "cases.pt")
            results = {name: _run(codegen, **case) for name, case in cases.items()}
    finally:
        distributed.destroy_process_group()
    torch.save(results, folder / f"{rank}.pt")


def _run(
    codegen: bool, path: str, given: dict[str, Tensor], compiles: bool, model_impl: ModelImpl
) -> dict[str, Tensor]:
    """Return what the model in *path* makes of its inputs, and how large this rank's part is."""
    model = run = load_model(Path(path), dtype="float32", model_impl=model_impl)
    if compiles:
        options = {"codegen": codegen}
        run = torch.compile(model, backend="opweave", fullgraph=True, dynamic=True, options=options)
    result = model.compute_logits(run(*given.values()))
    return {"result": result, "numel": torch.tensor(sum(p.numel() for p in model.parameters()))}
