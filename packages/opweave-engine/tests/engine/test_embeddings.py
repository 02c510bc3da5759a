"""Vectors are those of transformers, pooled as the checkpoint says, alone or together."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel

from models.tiny_checkpoints import Checkpoints, random_ids, randomized, write_tokenizer
from opweave.config import EngineConfig, SchedulerConfig
from opweave_engine import (
    AsyncEmbedder,
    CheckpointError,
    Embedder,
    EmbeddingOutput,
    EngineDeadError,
    InvalidArgumentError,
    PromptError,
    SamplingParams,
    load_model,
    open_engine,
)
from opweave_engine.models import UnsupportedModelError

PROMPTS = [random_ids(seed, count) for seed, count in enumerate([1, 7, 23, 2, 96])]


def assert_near(embedding: list[float], expected: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(embedding), expected, rtol=0, atol=2e-5)


POOLING: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda h: h[0],
    "max": lambda h: h.max(0).values,
    "mean": lambda h: h.mean(0),
    "mean_sqrt_len_tokens": lambda h: h.sum(0) / len(h) ** 0.5,
    "weightedmean": lambda h: (torch.arange(1, len(h) + 1) / (len(h) * (len(h) + 1) / 2)) @ h,
    "lasttoken": lambda h: h[-1],
}  # fmt: skip


def states(model: Any, prompt: list[int]) -> Tensor:
    with torch.inference_mode():
        hidden: Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return hidden


def pooled(path: Path, into: Path, pooling: dict[str, object] | None, *others: str) -> Path:
    """Copy a checkpoint, and make it one of sentence-transformers."""
    copy = Path(shutil.copytree(path, into / "model"))
    kinds = ["Transformer", *(["Pooling"] if pooling is not None else []), *others]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"sentence_transformers.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (copy / "modules.json").write_text(json.dumps(modules))
    (copy / "1_Pooling").mkdir()
    (copy / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return copy


def test_the_mean_of_the_tokens(checkpoint: Checkpoints) -> None:
    path, model = checkpoint("bert")
    outputs = Embedder(path).embed(PROMPTS)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_near(output.embedding, states(model, prompt).mean(0))


def test_forwards_are_limited(checkpoint: Checkpoints) -> None:
    path, _ = checkpoint("bert")
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=9)
    found = Embedder(path, config=EngineConfig(scheduler=limits)).embed(PROMPTS)
    for one, other in zip(found, Embedder(path).embed(PROMPTS), strict=True):
        assert_near(one.embedding, torch.tensor(other.embedding))


@pytest.mark.parametrize("mode", POOLING)
@pytest.mark.parametrize("as_flags", [False, True])
def test_pooling_of_sentence_transformers(
    mode: str, as_flags: bool, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path, model = checkpoint("bert")
    flag = mode if mode in ("lasttoken", "mean_sqrt_len_tokens") else f"{mode}_tokens"
    flag = "cls_token" if mode == "cls" else flag
    flags = {"pooling_mode_mean_tokens": False, f"pooling_mode_{flag}": True}
    config = {"word_embedding_dimension": 64, **(flags if as_flags else {"pooling_mode": mode})}
    copy = pooled(path, tmp_path, config, "Normalize")
    for prompt, output in zip(PROMPTS, Embedder(copy).embed(PROMPTS), strict=True):
        expected = POOLING[mode](states(model, prompt))
        assert_near(output.embedding, expected / expected.norm())


def test_several_ways_of_pooling_are_joined(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path, model = checkpoint("bert")
    flags = {f"pooling_mode_{each}": True for each in ("mean_tokens", "max_tokens", "cls_token")}
    (output,) = Embedder(pooled(path, tmp_path, flags)).embed(PROMPTS[1])
    hidden = states(model, PROMPTS[1])
    expected = torch.cat([POOLING[mode](hidden) for mode in ("cls", "max", "mean")])
    assert_near(output.embedding, expected)


def test_wrong_prompts_and_checkpoints(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path, _ = checkpoint("bert")
    with pytest.raises(PromptError, match=r"has 97 tokens, .* is 96 tokens. Shorten it by 1"):
        Embedder(path).embed([5] * 97)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM is not an encoder"):
        Embedder(checkpoint("llama")[0])
    copy = pooled(path, tmp_path, {"pooling_mode": "median"}, "Dense")
    with pytest.raises(CheckpointError, match=r"pooling by \['median'\]. Supported: cls, max"):
        Embedder(copy)
    (copy / "1_Pooling" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="pooling by nothing"):
        Embedder(copy)
    (copy / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    with pytest.raises(CheckpointError, match=r"type 'Dense'. Supported: Transformer"):
        Embedder(copy)
    (copy / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no 1_Pooling/config.json"):
        Embedder(copy)
    (copy / "modules.json").write_text('{"a": 1}')
    with pytest.raises(CheckpointError, match="must hold a JSON list of objects"):
        Embedder(copy)


@pytest.mark.parametrize(
    ("tokenizer", "sentence", "longest"),
    [
        (20, None, 20),  # as sentence-transformers 5.4 writes it
        (20, {"max_seq_length": 30}, 30),
        (20, {"max_seq_length": None}, 20),
        (500, None, 96),
        (10**30, None, 96),
        (1e30, None, 96),
        (None, None, 96),
    ],
)
def test_the_length_that_the_tokenizer_names(
    tokenizer: float | None,
    sentence: dict[str, Any] | None,
    longest: int,
    checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:
    copy = Path(shutil.copytree(checkpoint("bert")[0], tmp_path / "bert"))
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings["model_max_length"] = tokenizer
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    if sentence is not None:
        (copy / "sentence_roberta_config.json").write_text(json.dumps(sentence))
    embedder = Embedder(copy)
    assert embedder.max_model_len == longest
    embedder.embed([5] * longest)
    with pytest.raises(PromptError, match="Shorten it by 1"):
        embedder.embed([5] * (longest + 1))
    settings["model_max_length"] = "20"
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    if sentence != {"max_seq_length": 30}:
        with pytest.raises(CheckpointError, match="model_max_length='20'; it must be a positive"):
            Embedder(copy)


FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
# A file of sentence-transformers, its contents, and the end of the error; None: it is accepted.
SENTENCE_FILES: list[tuple[str, Any, str | None]] = [
    ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task='fill-mask"),
    ("sentence_bert_config.json", {"module_output_name": "scores"}, "module_output_name='scores'"),
    ("sentence_bert_config.json", {"config_args": {"is_decoder": True}}, "config_args={'is_dec"),
    (
        "sentence_bert_config.json",
        {"modality_config": {"text": {**FORWARD, "method_output_name": "logits"}}},
        "modality_config=.*'logits'.* not supported",
    ),
    (
        "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": FORWARD},
            "module_output_name": "token_embeddings",
            "unpad_inputs": None,
        },
        None,
    ),
    ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "model_type='SparseEnc"),
    (
        "config_sentence_transformers.json",
        {"model_type": "SentenceTransformer", "prompts": {}, "similarity_fn_name": "dot"},
        None,
    ),
    ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "token_embeddings"),
    ("2_Normalize/config.json", {"module_input_name": "sentence_embedding"}, None),
    ("1_Pooling/config.json", {"pooling_mode": "cls", "embedding_dimension": 64}, None),
    ("modules.json", [{"type": "custom_st.Transformer"}], "type 'custom_st.Transformer'"),
    (
        "modules.json",
        [{"type": f"sentence_transformers.{k}", "path": "1_Pooling"} for k in ("Pooling",) * 2],
        "the modules Pooling, Pooling. Supported: Transformer, Pooling, Normalize, in this order",
    ),
    ("modules.json", [{"type": "sentence_transformers.Pooling", "path": "../other"}],
     "names ../other, which is outside of the checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "value", "error"), SENTENCE_FILES)
def test_files_of_sentence_transformers_are_read_strictly(
    file: str,
    value: Any,
    error: str | None,
    checkpoint: Checkpoints,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copy = pooled(checkpoint("bert")[0], tmp_path, {"pooling_mode": "cls"}, "Normalize")
    (copy / file).parent.mkdir(exist_ok=True)
    (copy / file).write_text(json.dumps(value))
    if error is not None:
        with pytest.raises(CheckpointError, match=error):
            Embedder(copy)
        return
    Embedder(copy)
    assert not caplog.text
    (copy / file).write_text(json.dumps({**value, "depth": 3, "new": None}))
    Embedder(copy)
    assert [each.getMessage() for each in caplog.records] == [
        f"{copy / file}: unknown keys are ignored: 'depth'"
    ]


@pytest.mark.parametrize("kind", ["silu", "masked", "masked with a pooler", "prefixed"])
def test_other_checkpoints_of_bert(kind: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    config = BertConfig.from_pretrained(checkpoint("bert")[0])
    torch.manual_seed(3)
    if kind == "silu":
        config.hidden_act = "silu"
        randomized(BertModel(config)).save_pretrained(tmp_path)
    elif kind == "prefixed":  # as BertForPreTraining writes the encoder
        whole = randomized(BertModel(config))
        whole.save_pretrained(tmp_path)
        tensors = {f"bert.{name}": tensor for name, tensor in whole.state_dict().items()}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    else:
        masked = randomized(BertForMaskedLM(config))
        masked.save_pretrained(tmp_path)
        if kind == "masked with a pooler":
            tensors = load_file(tmp_path / "model.safetensors")
            shapes = {"weight": (64, 64), "bias": (64,)}
            pooler = {f"bert.pooler.dense.{n}": torch.ones(shape) for n, shape in shapes.items()}
            save_file({**tensors, **pooler}, tmp_path / "model.safetensors")
    model = AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    write_tokenizer(tmp_path)
    for prompt, output in zip(PROMPTS, Embedder(tmp_path).embed(PROMPTS), strict=True):
        assert_near(output.embedding, states(model, prompt).mean(0))
    if kind == "masked":
        loaded = load_model(tmp_path)
        engine = open_engine(tmp_path)
        assert isinstance(engine, AsyncEmbedder)
        engine.shutdown()
        with pytest.raises(UnsupportedModelError, match="has no pooler"):
            loaded.pool(torch.zeros(1, 64))  # type: ignore[attr-defined]


def test_settings_of_sentence_transformers(
    checkpoint: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = Path(shutil.copytree(checkpoint("bert")[0], tmp_path / "bert"))
    wanted = Embedder(copy).tokens("the quick DOG")
    assert wanted != Embedder(copy).tokens("the quick dog")
    (copy / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    embedder = Embedder(copy)
    assert embedder.max_model_len == 96
    assert embedder.tokens("THE quick DOG") == embedder.tokens("the quick dog") != wanted
    assert not caplog.text
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (copy / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (copy / "modules.json").write_text(
        '[{"path": "pooling", "type": "sentence_transformers.models.Pooling"}]'
    )
    (copy / "pooling").mkdir()
    config = {"pooling_mode": "cls", "include_prompt": False}
    (copy / "pooling" / "config.json").write_text(json.dumps(config))
    Embedder(copy)
    assert "default_prompt_name='query' is not followed" in caplog.text
    assert "include_prompt=False is not followed" in caplog.text
    for value in (0, "256", True):
        settings = json.dumps({"max_seq_length": value})
        (copy / "sentence_bert_config.json").write_text(settings)
        with pytest.raises(CheckpointError, match="must be a positive integer or null"):
            Embedder(copy)


def test_many_at_once_from_asyncio(checkpoint: Checkpoints) -> None:
    path, _ = checkpoint("bert")
    engine = open_engine(path)
    assert isinstance(engine, AsyncEmbedder)

    async def run() -> list[EmbeddingOutput]:
        jobs = [engine.embed(PROMPTS[i % 5], request_id=str(i)) for i in range(40)]
        found = await asyncio.gather(*jobs)
        with pytest.raises(InvalidArgumentError, match="does not generate text"):
            await anext(engine.generate("a", SamplingParams(), request_id="g"))
        with pytest.raises(PromptError):
            await engine.embed([-1], request_id="bad")
        await engine.drain(timeout=10)
        with pytest.raises(EngineDeadError, match="shut down"):
            await engine.embed("a", request_id="late")
        return found

    wanted = [output.embedding for output in Embedder(path).embed(PROMPTS)]
    for i, output in enumerate(asyncio.run(run())):
        assert output.request_id == str(i)
        assert_near(output.embedding, torch.tensor(wanted[i % 5]))
    stats = engine.stats()
    assert stats.finished == {"stop": 40}
    assert stats.prompt_tokens == 8 * sum(map(len, PROMPTS))
    assert (stats.running, stats.waiting) == (0, 0)
    engine.shutdown()


def test_a_cancelled_request_harms_nobody(checkpoint: Checkpoints) -> None:
    engine = AsyncEmbedder(checkpoint("bert")[0])

    async def run() -> None:
        gone = asyncio.create_task(engine.embed(PROMPTS[4], request_id="a"))
        stays = asyncio.create_task(engine.embed(PROMPTS[1], request_id="b"))
        await asyncio.sleep(0)
        gone.cancel()
        assert len((await stays).embedding) == 64
        assert gone.cancelled() or (await asyncio.gather(gone, return_exceptions=True))

    asyncio.run(run())
    assert engine.is_running
    engine.shutdown()


def test_a_dead_encoder_tells_everybody(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncEmbedder(checkpoint("bert")[0])

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    async def run() -> None:
        monkeypatch.setattr(engine._embedder, "vectors", fail)
        jobs = [engine.embed("a", request_id=str(i)) for i in range(3)]
        for error in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
            assert "the device is gone" in str(error)

    asyncio.run(run())
    assert not engine.is_running
    assert isinstance(engine.dead_with, RuntimeError)
    assert engine.stats().replicas == 0
    engine.shutdown()
