"""Models of transformers in the engine: how they are run, loaded and refused."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import masking_utils

from hugging_face.transformers_checkpoints import VOCABULARY, write_checkpoint
from models.tiny_checkpoints import Checkpoints, edit_config
from opweave.config import CacheConfig, EngineConfig, SchedulerConfig
from opweave.ir.errors import SettingError
from opweave.layers.registry import ShardingError
from opweave_engine import LLM, CheckpointError, PromptError, SamplingParams
from opweave_engine.load.loader import check_ranks, load_model
from opweave_engine.models import InvalidConfigError, UnsupportedModelError
from opweave_engine.transformers import attention, loading
from opweave_engine.transformers.attention import NotSuitableError
from opweave_engine.transformers.model import (
    CachedSequences,
    PackedSequences,
    RecomputedSequences,
    TransformersModel,
)
from support import ROOT

# Fields that differ by family, and how the engine runs it.
FAMILIES: dict[str, tuple[dict[str, Any], type]] = {
    "olmo2": ({}, PackedSequences),
    "gemma2": ({"head_dim": 16, "sliding_window": 16}, PackedSequences),
    "opt": ({"ffn_dim": 96, "word_embed_proj_dim": 64}, PackedSequences),  # positions are learned
    "bloom": ({"n_layer": 2, "n_head": 4}, CachedSequences),  # biases by distance
    "mamba": ({"state_size": 8}, CachedSequences),
}
LENGTHS = (1, 9, 70)
Family = Checkpoints


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Return a function that gives the directory of a checkpoint, and transformers' model in it."""

    @cache
    def get(name: str) -> tuple[Path, Any]:
        path = tmp_path_factory.mktemp(name)
        model_type, fields = BY_LENGTH.get(name) or (name, FAMILIES[name][0])
        return path, write_checkpoint(path, model_type, fields)

    return get


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS
    ]


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int = 8) -> list[int]:
    """Return transformers' tokens, computed without a cache."""
    ids = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def generated(path: Path, **options: Any) -> list[list[int]]:
    options.setdefault("cache", CacheConfig(num_blocks=64))
    llm = LLM(path, config=EngineConfig(**options))
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts(), params)]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers(family: Family, name: str) -> None:
    """In chunks, too; the fastest way to run the model that agrees is chosen."""
    path, model = family(name)
    expected = [greedy(model, prompt) for prompt in prompts()]
    for chunk in (2048, 16):
        scheduler = SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=8)
        assert generated(path, scheduler=scheduler) == expected
    loaded = load_model(path)
    assert isinstance(loaded, TransformersModel)
    assert type(loaded.sequences) is FAMILIES[name][1]


def test_a_model_whose_cache_is_wrong_runs_without(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reference = family("bloom")
    attend = transformers.models.bloom.modeling_bloom.BloomAttention.forward

    def forgets(self: Any, *args: Any, layer_past: Any = None, **kwargs: Any) -> Any:
        return attend(self, *args, layer_past=None, **kwargs)

    wanted = [greedy(reference, prompt) for prompt in prompts()]
    monkeypatch.setattr(transformers.models.bloom.modeling_bloom.BloomAttention, "forward", forgets)
    model = load_model(path)
    assert isinstance(model, TransformersModel)
    assert type(model.sequences) is RecomputedSequences
    assert generated(path) == wanted


@pytest.mark.slow
def test_a_packed_model_compiles(family: Family) -> None:
    path, model = family("olmo2")
    found = generated(path, compilation_config={"mode": "OPWEAVE_COMPILE"})
    assert found == [greedy(model, prompt) for prompt in prompts()]


def test_prompts_share_their_prefix(family: Family) -> None:
    path, model = family("olmo2")
    blocks = CacheConfig(num_blocks=64, block_size=16)
    llm = LLM(path, config=EngineConfig(cache=blocks))
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    long = prompts()[-1]
    for prompt in (long, [*long[:40], 5, 6]):
        (found,) = llm.generate([prompt], params)
        assert list(found.outputs[0].token_ids) == greedy(model, prompt, 4)
    assert found.num_cached_tokens >= 32


@pytest.mark.parametrize(
    "mask",
    [
        masking_utils.bidirectional_mask_function,
        masking_utils.chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64)),
        masking_utils.packed_sequence_mask_function(torch.zeros(1, 8)),
        lambda b, h, q, k: k < q,  # a token does not see itself
    ],
)
def test_other_masks_are_not_suitable(mask: Callable[..., Any]) -> None:
    with pytest.raises(NotSuitableError):
        attention._window_of(mask)


def copied(path: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a checkpoint, with changed tensors."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((path / "config.json").read_bytes())
    return target


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"1 missing: {NORM}"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), "1 unexpected: extra"),
        (lambda tensors: tensors.update({NORM: torch.zeros(3)}), f"1 do not fit: {NORM}"),
    ],
)
def test_loading_is_strict(
    family: Family, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = copied(family("olmo2")[0], tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def edited(path: Path, target: Path, **fields: Any) -> Path:
    copied(path, target, lambda tensors: None)
    edit_config(target, **fields)
    return target


@pytest.mark.parametrize(
    ("load_format", "message"),
    [
        ("auto", r"describes a model of [\d,]+ parameters, but the files hold [\d,]+\. "),
        ("dummy", r"asks for more memory than there is: the model takes [\d,]+ bytes"),
    ],
)
def test_sizes_are_checked_before_memory_is_allocated(
    load_format: Any, message: str, family: Family, tmp_path: Path
) -> None:
    shutil.copytree(family("olmo2")[0], tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, intermediate_size=2**38)
    with pytest.raises(CheckpointError, match=f"^config.json {message}"):
        load_model(tmp_path, load_format=load_format)
    edit_config(tmp_path, head_dim=2**31, intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"^config.json says head_dim=2147483648, but there"):
        load_model(tmp_path, load_format=load_format)


def test_a_configuration_that_transformers_refuses(family: Family, tmp_path: Path) -> None:
    path = edited(family("olmo2")[0], tmp_path, hidden_act="sine")
    with pytest.raises((InvalidConfigError, CheckpointError), match="sine"):
        load_model(path)


def test_models_that_cannot_be_divided(family: Family) -> None:
    with pytest.raises(ShardingError, match=r"BloomForCausalLM.* tensor_parallel_size=1"):
        check_ranks(family("bloom")[0], 2)
    with pytest.raises(ShardingError, match="num_attention_heads=4 cannot be divided over 3"):
        check_ranks(family("olmo2")[0], 3)


def test_the_implementation_can_be_named(family: Family, tmp_path: Path) -> None:
    path = family("olmo2")[0]
    with pytest.raises(UnsupportedModelError, match="Olmo2ForCausalLM"):
        load_model(path, model_impl="opweave")
    unknown = edited(path, tmp_path, architectures=["NothingForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="no causal language model NothingForCausalLM"):
        load_model(unknown, model_impl="transformers")
    with pytest.raises(SettingError, match="model_impl='other'"):
        EngineConfig(model_impl="other")  # type: ignore[arg-type]


def test_transformers_is_recommended_where_it_is_missing(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("is_available", "has_model"):
        monkeypatch.setattr(loading, name, lambda *_: False)
    with pytest.raises(UnsupportedModelError, match=r"'opweave-engine\[transformers\]'"):
        load_model(family("olmo2")[0])


def test_models_of_opweave_load_without_transformers() -> None:
    path = ROOT / "examples" / "models" / "tiny-pydoc"
    code = (
        "import sys; from opweave_engine.async_engine import engine_class;"
        "from opweave_engine.load.loader import load_model;"
        f"engine_class({str(path)!r}); load_model({str(path)!r});"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}
# Families whose rotary embedding depends on the length of a sequence, with the switch at 32 tokens.
BY_LENGTH: dict[str, tuple[str, dict[str, Any]]] = {
    # transformers' code computes keys again when a sequence passes the switch
    "phi3": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "phimoe": ("phimoe", {"rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.2},
                          "num_local_experts": 4}),
    # or does not
    "longrope": ("olmo2", {"rope_parameters": LONGROPE}),
    "dynamic": (
        "olmo2",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
            "max_position_embeddings": 32,
        },
    ),
}  # fmt: skip
# Below the switch, passing it, and above it.
SWITCHING = [
    torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (70, 9, 28, 32, 33, 60)
]


def by_generate(model: Any, prompt: list[int], count: int) -> list[int]:
    model, ids = copy.deepcopy(model), torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return list(found[0, len(prompt) :].tolist())


def in_chunks(path: Path, chunk: int) -> LLM:
    scheduler = SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=8)
    return LLM(path, config=EngineConfig(cache=CacheConfig(num_blocks=64), scheduler=scheduler))


@pytest.mark.parametrize("name", BY_LENGTH)
def test_ropes_that_depend_on_the_length(family: Family, name: str) -> None:
    path, model = family(name)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    # The context of "dynamic" ends at the switch.
    context = model.config.max_position_embeddings
    prompts = [prompt for prompt in SWITCHING if len(prompt) + 12 <= context]
    expected = [by_generate(model, prompt, 12) for prompt in prompts]
    for chunk in (2048, 16):
        outputs = in_chunks(path, chunk).generate(prompts, params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.parametrize(("name", "chunk"), [("phi3", 16), ("longrope", 2048)])
def test_log_probabilities_of_a_prompt_above_the_switch(
    family: Family, name: str, chunk: int
) -> None:
    path, model = family(name)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    prompts, llm = [SWITCHING[0], SWITCHING[1], SWITCHING[-1]], in_chunks(path, chunk)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        rows = logits.log_softmax(-1)
        for place, entry in enumerate(output.prompt_logprobs[1:], start=1):
            wanted = rows[place - 1, prompt[place]].item()
            assert entry[prompt[place]].logprob == pytest.approx(wanted, abs=1e-3)


def test_the_check_at_load_covers_both_sides_of_a_switch(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CachedSequences, "_still_valid", lambda self, tokens, cache: cache)
    model = load_model(family("phi3")[0])
    assert isinstance(model, TransformersModel)
    assert type(model.sequences) is RecomputedSequences


def test_prompts_are_limited_to_the_context(family: Family) -> None:
    llm = LLM(family("olmo2")[0], config=EngineConfig(cache=CacheConfig(num_blocks=64)))
    with pytest.raises(PromptError, match="the context is 256 tokens"):
        llm.generate([[5] * 300], SamplingParams(max_tokens=1))
