"""Loading is strict, and says what is wrong."""

from __future__ import annotations

import gc
import json
import mmap
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from models.tiny_checkpoints import LLAMAS, Checkpoints, edit_config, hf_model, random_ids
from opweave.conformance.layers import Rank, on_ranks
from opweave.layers import TensorParallel, tensor_parallel
from opweave_engine import (
    LLM,
    Checkpoint,
    CheckpointError,
    EngineError,
    InvalidArgumentError,
    SamplingParams,
    load_model,
)
from opweave_engine.client import AsyncClient
from opweave_engine.load import loader
from opweave_engine.load.checkpoint import TensorFile
from opweave_engine.models import CausalLM, CheckpointModel, ModelError, WeightsError, build_model
from support import ROOT

Copy = Callable[[str], Path]
FILE = "model.safetensors"
CHECKPOINT = ROOT / "examples" / "models" / "tiny-pydoc"


@pytest.fixture
def copy(checkpoint: Checkpoints, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that gives a copy of a kind's directory, to be damaged."""

    def get(kind: str) -> Path:
        return Path(shutil.copytree(checkpoint(kind)[0], tmp_path / kind))

    return get


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE)


def checkpoint_tensors(model: CheckpointModel) -> dict[str, torch.Tensor]:
    """Return the tensors that a checkpoint of *model* holds: merged ones in their parts."""
    found = {}
    for name, (parameter, shard) in model.places().items():
        layer = model.get_submodule(_module_of(model, parameter))
        rows = parameter.data
        if shard:
            sizes = {key: part.size for key, part in layer.parts.items()}  # type: ignore[union-attr]
            rows = dict(zip(sizes, rows.split(list(sizes.values())), strict=True))[shard[0]]
        found[name] = rows
    return found


def _module_of(model: CheckpointModel, parameter: torch.Tensor) -> str:
    return next(n for n, p in model.named_parameters() if p is parameter).rpartition(".")[0]


@pytest.mark.parametrize("kind", LLAMAS)
def test_every_tensor_lands_where_it_belongs(kind: str, checkpoint: Checkpoints) -> None:
    path, reference = checkpoint(kind)
    loaded = checkpoint_tensors(load_model(path))
    expected = dict(reference.named_parameters())
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def test_nothing_is_left_on_the_meta_device(checkpoint: Checkpoints) -> None:
    model = load_model(checkpoint("qwen3")[0])
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cpu"}
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training


def test_dummy_weights_need_no_file_but_the_configuration(tmp_path: Path, copy: Copy) -> None:
    shutil.copy(copy("qwen3") / "config.json", tmp_path)
    first, again = (load_model(tmp_path, load_format="dummy") for _ in range(2))
    other = load_model(tmp_path, load_format="dummy", seed=1)
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    values = torch.cat([parameter.flatten() for parameter in first.parameters()])
    assert values.std().item() == pytest.approx(0.02, rel=0.05)
    assert values.mean().abs() < 0.001
    assert not first.training
    assert load_model(tmp_path, dtype="bfloat16", load_format="dummy").dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        load_model(tmp_path)


def test_ranks_agree_on_dummy_weights_that_each_has_all_of(tmp_path: Path, copy: Copy) -> None:
    shutil.copy(copy("llama") / "config.json", tmp_path)

    def build(rank: Rank) -> CheckpointModel:
        parallel = TensorParallel(rank.rank, rank.size, rank.all_reduce, rank.all_gather)
        with tensor_parallel(parallel):
            return load_model(tmp_path, load_format="dummy")

    first, second = (dict(model.named_parameters()) for model in on_ranks(2, build))
    whole = dict(load_model(tmp_path, load_format="dummy").named_parameters())
    name = "model.layers.0.input_layernorm.weight"
    assert torch.equal(first[name], second[name])
    assert torch.equal(first[name], whole[name])
    name = "model.layers.0.self_attn.o_proj.weight"
    assert first[name].shape[1] == whole[name].shape[1] // 2


def test_dummy_states_decay(tmp_path: Path) -> None:
    config = {"architectures": ["Mamba2ForCausalLM"], "vocab_size": 64, "hidden_size": 32,
              "num_heads": 8, "head_dim": 8, "num_hidden_layers": 1}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    rates = load_model(tmp_path, load_format="dummy").get_parameter("model.layers.0.mixer.A")
    torch.testing.assert_close(rates, -torch.ones(8), atol=0.1, rtol=0)


def test_unknown_load_formats() -> None:
    with pytest.raises(InvalidArgumentError, match=r"load_format='gguf'.*auto, dummy"):
        load_model("nowhere", load_format="gguf")  # type: ignore[arg-type]


INDEX = f"{FILE}.index.json"


def edit_index(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    return tmp_path


def test_shards(shards: Path, checkpoint: Checkpoints, tmp_path: Path) -> None:
    assert len(list(shards.glob("*.safetensors"))) > 2
    # Files may be links, as in the cache of the hub.
    blobs = tmp_path.parent / f"{tmp_path.name}_blobs"
    blobs.mkdir()
    for file in shards.glob("*.safetensors"):
        file.symlink_to(file.rename(blobs / file.name))
    whole, sharded = load_model(checkpoint("llama")[0]), load_model(shards)
    for (name, a), b in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert torch.equal(a, b), name
    lost = sorted(shards.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"missing: {lost.name}"):
        load_model(shards)


def test_a_tensor_in_two_shards(shards: Path) -> None:
    first, second = sorted(shards.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    tensors = {**load_file(second), name: torch.zeros_like(tensor)}
    save_file(tensors, second, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"^{first} and {second} both hold .*{name};"):
        load_model(shards)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"ghost": "SHARD", "\n": "SHARD"}, r"names tensors that no file has: ghost, '\\n'\."),
        ({"model.norm.weight": "x" * 5000}, r"names files that are missing: x{100}…\.$"),
        ({"model.norm.weight": "a\0b"}, r"names files that are missing: 'a\\x00b'\.$"),
        ({"model.norm.weight": "a\nb"}, r"names files that are missing: 'a\\nb'\.$"),
        *(
            ({"model.norm.weight": name}, r"index.json names .*, which is outside of the che")
            for name in ("../x", "sub/../../x", "..\\x", "C:\\x", "/x")
        ),
    ],
)
def test_an_index_that_is_wrong(places: dict[str, str], message: str, shards: Path) -> None:
    (shards.parent / "x").touch()
    shard = min(shards.glob("*.safetensors")).name
    named = {tensor: file.replace("SHARD", shard) for tensor, file in places.items()}
    edit_index(shards, lambda files: files.update(named))
    with pytest.raises(CheckpointError, match=message):
        load_model(shards)


def test_progress_counts_tensors(checkpoint: Checkpoints) -> None:
    path, reference = checkpoint("llama")
    calls: list[tuple[int, int]] = []
    load_model(path, progress=lambda done, total: calls.append((done, total)))
    count = len(list(reference.parameters()))
    assert calls == [(done, count) for done in range(1, count + 1)]


@pytest.mark.parametrize(
    ("asked", "saved", "got"),
    [
        ("auto", "float32", torch.float32),
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", None, torch.float32),
        ("bfloat16", "float32", torch.bfloat16),
        ("float16", "float32", torch.float16),
        ("float32", "bfloat16", torch.float32),
    ],
)
def test_dtypes(asked: str, saved: str | None, got: torch.dtype, copy: Copy) -> None:
    path = copy("llama")
    edit_config(path, dtype=saved)
    model = load_model(path, dtype=asked)
    assert {t.dtype for t in [*model.parameters(), *model.buffers()]} == {got}
    assert model.dtype == got


def test_without_a_dtype_the_tensors_decide(tmp_path: Path) -> None:
    hf_model("llama").bfloat16().save_pretrained(tmp_path)
    edit_config(tmp_path, dtype=None)
    assert load_model(tmp_path).dtype == torch.bfloat16


def test_unknown_dtypes(copy: Copy) -> None:
    path = copy("llama")
    with pytest.raises(InvalidArgumentError, match=r"'int8'.*auto, float32, bfloat16, float16"):
        load_model(path, dtype="int8")
    edit_config(path, dtype="float64")
    with pytest.raises(CheckpointError, match=r"'float64'.*float32, bfloat16, float16"):
        load_model(path)


def test_all_that_does_not_fit_is_in_one_error(copy: Copy) -> None:
    path = copy("llama")

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["extra.weight"] = torch.zeros(2)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 64)

    edit(path, damage)
    with pytest.raises(CheckpointError) as error:
        load_model(path)
    text = str(error.value)
    assert "2 missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight" in text
    assert "1 unexpected: extra.weight" in text
    assert re.search(
        r"1 do not fit: model.layers.0.mlp.up_proj.weight: .*\(3, 64\).*\(96, 64\)", text
    )


NO_TENSOR, MEMORY = r"^config.json names sizes that no tensor has: .+$", "asks for more memory than"
SIZES = ("hidden_size", "intermediate_size", "vocab_size")
# Kind, changes of the configuration, load_format and the error: before memory is allocated.
ABSURD: list[tuple[str, dict[str, Any], Any, str]] = [
    ("llama", {"intermediate_size": 2**45}, "auto", r"6 do not fit"),
    # Of heads, for which a table took memory and time.
    ("llama", {"head_dim": None, "hidden_size": 2**26}, "auto", r"\d+ do not fit"),
    ("llama", {"head_dim": None, "hidden_size": 2**26}, "dummy", MEMORY),
    ("llama", {"num_hidden_layers": 10**9}, "auto",
     r"=1000000000, but the number of tensors is \d+"),
    ("llama", {"num_hidden_layers": 10**9}, "dummy", "=1000000000, but there can be 4096"),
    *(("llama", {key: 2**45}, "dummy", rf"^config.json {MEMORY}") for key in SIZES),
    *(
        ("llama", {key: 2**62}, load_format, NO_TENSOR)
        for key in SIZES
        for load_format in ("auto", "dummy")
    ),
    *(
        (
            kind,
            {key: 2**31},
            load_format,
            rf"^config.json says {key}=2147483648, but there can be 655",
        )
        for kind, key in (
            ("llama", "head_dim"),
            ("mixtral", "num_local_experts"),
            ("qwen3_moe", "num_experts"),
            ("deepseek", "n_routed_experts"),
            ("deepseek", "n_shared_experts"),
            ("deepseek", "qk_rope_head_dim"),
            ("deepseek", "num_nextn_predict_layers"),
            ("gemma3", "head_dim"),
        )
        for load_format in ("auto", "dummy")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "load_format", "message"), ABSURD)
def test_sizes_that_cannot_be(
    kind: str, changes: dict[str, Any], load_format: Any, message: str, copy: Copy
) -> None:
    path = copy(kind)
    edit_config(path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(path, load_format=load_format)


@pytest.mark.parametrize(("kind", "changes", "unread"), [
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, None),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "alpha": 9.0}},
     r"'rope_parameters' in config.json: unknown keys are ignored: 'alpha'$"),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0, "b": 1}},
     r"'rope_scaling' in config.json: unknown keys are ignored: 'b'$"),
    (
        "llama",
        {
            "rope_parameters": {"rope_theta": 5.0},
            "rope_scaling": {"type": "linear", "factor": 2},
        },
        r"'rope_scaling' replaces 'rope_parameters', as in transformers; ignored: rope_theta$",
    ),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "default", "shift": 2}}},
     r"'full_attention' in config.json: unknown keys are ignored: 'shift'$"),
    ("yarn", {}, None),
    ("llama3_rope", {}, None),
    ("deepseek", {}, None),
])  # fmt: skip
def test_unknown_keys_of_ropes_are_named_once(
    kind: str,
    changes: dict[str, Any],
    unread: str | None,
    copy: Copy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = copy(kind)
    edit_config(path, **changes)
    load_model(path)
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(lines) == (unread is not None)
    assert unread is None or re.search(unread, lines[0])


def test_long_lists_are_cut(copy: Copy) -> None:
    path = copy("llama")
    edit(path, lambda t: t.update({f"extra.{i:02}": torch.zeros(1) for i in range(15)}))
    with pytest.raises(CheckpointError, match=r"15 unexpected: .*extra.09 and 5 more"):
        load_model(path)


def test_old_frequencies_are_ignored(copy: Copy) -> None:
    path = copy("llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(path, lambda t: t.update({name: torch.zeros(8)}))
    load_model(path)


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (torch.int8, "quantized"),
        (torch.float8_e4m3fn, "quantized"),
        (torch.float8_e5m2, "quantized"),
        (torch.complex64, "weights are"),
        (torch.bool, "weights are"),
    ],
    ids=str,
)
def test_dtypes_of_tensors(dtype: torch.dtype, reason: str, copy: Copy) -> None:
    path = copy("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    edit(path, lambda t: t.update({name: torch.zeros(96, 64).to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"up_proj.weight: it has dtype {dtype}; {reason}"):
        load_model(path)


def test_tied_embeddings(copy: Copy) -> None:
    path = copy("tied")
    embedding = load_model(path).model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(path / FILE)

    edit(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(load_model(path).model.embed_tokens.weight, embedding)

    edit(path, lambda t: t.pop("model.embed_tokens.weight"))
    assert torch.equal(load_model(path).model.embed_tokens.weight, embedding)

    edit(path, lambda t: t.update({"model.embed_tokens.weight": torch.zeros(320, 1)}))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: .*\(320, 1\).*\(320, 64\)"):
        load_model(path)


@pytest.mark.parametrize("kind", ["tied", "gemma3", "mamba2_tied"])
@pytest.mark.parametrize("change", ["another", "rounded"])
def test_an_output_matrix_that_the_configuration_ties(
    change: str, kind: str, copy: Copy, caplog: pytest.LogCaptureFixture
) -> None:
    """The files win, as in transformers: both matrices are loaded."""
    path = copy(kind)
    edit_config(path, tie_word_embeddings=True)
    embedding = next(n for n in load_file(path / FILE) if "embed" in n)
    heads: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "another": lambda weight: weight.flip(0).clone(),
        "rounded": lambda weight: weight.bfloat16().float(),
    }
    edit(path, lambda t: t.update({"lm_head.weight": heads[change](t[embedding])}))
    loaded = load_model(path)
    assert isinstance(loaded, CausalLM)
    assert not loaded.is_tied
    assert "the files hold a different lm_head.weight; both are loaded" in caplog.text
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, reference.lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    ids = torch.tensor(random_ids(7, 9))
    with torch.inference_mode():
        found = loaded.compute_logits(loaded(ids, torch.arange(9)))
        torch.testing.assert_close(found, reference(ids[None]).logits[0], rtol=0, atol=1e-4)
    caplog.clear()
    same = load_model(path, dtype="bfloat16")
    assert isinstance(same, CausalLM)
    assert same.is_tied is (change == "rounded")  # nothing differs in bfloat16
    assert bool(caplog.text) is (change == "another")


def test_an_output_matrix_in_the_index_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, is_tied in (("tied", True), ("llama", False)):
        path = tmp_path / kind
        hf_model(kind).save_pretrained(path, max_shard_size="60KB")
        file = min(path.glob("*.safetensors")).name
        if not is_tied:
            (shard,) = (f for f in path.glob("*.safetensors") if "lm_head.weight" in load_file(f))
            kept = {n: t for n, t in load_file(shard).items() if n != "lm_head.weight"}
            save_file(kept, shard, metadata={"format": "pt"})
        edit_index(path, lambda files, file=file: files.update({"lm_head.weight": file}))
        if is_tied:
            loaded = load_model(path)
            assert isinstance(loaded, CausalLM)
            assert loaded.is_tied
            assert "names lm_head.weight, which no file has" in caplog.text
        else:
            with pytest.raises(CheckpointError, match=r"that no file has: lm_head.weight\."):
                load_model(path)


def test_damaged_files(copy: Copy) -> None:
    path = copy("llama")
    whole = (path / FILE).read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", b"\xff" * 64):
        (path / FILE).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{FILE} is damaged"):
            load_model(path)
    (path / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor .*It holds: config"):
        load_model(path)


CONFIG = "config.json"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        *(
            (f"{FILE}.index.json", content, r"index.json")
            for content in (b"", b"{", b"[]", b"null", b'{"weight_map": 3}', b"\0")
        ),
        (CONFIG, b"null", r"config.json must hold a JSON object, not null"),
        (CONFIG, b"[" * 100_000, r"config.json is not readable JSON: it is nested too deeply"),
        (CONFIG, b"{not json", r"config.json is not readable JSON"),
        (CONFIG, b"\xff\xfe{}", r"not readable JSON"),
        (CONFIG, b"{}", r"lacks 'architectures'.*LlamaForCausalLM"),
        (CONFIG, b'{"architectures": []}', r"lacks 'architectures'"),
        (CONFIG, b'{"architectures": ["GPT2Model"]}', r"GPT2Model.*BertModel, Deepseek"),
    ],
)
def test_damaged_json(file: str, content: bytes, message: str, copy: Copy) -> None:
    path = copy("llama")
    (path / FILE).unlink()
    (path / file).write_bytes(content)
    with pytest.raises((CheckpointError, ModelError), match=message):
        load_model(path)


@pytest.mark.parametrize("name", [CONFIG, FILE])
def test_names_of_files_that_are_none(name: str, copy: Copy) -> None:
    path = copy("llama")
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name} must be a file, but is a directory"):
        load_model(path)
    (path / name).rmdir()
    (path / name).symlink_to("nothing")
    with pytest.raises(CheckpointError, match=f"{name} is a link to 'nothing'"):
        load_model(path)


def test_missing_directory_and_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere' is not a directory") as error:
        load_model(tmp_path / "nowhere")
    assert isinstance(error.value, EngineError)
    with pytest.raises(CheckpointError, match=r"no config.json. It holds: nothing"):
        load_model(tmp_path)


def test_the_id_of_a_repository_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The cache as the hub's client writes it.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--acme--tiny-pydoc"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(CHECKPOINT, target_is_directory=True)
    assert Checkpoint("acme/tiny-pydoc").config()["model_type"] == "llama"
    assert LLM("acme/tiny-pydoc").generate([[1, 2]], SamplingParams(max_tokens=1))
    assert AsyncClient("acme/tiny-pydoc", None).model_name == "acme/tiny-pydoc"
    assert AsyncClient(CHECKPOINT, None).model_name == "tiny-pydoc"
    with pytest.raises(CheckpointError, match=r"is not a directory, .* downloaded") as error:
        Checkpoint("acme/absent")
    assert str(error.value).endswith("run: hf download acme/absent --local-dir absent")


# Memory in huge pages: where it is, and that it is ordinary memory


MIB = 2**20
CPU = torch.device("cpu")

on_linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_it_is_a_tensor_like_any_other(dtype: torch.dtype) -> None:
    tensor = loader.empty((3, 1 << 20, 1), dtype, CPU)
    assert tensor.shape == (3, 1 << 20, 1)
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    tensor.fill_(1)
    assert tensor.clone().sum() == tensor.sum() == 3 << 20
    tensor.add_(1)
    assert tensor.max() == tensor.min() == 2


@on_linux
def test_large_tensors_begin_where_a_huge_page_does() -> None:
    assert loader.empty((5 * MIB,), torch.int8, CPU).data_ptr() % (2 * MIB) == 0


@on_linux
@pytest.mark.skipif(
    "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    else True,
    reason="the system gives no huge pages",
)
def test_the_system_has_taken_the_advice() -> None:
    tensor = loader.empty((8 * MIB,), torch.int8, CPU)
    flags = _flags_of(tensor.data_ptr())
    assert "hg" in flags  # "huge page advise flag", proc_pid_smaps(5)


def test_small_tensors_and_other_devices_are_left_to_torch() -> None:
    assert loader.empty((3,), torch.float32, CPU).shape == (3,)
    meta = torch.device("meta")
    assert loader.empty((8 * MIB,), torch.int8, meta).device == meta


def test_memory_is_given_back() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    gc.collect()
    before = mapped()
    tensor = loader.empty((512 * MIB,), torch.int8, CPU)
    view = tensor[MIB:]
    del tensor
    assert view.numel() == 511 * MIB
    assert mapped() > before + 500 * MIB
    del view
    assert mapped() < before + 256 * MIB


def test_parameters_are_moved_and_stay_parameters() -> None:
    layer = nn.Linear(1024, 1024)
    layer.weight.weight_loader = "of the layer"  # type: ignore[assignment]
    weight, bias = layer.weight, layer.bias.detach().clone()
    address = layer.weight.data_ptr()
    loader.move_parameters(layer)
    assert layer.weight is weight
    assert weight.shape == (1024, 1024)
    assert weight.weight_loader == "of the layer"
    assert torch.equal(layer.bias, bias)  # it is small
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert weight.data_ptr() != address


def _flags_of(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that *address* is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            first, last = (int(part, 16) for part in name.split("-"))
            inside = first <= address < last
        elif inside and name == "VmFlags:":
            return rest
    return []


# Checkpoints of the models of layers are loaded strictly: what does not fit is listed


HALVED = ("llama", "biases", "tied", "qwen2", "qwen3", "mixtral", "qwen3_moe_mixed", "deepseek",
         "deepseek_direct", "gemma3_untied", "mamba2", "bert")  # fmt: skip


def alone_of_two() -> AbstractContextManager[None]:
    """One of two ranks, without the other."""
    return tensor_parallel(TensorParallel(1, 2, lambda x: x, lambda x, dim=-1: x))


@pytest.fixture
def saved(checkpoint: Checkpoints) -> tuple[CheckpointModel, dict[str, Tensor]]:
    """Return an empty DeepSeek model, and the tensors of its checkpoint."""
    read = Checkpoint(checkpoint("deepseek")[0])
    model = build_model(read.config(), dtype=torch.float32)
    with TensorFile(read.tensor_files()[0]) as file:
        return model, {name: file.tensor(name) for name in file.shapes()}


Saved = tuple[CheckpointModel, dict[str, Tensor]]


def test_every_tensor_has_a_place(saved: Saved) -> None:
    model, tensors = saved
    assert model.places().keys() == tensors.keys()
    model.load_weights(tensors.items())


def test_a_tensor_that_comes_twice_is_named(saved: Saved) -> None:
    model, tensors = saved
    again = "model.norm.weight", torch.zeros_like(tensors["model.norm.weight"])
    with pytest.raises(WeightsError, match=r"model\. 1 given twice: model\.norm\.weight\.$"):
        model.load_weights([*tensors.items(), again])


def test_names_are_shown_in_one_line(saved: Saved) -> None:
    model, tensors = saved
    tensors |= {"a\nb\x1b[31m": torch.zeros(1), "x" * 1000: torch.zeros(1)}
    with pytest.raises(WeightsError, match=r"2 unexpected: 'a\\nb\\x1b\[31m', x{100}…\.$"):
        model.load_weights(tensors.items())


def test_layers_that_predict_further_tokens_are_passed_over(saved: Saved) -> None:
    model, tensors = saved
    further = {name.replace(".1.", ".2.", 1): t for name, t in tensors.items() if ".1." in name}
    assert any(name.startswith("model.layers.2.") for name in further)
    model.load_weights({**tensors, **further}.items())


@pytest.mark.parametrize("kind", HALVED)
@pytest.mark.parametrize("dim", [0, -1])
def test_half_a_tensor_fits_no_rank_of_two(
    kind: str, dim: int, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """A tensor of the size of a rank's shard is not a shard, but belongs to a smaller model."""
    path, _ = checkpoint(kind)
    shutil.copy(path / "config.json", tmp_path)
    tensors = load_file(path / FILE)
    halves = {n: t.narrow(dim, 0, t.shape[dim] // 2).clone() for n, t in tensors.items()}
    save_file(halves, tmp_path / FILE)
    smaller = sum(half.shape != tensors[name].shape for name, half in halves.items())
    message = f" {smaller} do not fit: "
    with alone_of_two(), pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_a_padded_vocabulary_does_not_fit(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """The table has as many rows as the model's, which are more than there are ids."""
    path, _ = checkpoint("llama")
    config = (path / "config.json").read_text().replace('"vocab_size": 320', '"vocab_size": 319')
    (tmp_path / "config.json").write_text(config)
    shutil.copy(path / FILE, tmp_path)
    with pytest.raises(CheckpointError, match=r"2 do not fit: .*\(320, 64\); it takes \(319, 64\)"):
        load_model(tmp_path)
