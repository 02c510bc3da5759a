"""Attention that plans on the host gets the lengths from the engine, never from the device."""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters import planned_libraries
from adapters.planned_libraries import Wrapper
from engine.test_decode_graphs import FakeRecorder, RecordingPlatform, answers, config, tokens_of
from models.tiny_checkpoints import Checkpoints
from opweave import ir
from opweave.ir.ops import arguments
from opweave.ir.testing import restored
from opweave.kernels.arguments import HAS_HOST_LENGTHS
from opweave.kernels.libraries import flashinfer
from opweave.platforms.builtin import CpuPlatform

LAYERS = 2  # of the checkpoint
calls: list[ir.HostLengths] = []


def without_lengths(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with wrong numbers in the tensors of lengths, and the right note."""
    seq_lens, cu_seqlens_q = values[4:6]
    noted = ir.host_lengths(seq_lens, cu_seqlens_q)
    assert noted is not None
    calls.append(noted)
    assert seq_lens.tolist() == noted.lengths
    assert cu_seqlens_q.tolist() == list(noted.starts)
    wrong = [torch.full_like(t, -(10**6)) for t in (seq_lens, cu_seqlens_q)]
    setattr(wrong[0], arguments._NOTE, dataclasses.replace(noted, cu_seqlens_q=wrong[1]))
    return *values[:4], *wrong, *values[6:]


@functools.wraps(ir.ops.paged_attention.native)
def attend(*args: Any, **kwargs: Any) -> Tensor:
    """Attend by plans of FlashInfer, which would fail if they read lengths from a tensor."""
    values = without_lengths(ir.ops.paged_attention.bind(*args, **kwargs))
    out: Tensor = flashinfer._paged_attention(*values)
    return out


@functools.wraps(ir.ops.mla_attention_decode.native)
def attend_latent(*args: Any, **kwargs: Any) -> Tensor:
    values = without_lengths(ir.ops.mla_attention_decode.bind(*args, **kwargs))
    out: Tensor = flashinfer._mla_attention_decode(*values)
    return out


@pytest.fixture(autouse=True)
def _planner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "flashinfer", planned_libraries)
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 16)
    monkeypatch.setattr(Wrapper, "plans", 0)
    monkeypatch.setattr(RecordingPlatform, "_recorder", FakeRecorder())
    flashinfer._workspace.cache_clear()
    calls.clear()
    monkeypatch.setattr(planned_libraries.BatchMLAPagedAttentionWrapper, "multiples", (1, 1))
    with restored(ir.ops.paged_attention), restored(ir.ops.mla_attention_decode):
        ir.ops.paged_attention.register_impl("planner", supports_args=HAS_HOST_LENGTHS)(attend)
        ir.ops.mla_attention_decode.register_impl("planner", supports_args=HAS_HOST_LENGTHS)(
            attend_latent
        )
        yield
    flashinfer._workspace.cache_clear()


def prompts() -> list[list[int]]:
    choose = random.Random(1)
    return [[choose.randrange(3, 90) for _ in range(choose.randrange(1, 40))] for _ in range(9)]


@pytest.mark.parametrize("kind", ["llama", "deepseek"])
@pytest.mark.parametrize("platform", [CpuPlatform, RecordingPlatform])
def test_every_step_is_planned_once(
    platform: type[CpuPlatform], kind: str, checkpoint: Checkpoints
) -> None:
    path = checkpoint(kind)[0]
    expected = answers(path, prompts(), CpuPlatform(), config())
    assert not calls
    with ir.priority(paged_attention=["planner!"], mla_attention_decode=["planner!"]):
        found = answers(path, prompts(), platform(), config())
    assert tokens_of(found) == tokens_of(expected)
    layers = Counter(id(noted) for noted in calls if not noted.is_recorded)
    assert set(layers.values()) == {LAYERS}
    recorder: Any = RecordingPlatform._recorder
    assert bool(recorder.replays) == (platform is RecordingPlatform)
    assert Wrapper.plans == len(layers) + recorder.recordings + recorder.replays
