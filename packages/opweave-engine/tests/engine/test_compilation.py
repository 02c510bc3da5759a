"""An engine's compilation config: what is compiled, with what, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import opweave.compile
from models.tiny_checkpoints import Checkpoints
from opweave import ir
from opweave.compile import OptionError
from opweave.config import (
    CacheConfig,
    CompilationConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    compilation_config,
    current_compilation_config,
)
from opweave.ir.errors import SettingError
from opweave.layers.registry import UnusedOpWarning
from opweave_engine import LLM, SamplingParams
from opweave_engine.errors import InvalidArgumentError
from opweave_engine.load.loader import load_model
from opweave_engine.runner import _ISOLATED, compiled_forward, graph_sizes

SHORT = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(["a", "some more"], SHORT)]


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        (1, "aot_eager"),
        (3, "eager"),
        pytest.param(2, "aot_eager", marks=pytest.mark.slow),
        pytest.param(1, "inductor", marks=pytest.mark.slow),
        pytest.param(3, "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_models_write_the_same(mode: int, backend: str, checkpoint: Checkpoints) -> None:
    path = checkpoint("llama")[0]
    expected = tokens(LLM(path))
    config = EngineConfig(compilation_config={"mode": mode, "backend": backend})
    llm = LLM(path, config=config)
    assert tokens(llm) == expected
    stats = llm.stats()
    assert (stats.compile_seconds > 0) is config.compilation.compiles
    in_graph = {use.op for use in stats.kernels if use.tokens is None}
    assert ("embedding" in in_graph) is config.compilation.uses_passes


@pytest.mark.parametrize(
    ("mode", "backend", "used", "whole"),
    [
        (1, "inductor", "inductor", False),
        (2, "inductor", "inductor", True),
        (3, "inductor", "opweave", True),
        (3, "opweave", "opweave", True),
        (3, "aot_eager", "aot_eager", True),
        (0, "inductor", None, None),
        (3, "eager", None, None),
    ],
)
def test_what_each_mode_compiles_with(
    mode: int, backend: str, used: str | None, whole: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    def spy(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        given.append(options)
        return model

    monkeypatch.setattr(torch, "compile", spy)
    model = torch.nn.Identity()
    for options in ({}, {"max_autotune": True}):
        config = CompilationConfig(backend, mode, options=options)
        assert compiled_forward(model, config) is model
        expected = {
            "backend": used,
            "dynamic": True,
            "fullgraph": whole,
            "options": options or None,
            **_ISOLATED,
        }
        assert given == ([expected] if used else [])
        given.clear()


def test_an_unknown_backend_is_refused_before_the_model_loads() -> None:
    config = EngineConfig(compilation_config={"mode": 1, "backend": "inducto"})
    with pytest.raises(InvalidArgumentError, match=r"'inducto'.* Did you mean 'inductor'"):
        LLM("no/such/model", config=config)


@pytest.mark.parametrize(
    ("mode", "options", "error", "said"),
    [
        (3, {"sequence_paralelism": 0}, OptionError, "Did you mean 'sequence_parallelism'"),
        (3, {"fusion": "no"}, OptionError, "fusion='no' is neither True nor False"),
        (3, '{"fusion": 1}', OptionError, "fusion=1 is neither"),
        (1, {"max_autotun": True}, InvalidArgumentError, "Did you mean 'max_autotune'"),
        (1, {"fusion": True}, InvalidArgumentError, r"'fusion'.* need mode=OPWEAVE_COMPILE"),
        (3, '{"fusion": ', SettingError, r"options='{\"fusion\": ' is not a JSON object, such as"),
        (3, "[1]", SettingError, r"options='\[1\]' must be a mapping or a JSON object"),
        (3, {1: 2}, SettingError, "must be a mapping or a JSON object"),
    ],
)
def test_options_that_are_wrong_are_refused_before_the_model_loads(
    mode: int, options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        LLM(
            "no/such/model",
            config=EngineConfig(compilation_config={"mode": mode, "options": options}),
        )


def test_options_are_those_of_the_backend(checkpoint: Checkpoints) -> None:
    options = {"codegen": False, "priorities": {"silu_and_mul": "native"}}
    compiling = {"mode": 3, "backend": "opweave", "options": options}
    config = EngineConfig(compilation_config=compiling)
    as_text = EngineConfig(compilation_config={**compiling, "options": json.dumps(options)})
    assert as_text.compilation == config.compilation
    path = checkpoint("one_layer")[0]
    assert tokens(LLM(path, config=as_text)) == tokens(LLM(path))
    chosen = {node.op: node.chosen for node in opweave.compile.report().nodes}
    assert chosen["silu_and_mul"] == "native"
    assert chosen["rms_norm"] == "opweave_c"


@pytest.mark.skipif(not _ISOLATED, reason="this torch counts the graphs of all engines together")
def test_engines_do_not_use_up_the_graphs_of_others(checkpoint: Checkpoints) -> None:
    compiling = {"mode": 3, "backend": "opweave", "options": {"codegen": False}}
    config = EngineConfig(compilation_config=compiling)
    paths = [checkpoint(kind)[0] for kind in ("one_layer", "llama")]
    with torch._dynamo.config.patch(recompile_limit=2):  # one for one token, one for several
        compiled = [LLM(path, config=config) for path in paths]
        assert [tokens(llm) for llm in compiled] == [tokens(LLM(path)) for path in paths]


RANGES: dict[str, Any] = {"compile_ranges": {"1-4": {}, "16-99": {}}}


@pytest.mark.parametrize(
    ("compiling", "ranks", "sizes"),
    [
        ({}, 1, [1]),
        ({"mode": 3, "backend": "eager"}, 2, [1]),
        ({"mode": 1}, 2, [1, 2]),
        ({"mode": 3}, 1, [1, 2]),
        ({"mode": 3}, 2, [1, 2, 6]),
        ({"mode": 1, "backend": "opweave"}, 4, [1, 2, 12]),
        ({"mode": 3, "options": {"sequence_parallelism": False}}, 2, [1, 2]),
        ({"mode": 3, "options": RANGES}, 2, [1, 2, 5, 6, 16]),  # 100 tokens are too many
    ],
)
def test_every_graph_is_compiled_before_requests_come(
    compiling: dict[str, Any], ranks: int, sizes: list[int]
) -> None:
    config = EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        parallel=ParallelConfig(tensor_parallel_size=ranks),
        compilation_config=compiling,
    )
    assert graph_sizes(config) == sizes


@pytest.mark.parametrize("provider", ["opweave_c", "aten"])
def test_graphs_for_more_tokens_than_a_block_or_a_prompt_has(
    provider: str, checkpoint: Checkpoints
) -> None:
    options = {"codegen": False, "compile_ranges": {"1-4": {}, "40-50": {}, "300-400": {}}}
    config = EngineConfig(
        compilation_config={"mode": 3, "options": options}, cache=CacheConfig(block_size=16)
    )
    assert graph_sizes(config)[-2:] == [300, 401]
    with ir.priority(paged_attention=[provider]):
        llm = LLM(checkpoint("llama")[0], config=config)
        assert tokens(llm) == tokens(LLM(checkpoint("llama")[0]))


def test_the_model_is_built_under_the_config(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[CompilationConfig] = []

    def spy(*arguments: Any, **options: Any) -> Any:
        seen.append(current_compilation_config())
        return load_model(*arguments, **options)

    monkeypatch.setattr("opweave_engine.runner.load_model", spy)
    path, typed = checkpoint("llama")[0], CompilationConfig(custom_ops=["none"])
    LLM(path, config=EngineConfig(compilation_config=typed))
    with compilation_config(typed):
        LLM(path)
    assert seen == [typed, typed]


def test_names_without_effect_are_warned_of_where_the_engine_is_made(
    checkpoint: Checkpoints,
) -> None:
    config = EngineConfig(compilation_config={"custom_ops": "+no_such_op"})
    with pytest.warns(UnusedOpWarning, match="'no_such_op', which doesn't exist") as caught:
        LLM(checkpoint("llama")[0], config=config)
    assert caught[0].filename == __file__
