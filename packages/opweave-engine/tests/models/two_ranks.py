"""Program of the two processes of a tensor-parallel group; imports little, as each imports it."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from opweave.config.engine import ModelImpl
from opweave.layers import TensorParallel, tensor_parallel
from opweave_engine.load.loader import load_model
from opweave_engine.models import GptOssMoE, LanguageModel

RANKS = 2


def run_rank(rank: int, folder: Path, codegen: bool) -> None:
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
    codegen: bool,
    path: str,
    given: dict[str, Tensor],
    compiles: bool,
    model_impl: ModelImpl,
) -> dict[str, Tensor]:
    """Return what the model in *path* makes of its inputs, and how large this rank's part is."""
    model = run = _load(Path(path), model_impl)
    if compiles:
        options = {"codegen": codegen}
        run = torch.compile(model, backend="opweave", fullgraph=True, dynamic=True, options=options)
    hidden = run(*given.values())
    result = model.compute_logits(hidden) if isinstance(model, LanguageModel) else hidden
    return {"result": result, "numel": torch.tensor(sum(p.numel() for p in model.parameters()))}


def _load(path: Path, model_impl: ModelImpl) -> Any:
    weights = path / "block.pt"
    if not weights.exists():
        return load_model(path, dtype="float32", model_impl=model_impl)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    block = GptOssMoE.from_hf(config, dtype=torch.float32)
    block.load_weights(torch.load(weights).items())
    return block
