"""Programs for several ranks, and processes to run them in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, distributed, multiprocessing
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional

import opweave.compile
from opweave import ir

RANKS, HIDDEN, HEAD, HEADS, EXPERTS = 2, 32, 8, 4, 4
Program = Callable[[Tensor], Tensor]


class Rank(NamedTuple):
    """Where a program runs; rank 0 of one rank is the model as it was written."""

    rank: int
    ranks: int

    def columns(self, weight: Tensor, parts: int = 1) -> Tensor:
        """Return this rank's share of the outputs of a linear layer, of each of *parts* of them."""
        return torch.cat([part.chunk(self.ranks)[self.rank] for part in weight.chunk(parts)])

    def rows(self, weight: Tensor) -> Tensor:
        """Return this rank's share of the inputs of a linear layer."""
        return weight.chunk(self.ranks, 1)[self.rank].contiguous()

    def sum(self, x: Tensor) -> Tensor:
        if self.ranks == 1:
            return x
        summed: Tensor = functional_collectives.all_reduce(x, "sum", distributed.group.WORLD)
        return summed

    def sum_in_place(self, x: Tensor) -> Tensor:
        if self.ranks > 1:
            distributed.all_reduce(x)
        return x


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape) / shape[-1] ** 0.5


class Mlp:
    """A column parallel and a row parallel layer: a part of the sum over all ranks."""

    def __init__(self, rank: Rank, width: int = 2 * HIDDEN) -> None:
        self.up = rank.columns(weights(width, HIDDEN))
        self.down = rank.rows(weights(HIDDEN, width))

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.up).relu(), self.down)


def llama(rank: Rank, layers: int = 2) -> Program:
    embedding = torch.randn(50, HIDDEN)
    norms = torch.randn(2 * layers + 1, HIDDEN).unbind()
    qkv = [rank.columns(weights(3 * HIDDEN, HIDDEN), 3) for _ in range(layers)]
    out = [rank.rows(weights(HIDDEN, HIDDEN)) for _ in range(layers)]
    gate_up = [rank.columns(weights(4 * HIDDEN, HIDDEN), 2) for _ in range(layers)]
    down = [rank.rows(weights(HIDDEN, 2 * HIDDEN)) for _ in range(layers)]
    add_norm = ir.ops.fused_add_rms_norm.maybe_inplace

    def forward(ids: Tensor) -> Tensor:
        x = embedding[ids]
        r = torch.zeros_like(x)
        for i in range(layers):
            x, r = add_norm(x, r, norms[2 * i], 1e-5)
            heads = functional.linear(x, qkv[i]).view(-1, 3 * HEADS // rank.ranks, HEAD)
            q, k, v = (part.transpose(0, 1)[None] for part in heads.chunk(3, 1))
            x = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x[0].transpose(0, 1).reshape(-1, HIDDEN // rank.ranks)
            x = rank.sum(functional.linear(x, out[i]))
            x, r = add_norm(x, r, norms[2 * i + 1], 1e-5)
            x = ir.ops.silu_and_mul(functional.linear(x, gate_up[i]))
            x = rank.sum(functional.linear(x, down[i]))
        x, _ = add_norm(x, r, norms[-1], 1e-5)
        return functional.linear(x, embedding)

    return forward


def quantized(rank: Rank) -> Program:
    """Activations of 8 bits, with a scale for each token, then with one for all."""
    embedding, norm, scale = torch.randn(50, HIDDEN), torch.randn(HIDDEN), torch.full((1,), 0.05)
    first, second, third = Mlp(rank), Mlp(rank), Mlp(rank)

    def forward(ids: Tensor) -> Tensor:
        r = embedding[ids]
        x, r = ir.ops.fused_add_rms_norm(rank.sum(first(r)), r, norm, 1e-5)
        q, s = ir.ops.dynamic_per_token_quant_fp8(x)
        x, r = ir.ops.fused_add_rms_norm(rank.sum(second(q.float() * s)), r, norm, 1e-5)
        return rank.sum(third(ir.ops.static_quant_fp8(x, scale).float() * scale))

    return forward


def mixture(rank: Rank) -> Program:
    """Top-2 of the experts; each rank has some, and weighs its own."""
    embedding, norm, router = torch.randn(50, HIDDEN), torch.randn(HIDDEN), weights(EXPERTS, HIDDEN)
    up = rank.columns(weights(EXPERTS, HIDDEN, HIDDEN))
    down = rank.columns(weights(EXPERTS, HIDDEN, HIDDEN))
    dense, own = Mlp(rank), EXPERTS // rank.ranks

    def forward(ids: Tensor) -> Tensor:
        r = embedding[ids]
        x, r = ir.ops.fused_add_rms_norm(rank.sum(dense(r)), r, norm, 1e-5)
        shares, chosen = functional.linear(x, router).softmax(-1).topk(2, -1)
        mixed = x.new_zeros(x.shape[0], EXPERTS).scatter(1, chosen, shares)
        mixed = mixed[:, own * rank.rank : own * (rank.rank + 1)]
        hidden = torch.einsum("th,eih->tei", x, up).relu()
        y = rank.sum(torch.einsum("tei,ehi,te->th", hidden, down, mixed))
        return functional.linear(ir.ops.fused_add_rms_norm(y, r, norm, 1e-5)[0], router)

    return forward


def by_hand(rank: Rank) -> Program:
    """A norm in plain torch, after a collective that writes in place."""
    embedding, bias, mlp = torch.randn(50, HIDDEN), torch.randn(HIDDEN), Mlp(rank)

    def forward(ids: Tensor) -> Tensor:
        x = rank.sum_in_place(mlp(embedding[ids])) + bias
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        heads = ir.ops.rms_norm(x.view(-1, HEADS, HEAD), None, 1e-5)
        return rank.sum_in_place(mlp(heads.flatten(1)[:, None].squeeze(1)))

    return forward


def parts_that_differ(rank: Rank) -> Program:
    """A residual that is divided, so that it may be summed with what each rank adds to it."""
    embedding, norm = torch.randn(50, HIDDEN), torch.randn(HIDDEN)
    first, second = Mlp(rank), Mlp(rank)

    def forward(ids: Tensor) -> Tensor:
        r = rank.sum(first(embedding[ids]))
        x = ir.ops.rms_norm(r, norm, 1e-5)
        return rank.sum(r / rank.ranks + second(x))

    return forward


def one_layer(rank: Rank) -> Program:
    return llama(rank, layers=1)


PROGRAMS = {
    make.__name__: make
    for make in (llama, one_layer, quantized, mixture, by_hand, parts_that_differ)
}


class Case(NamedTuple):
    """A program, the numbers of tokens it is called with, and how it is compiled."""

    program: str
    tokens: tuple[int, ...]
    dynamic: bool = False
    codegen: bool = False


class Outcome(NamedTuple):
    """The collectives of each call, and how far it was from the model on one rank, at most."""

    collectives: list[dict[str, int]]
    difference: float


def run_ranks(cases: list[Case], folder: Path) -> list[list[Outcome]]:
    """Run *cases* on :data:`RANKS` ranks with gloo; return the outcomes of each rank."""
    multiprocessing.spawn(_run_rank, (cases, folder), nprocs=RANKS)
    texts = [(folder / f"{rank}.json").read_text(encoding="utf-8") for rank in range(RANKS)]
    return [[Outcome(*outcome) for outcome in json.loads(text)] for text in texts]


def _run_rank(rank: int, cases: list[Case], folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    try:
        with torch.no_grad():
            outcomes = [_run(case, Rank(rank, RANKS)) for case in cases]
    finally:
        distributed.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(outcomes), encoding="utf-8")


def _run(case: Case, rank: Rank) -> Outcome:
    whole, own = (_made(case.program, where) for where in (Rank(0, 1), rank))
    torch.compiler.reset()
    compiled = torch.compile(
        own, backend=opweave.compile.backend, fullgraph=True, options={"codegen": case.codegen}
    )
    collectives, difference = [], 0.0
    for tokens in case.tokens:
        ids = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(tokens))
        if case.dynamic:
            torch._dynamo.mark_dynamic(ids, 0)
        expected, found = whole(ids), compiled(ids)
        difference = max(difference, (found - expected).abs().max().item())
        collectives.append(opweave.compile.report().collectives)
    return Outcome(collectives, difference)


def _made(program: str, rank: Rank) -> Program:
    torch.manual_seed(0)
    return PROGRAMS[program](rank)
