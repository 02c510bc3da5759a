"""An engine's priorities hold for its own forwards and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from models.tiny_checkpoints import Checkpoints
from opweave import ir
from opweave.config import EngineConfig, KernelConfig
from opweave.ir.testing import restored
from opweave_engine import LLM, SamplingParams

ONE = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
ran: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _provider() -> Iterator[None]:
    """Register a provider that says when it runs."""
    op = ir.ops.embedding
    native = op.impls["native"].impl_fn
    with restored(op):

        @op.register_impl("engine_test")
        def spy(input_ids: Tensor, weight: Tensor) -> Tensor:
            ran.append("engine_test")
            result: Tensor = native(input_ids, weight)
            return result

        yield


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    ran.clear()
    yield
    ran.clear()


def call() -> None:
    with torch.inference_mode():
        ir.ops.embedding(torch.zeros(1, dtype=torch.int64), torch.ones(1, 4))


@pytest.mark.parametrize("options", [
    {"ir_op_priority": {"embedding": ["engine_test"]}},
    {"ir_op_priority": {"embedding": "engine_test!"}},
    {"ir_op_priority": ir.IrOpPriorityConfig(embedding=["engine_test"])},
    {"config": EngineConfig(kernel_config=KernelConfig({"embedding": ["engine_test"]}))},
    {"ir_op_priority": {"linear": "native"},
     "config": EngineConfig(kernel_config=KernelConfig({"embedding": "engine_test"}))},
])  # fmt: skip
def test_priorities_hold_for_the_engines_forwards(
    options: dict[str, Any], checkpoint: Checkpoints
) -> None:
    llm = LLM(checkpoint("llama")[0], **options)
    assert ran == ["engine_test"]  # the warm-up, which is a forward of the engine
    ran.clear()
    llm.generate("a", ONE)
    assert len(ran) == 2  # one for each of two forwards


def test_nothing_leaks(checkpoint: Checkpoints) -> None:
    path = checkpoint("llama")[0]
    mine, other = LLM(path, ir_op_priority={"embedding": "engine_test"}), LLM(path)
    ran.clear()
    call()
    mine.generate("a", ONE, progress=lambda done, total: call())
    assert len(ran) == 2  # not from the callback
    other.generate("a", ONE)
    call()
    assert len(ran) == 2


def test_nothing_leaks_after_an_error(checkpoint: Checkpoints) -> None:
    llm = LLM(checkpoint("llama")[0], ir_op_priority={"embedding": "engine_test"})

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", ONE, progress=stop)
    ran.clear()
    call()
    assert ran == []
    llm.generate("a", ONE)
    assert len(ran) == 2


def test_the_callers_scope_holds_too_and_is_weaker(checkpoint: Checkpoints) -> None:
    path = checkpoint("llama")[0]
    with ir.priority(embedding="engine_test"):
        LLM(path).generate("a", ONE)
        assert len(ran) == 3  # the warm-up, and one for each of two forwards
        LLM(path, ir_op_priority={"embedding": "native"}).generate("a", ONE)
        assert len(ran) == 3


def test_the_callers_record_sees_the_forwards(checkpoint: Checkpoints) -> None:
    llm = LLM(checkpoint("llama")[0], ir_op_priority={"embedding": "engine_test"})
    with ir.record() as log:
        llm.generate("a", ONE)
    assert log.selected_impls["embedding"] == {"engine_test": 2}
    assert log.selected_impls["paged_attention"] == {"opweave_c": 4}
