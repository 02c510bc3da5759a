"""Each metadata key of a GGUF file is read as llama.cpp does, changes nothing, or is refused."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type
from gguf import GGUFWriter
from gguf.constants import Keys
from numpy.typing import NDArray

from engine.compared_logits import close, logits, theirs
from engine.gguf_files import finish, put, write
from models import tiny_checkpoints
from opweave.layers.rotary_scaling import RopeContext, read_scaling
from opweave_engine import CheckpointError, load_model
from opweave_engine.load import gguf
from opweave_engine.load.checkpoint import Checkpoint
from opweave_engine.load.gguf import read_gguf
from opweave_engine.load.loader import check_ranks
from opweave_engine.models import UnsupportedModelError

HEAD_DIM, LENGTH, THETA = 16, 64, 10_000.0  # of the small model


def changed(path: Path, model: Any, changes: dict[str, Any]) -> Path:
    """Write *model* with other keys: those of its architecture, and of the sections of all."""

    def add(writer: GGUFWriter) -> None:
        for key, value in changes.items():
            is_shared = key.startswith(("general.", "split.", "tokenizer."))
            put(writer, key if is_shared else f"{writer.arch}.{key}", value)

    return write(path, model, extra=add)


def small(tmp_path: Path, **changes: Any) -> Path:
    model = tiny_checkpoints.hf_model("llama", rope_parameters=plain_rope())
    return changed(tmp_path / "model.gguf", model, changes)


def plain_rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": THETA}


# Keys of the library


def constants(section: type) -> Iterator[str]:
    for name, value in vars(section).items():
        if isinstance(value, type):
            yield from constants(value)
        elif isinstance(value, str) and not name.startswith("_"):
            yield value


# Keys that the warning on unknown keys names.
WARNED = {
    f"general.sampling.{key}"
    for key in ("mirostat", "mirostat_eta", "mirostat_tau", "penalty_last_n", "sequence",
                "xtc_probability", "xtc_threshold")
}  # fmt: skip


def test_every_key_of_the_library_is_on_one_list() -> None:
    lists = [gguf.READ.union(*gguf.READ_BY.values()), gguf.HARMLESS, gguf.REFUSED, WARNED]
    sections = ("general.", "tokenizer.", "{arch}.")
    names = [name for name in constants(Keys) if name.startswith(sections)]
    assert len(names) > 150
    for name in names:
        short = name.removeprefix("{arch}.")
        parts = short.split(".")
        forms = {short, *(".".join([*parts[:n], ""]) for n in range(1, len(parts)))}
        places = sum(bool(forms & section) for section in lists)
        assert places == 1 or (short.startswith(gguf.STRICT) and not places), name


class Recorder(dict[str, Any]):
    """A mapping that records the keys that are read."""

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3"])
def test_keys_on_the_list_are_read(kind: str, tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model(kind)

    def tokenizer(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama" if kind == "gemma3" else "gpt2")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_types([1, 1, 1])
        writer.add_token_scores([0.0, 0.0, 0.0])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        put(writer, f"{writer.arch}.rope.scaling.type", "yarn" if kind == "llama" else "linear")
        put(writer, f"{writer.arch}.rope.scaling.factor", 2.0)

    file = read_gguf(write(tmp_path / "model.gguf", model, extra=tokenizer))
    checkpoint = Checkpoint(file.path)
    metadata = Recorder(file.metadata)
    object.__setattr__(file, "metadata", metadata)
    checkpoint.gguf = file
    for name in ("config.json", "generation_config.json", "tokenizer.json",
                 "tokenizer_config.json"):  # fmt: skip
        assert checkpoint.json(name)
    short = {key.removeprefix(f"{file.architecture}.") for key in metadata.read}
    expected = gguf.READ | gguf.READ_BY.get(file.architecture, frozenset())
    if kind == "llama":  # without experts
        expected -= {"expert_used_count"}
    else:
        expected = {key for key in expected if "yarn" not in key and "original" not in key}
    absent = {"general.alignment", "split.count"}  # which opening the file reads
    unused = {"tokenizer.ggml.scores", "tokenizer.ggml.add_space_prefix"}
    if kind == "gemma3":
        unused = {"tokenizer.ggml.merges", "tokenizer.ggml.pre"}
    assert expected - absent - unused <= short


# Rope


def frequencies(
    kind: str = "linear",
    factor: float = 1.0,
    original: int = LENGTH,
    fast: float = 32.0,
    slow: float = 1.0,
    divisors: Any = 1.0,
    magnitude: float = 1.0,
) -> tuple[NDArray[np.float64], float]:
    """Return the angle per position and the magnitude, as llama.cpp's ``rope_yarn`` computes them.

    In float64. The magnitude of YaRN is multiplied there by what its context divided it by.
    """  # fmt: skip
    pairs = np.arange(HEAD_DIM // 2, dtype=np.float64)
    angles = THETA ** (-2 * pairs / HEAD_DIM) / divisors
    if kind == "none":
        return angles, magnitude
    if kind == "linear":
        return angles / factor, magnitude

    def pair_with(rotations: float) -> float:
        return HEAD_DIM * np.log(original / (rotations * 2 * np.pi)) / (2 * np.log(THETA))

    start = max(0.0, np.floor(pair_with(fast)))
    end = min(HEAD_DIM - 1.0, np.ceil(pair_with(slow)))
    ramp = 1 - np.clip((pairs - start) / max(0.001, end - start), 0, 1)
    mixed = angles / factor * (1 - ramp) + angles * ramp
    return mixed, (0.1 * np.log(factor) + 1) * magnitude


ROPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "none", "factor": 4.0}, {"kind": "none"}),
    ({"type": "linear"}, {}),
    ({"factor": 4.0}, {"factor": 4.0}),
    ({"type": "linear", "factor": 0.0}, {}),
    ({"type": "linear", "factor": 4.0, "attn_factor": 1.5}, {"factor": 4.0, "magnitude": 1.5}),
    ({"type": "none", "attn_factor": 0.5}, {"kind": "none", "magnitude": 0.5}),
    ({"type": "yarn", "factor": 4.0}, {"kind": "yarn", "factor": 4.0}),
    ({"type": "yarn"}, {"kind": "yarn"}),
    (
        {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 1.25},
        {"kind": "yarn", "factor": 4.0, "original": 32, "magnitude": 1.25},
    ),
    (
        {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 4.0, "yarn_beta_slow": 0.5,
         "yarn_ext_factor": 1.0},
        {"kind": "yarn", "factor": 4.0, "fast": 4.0, "slow": 0.5},
    ),
]  # fmt: skip
DIVISORS = np.linspace(1, 8, HEAD_DIM // 2).astype(np.float32)


@pytest.mark.parametrize("with_divisors", [False, True], ids=["", "divisors"])
@pytest.mark.parametrize(("scaling", "expected"), ROPES)
def test_rope_frequencies(
    scaling: dict[str, Any], expected: dict[str, Any], with_divisors: bool, tmp_path: Path
) -> None:
    model = tiny_checkpoints.hf_model(
        "llama", rope_parameters=plain_rope(), max_position_embeddings=LENGTH
    )
    assert model.config.hidden_size // model.config.num_attention_heads == HEAD_DIM

    def add(writer: GGUFWriter) -> None:
        for key, value in scaling.items():
            put(writer, f"llama.rope.scaling.{key}", value)
        if with_divisors:
            writer.add_tensor("rope_freqs.weight", DIVISORS)

    path = write(tmp_path / "model.gguf", model, extra=add)
    if with_divisors and scaling.get("type") == "yarn":
        with pytest.raises(UnsupportedModelError, match=r"both the tensor rope_freqs.*'yarn'"):
            Checkpoint(path).config()
        return
    rope = Checkpoint(path).config()["rope_parameters"]
    read = read_scaling(rope, RopeContext(LENGTH, LENGTH))
    angles, magnitude = frequencies(**expected, divisors=DIVISORS if with_divisors else 1.0)
    np.testing.assert_allclose(read.frequencies(HEAD_DIM, rope["rope_theta"]), angles, rtol=1e-5)
    assert read.magnitude == pytest.approx(magnitude, rel=1e-5)
    # transformers' model with these frequencies has the logits of ours.
    model.model.rotary_emb.inv_freq = torch.from_numpy(angles).float()
    model.model.rotary_emb.attention_scaling = magnitude
    assert close(logits(path), theirs(model))


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
HUGE = 2**31
# Keys that are changed, and the error.
REFUSED: list[tuple[dict[str, Any], str]] = [
    # They change what the model computes.
    ({**YARN, "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor=0.5"),
    ({**YARN, "rope.scaling.yarn_attn_factor": 1.0}, "yarn_attn_factor=1;"),
    ({**YARN, "rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier=0.1"),
    ({**YARN, "rope.scaling.yarn_beta_fast": 0.0}, "yarn_beta_fast=0.0; it must be positive"),
    ({"rope.scaling.factor": -4.0}, "factor=-4.0; it must be positive"),
    ({"rope.scaling.factor": float("nan")}, "rope.scaling.factor=nan"),
    ({"rope.scaling.attn_factor": 0.0}, "attn_factor=0.0; it must be positive"),
    ({"rope.scaling.type": "linear", "rope.scaling.yarn_beta_fast": 8.0}, "type='linear'"),
    ({"rope.scaling.type": "longrope"}, "scaling.type='longrope'.*linear, yarn"),
    ({"rope.scaling.type": ["linear"]}, "it must be a string"),
    ({"rope.scaling.alpha": 1000.0}, "scaling.alpha=1000"),
    ({"rope.freq_base_swa": 5000.0}, "llama.rope.freq_base_swa=5000"),
    ({"rope.global.freq_base": 5000.0}, "llama.rope.global.freq_base=5000"),
    ({"rope.dimension_sections": [16] * 100}, r"rope.dimension_sections=\[16 16"),
    ({"attention.causal": False}, "llama.attention.causal=False"),
    ({"attention.scale": 0.5}, "llama.attention.scale=0.5"),
    ({"attention.sliding_window": 5}, "llama.attention.sliding_window=5"),
    ({"attention.sinks": True}, "llama.attention.sinks=True"),
    ({"attention.a\nb": 1}, r"llama.attention.a.+b'=1"),
    ({"attention.value_length": 8}, "llama.attention.value_length=8"),
    ({"ssm.conv_kernel": 4}, "llama.ssm.conv_kernel=4"),
    ({"logit_scale": 0.5}, "llama.logit_scale=0.5"),
    ({"expert_gating_func": 2}, "llama.expert_gating_func=2"),
    ({"general.type": "adapter"}, "general.type='adapter': it is not a model"),
    # Sizes that the tensors do not have.
    ({"attention.key_length": HUGE}, "head_count x key_length=8589934592, but the tensor"),
    ({"attention.key_length": 0}, "has heads of 0 values"),
    ({"attention.head_count_kv": HUGE}, "head_count_kv x key_length=34359738368, but the"),
    ({"feed_forward_length": HUGE}, "feed_forward_length=2147483648, but the tensor"),
    ({"embedding_length": HUGE}, "embedding_length=2147483648, but the tensor token_embd"),
    ({"expert_count": HUGE, "expert_used_count": 2}, "has no tensor blk.0.ffn_down_exps"),
    ({"block_count": HUGE}, "2147483648"),
    ({"block_count": 2.0}, "block_count=2.0; it must be an integer"),
    ({"block_count": None}, "has no llama.block_count"),
    ({"context_length": HUGE}, "2147483648"),
    # Parts and alignment.
    ({"split.count": 3}, "one of 3 parts.*llama-gguf-split --merge"),
    ({"split.count": "3"}, "split.count='3'; it must be an integer"),
    *(
        ({"general.alignment": value}, f"general.alignment={value} is not a power of")
        for value in (0, 24, "32")
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=str)
def test_metadata_that_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path, begin = small(tmp_path, **changes), time.process_time()
    with pytest.raises((UnsupportedModelError, CheckpointError, ValueError), match=message) as e:
        load_model(path)
    assert "\n" not in str(e.value)
    assert time.process_time() - begin < 2


def test_keys_that_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_checkpoints.hf_model("llama", rope_parameters=plain_rope())
    neutral = {
        "attention.causal": True, "attention.scale": HEAD_DIM**-0.5, "logit_scale": 0.0,
        "attention.value_length": HEAD_DIM, "attention.sliding_window": 2**20,
        "rope.scaling.finetuned": True, "rope.freq_base_swa": THETA, "expert_weights_norm": True,
        "rope.dimension_sections": [0, 0, 0, 0], "tensor_data_layout": "Meta AI original pth",
    }  # fmt: skip
    assert close(logits(changed(tmp_path / "model.gguf", model, neutral)), theirs(model))
    assert "ignored" not in caplog.text


def test_unknown_keys_are_in_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unknown = {"tokenizer.ggml.new_rule": True, "general.new_kind": 2, "new_feature": 3}
    path = small(tmp_path, **unknown, **{"general.base_model.0.name": "base"})
    path = path.rename(tmp_path / "other.gguf")
    with caplog.at_level(logging.WARNING):
        load_model(path)
    (warning,) = [record.getMessage() for record in caplog.records if "ignored" in record.msg]
    names = "tokenizer.ggml.new_rule, general.new_kind, llama.new_feature"
    assert warning.endswith(f"may change what the model computes: {names}")


def test_sampling_parameters(tmp_path: Path) -> None:
    tokenizer = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b"]}
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    values = Checkpoint(small(tmp_path, **tokenizer, **sampling)).json("generation_config.json")
    assert values == {"eos_token_id": [], "temperature": 0.6, "top_k": 20}


# Gemma 3


def gemma(**changes: Any) -> Any:
    """Return transformers' model with the scale of scores that llama.cpp takes."""
    model = tiny_checkpoints.hf_model("gemma3", **changes)
    for layer in model.model.layers:
        layer.self_attn.scaling = model.config.head_dim**-0.5
    return model


def gemma_ropes(sliding_theta: float = 1e4) -> dict[str, Any]:
    return {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": sliding_theta},
    }


def layers(pattern: str) -> list[str]:
    return [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in pattern]


@pytest.mark.parametrize(
    ("changes", "metadata"),
    [
        ({"rope_parameters": gemma_ropes(500.0)}, {"rope.freq_base_swa": 500.0}),
        ({"layer_types": layers("sfs")}, {"attention.sliding_window_pattern": 2}),
        ({"layer_types": layers("fff")}, {"attention.sliding_window_pattern": 1}),
        ({"layer_types": layers("sss")}, {"attention.sliding_window_pattern": 0}),
        ({"layer_types": layers("sss")}, {"attention.sliding_window_pattern": None}),
        ({"layer_types": layers("fff")}, {"attention.sliding_window": None}),
        ({"layer_types": layers("fff")}, {"attention.sliding_window": 0}),
        ({"layer_types": layers("fsf")}, {}),
    ],
    ids=str,
)
def test_gemma3(changes: dict[str, Any], metadata: dict[str, Any], tmp_path: Path) -> None:
    model = gemma(num_hidden_layers=3, **{"layer_types": layers("sfs"), **changes})
    path = changed(tmp_path / "model.gguf", model, metadata)
    assert close(logits(path), theirs(model))


def test_gemma3_scales_both_ropes(tmp_path: Path) -> None:
    model = gemma()
    rotary = model.model.rotary_emb
    rotary.full_attention_attention_scaling = rotary.sliding_attention_attention_scaling = 1.5
    path = changed(tmp_path / "model.gguf", model, {"rope.scaling.attn_factor": 1.5})
    assert close(logits(path), theirs(model))


# Sizes


@pytest.mark.parametrize(
    "key", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"]
)
def test_an_array_of_equal_sizes(key: str, tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("llama")
    layers = model.config.num_hidden_layers
    size = int(read_gguf(write(tmp_path / "one.gguf", model)).size(key))
    path = changed(tmp_path / "model.gguf", model, {key: [size] * layers})
    assert close(logits(path), theirs(model))
    path = changed(tmp_path / "two.gguf", model, {key: [size, *[2 * size] * (layers - 1)]})
    with pytest.raises(UnsupportedModelError, match=f"{key} with different values for different"):
        load_model(path)
    path = changed(tmp_path / "three.gguf", model, {key: [size] * (layers + 1)})
    with pytest.raises(CheckpointError, match=f"must have an integer for each of the {layers} lay"):
        load_model(path)


def test_more_experts_than_the_tensors_have(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("qwen3_moe")
    path = changed(tmp_path / "model.gguf", model, {"expert_count": HUGE})
    with pytest.raises(CheckpointError, match=r"expert_count=2147483648, but the tensor blk"):
        load_model(path)
    path = changed(tmp_path / "two.gguf", model, {"expert_used_count": HUGE})
    with pytest.raises(ValueError, match="2147483648"):
        load_model(path)


# The table of tensors


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path, tiny_checkpoints.hf_model("llama"), lambda _: Kind.Q4_0)
    return path.read_bytes()


def entry(data: bytes, name: str) -> int:
    """Return the position of the type in the entry of a matrix; its offset is behind it."""
    return data.index(name.encode()) + len(name) + 4 + 2 * 8


def edited(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


@pytest.mark.parametrize("change", [-32, 1, 32, None, 2**63, 2**64 - 32])
def test_offsets(change: int | None, tensors: bytes, tmp_path: Path) -> None:
    at = entry(tensors, "blk.1.ffn_up.weight") + 4
    offset = int.from_bytes(tensors[at : at + 8], "little")
    new = 0 if change is None else (offset + change) % 2**64
    path = tmp_path / "model.gguf"
    path.write_bytes(edited(tensors, at, new.to_bytes(8, "little")))
    with pytest.raises(CheckpointError, match=f"ffn_up.weight' is at byte {new} .* must be at"):
        load_model(path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Kind.Q8_0, "must be at"),  # it would read into the next tensor
        (Kind.F32, "must be at"),
        (Kind.Q4_1, "must be at"),
        (Kind.Q4_K, "are not blocks of Q4_K"),
        (4, "unknown type 4"),
        (2**31, "unknown type 2147483648"),
    ],
)
def test_types(kind: int, message: str, tensors: bytes, tmp_path: Path) -> None:
    path, at = tmp_path / "model.gguf", entry(tensors, "blk.1.ffn_up.weight")
    path.write_bytes(edited(tensors, at, int(kind).to_bytes(4, "little")))
    with pytest.raises(CheckpointError, match=f"damaged, cut short.*{message}"):
        load_model(path)


def test_names_that_the_model_does_not_have(tensors: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tensors.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(CheckpointError, match=r"does not use: blk.1.ffn_xx.weight"):
        load_model(path)


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_alignments(alignment: int, tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_custom_alignment(alignment)
        writer.add_string("general.name", "odd")

    model = tiny_checkpoints.hf_model("llama")
    assert close(logits(write(tmp_path / "model.gguf", model, extra=add)), theirs(model))


def test_integer_weights(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("biases", mlp_bias=False)
    path = write(tmp_path / "model.gguf", model)
    data, name = path.read_bytes(), b"blk.1.attn_q.bias"
    at = data.index(name) + len(name) + 4 + 8
    path.write_bytes(edited(data, at, int(Kind.I32).to_bytes(4, "little")))
    with pytest.raises(CheckpointError, match=r"blk.1.attn_q.bias of type I32, which is not supp"):
        load_model(path)


# The header and hostile lengths


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.2, 0.5, 0.9, 0.999])
def test_truncated_files(share: float, tensors: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tensors[: int(share * len(tensors))])
    with pytest.raises(CheckpointError, match=r"model.gguf is damaged, cut short") as raised:
        load_model(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), "big-endian, which is not.*gguf-convert-en"),
        (b"not a GGUF file, despite its name" * 100, "damaged, cut short, or not a GGUF file"),
        *(
            (b"GGUF" + version.to_bytes(4, "little") + bytes(16), "of the format. Supported: 2, 3")
            for version in (0, 1, 4)
        ),
    ],
)
def test_other_files(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def test_an_unsupported_architecture(tmp_path: Path) -> None:
    finish(GGUFWriter(tmp_path / "model.gguf", "falcon"))
    with pytest.raises(UnsupportedModelError, match=r"'falcon', which is not supported.*llama"):
        load_model(tmp_path / "model.gguf")


def header(*parts: bytes, tensors: int = 0, keys: int = 1) -> bytes:
    counts = b"".join(count.to_bytes(8, "little") for count in (tensors, keys))
    return b"GGUF" + (3).to_bytes(4, "little") + counts + b"".join(parts)


def text(value: bytes, length: int | None = None) -> bytes:
    return (len(value) if length is None else length).to_bytes(8, "little") + value


def array(kind: int, count: int) -> bytes:
    return b"".join(
        (number.to_bytes(size, "little") for number, size in ((9, 4), (kind, 4), (count, 8)))
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(keys=2**60), "is not complete"),
        (header(keys=0, tensors=2**60), "is not complete"),
        (header(text(b"key", 2**60)), "is not complete"),
        (header(text(b"key"), array(4, 2**60)), "is not complete"),
        (header(text(b"key"), array(8, 2**60)), "is not complete"),
        (header(text(b"key"), array(8, 2), text(b"one"), text(b"two", 2**63)), "is not complete"),
        (header(text(b"key"), array(8, 2), text(b"one"), b"\0\0"), "is not complete"),
        (header(text(b"key"), array(9, 1), array(4, 1), b"\0" * 4), "an array of type 9"),
        (header(text(b"key"), (77).to_bytes(4, "little")), "has the type 77"),
        (header(text(b"\xff\xfe"), b"\0" * 5), "codec can't decode"),
        (header(*[text(b"key") + b"\0" * 5] * 2, keys=2), "has the key 'key' twice"),
        (
            header(text(b"t"), (9).to_bytes(4, "little"), b"\0" * 99, keys=0, tensors=1),
            "has 9 dimensions",
        ),
        (
            header(*[text(b"t") + b"\0" * 16] * 2, b"\0" * 64, keys=0, tensors=2),
            "has the tensor 't' twice",
        ),
        (
            header(text(b"t"), (4).to_bytes(4, "little"), (2**62).to_bytes(8, "little") * 4,
                   b"\0" * 12, keys=0, tensors=1),
            "its tensors end at byte",
        ),
    ],
)  # fmt: skip
def test_hostile_headers(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    begin = time.process_time()
    with pytest.raises(CheckpointError, match=f"damaged, cut short.*{message}") as raised:
        load_model(path)
    assert time.process_time() - begin < 1
    assert "\n" not in str(raised.value)


def test_types_of_values(tmp_path: Path) -> None:
    values: dict[str, tuple[Any, Type]] = {
        "u8": (200, Type.UINT8), "i8": (-3, Type.INT8), "u16": (2**15, Type.UINT16),
        "i16": (-(2**14), Type.INT16), "u32": (2**31, Type.UINT32), "i32": (-(2**30), Type.INT32),
        "u64": (2**63, Type.UINT64), "i64": (-(2**62), Type.INT64), "f32": (0.5, Type.FLOAT32),
        "f64": (0.1, Type.FLOAT64), "bool": (True, Type.BOOL), "text": ("東京", Type.STRING),
    }  # fmt: skip

    def add(writer: GGUFWriter) -> None:
        for name, (value, kind) in values.items():
            writer.add_key_value(f"one.{name}", value, kind)
            writer.add_key_value(f"all.{name}", [value] * 3, Type.ARRAY, kind)

    metadata = read_gguf(
        write(tmp_path / "model.gguf", tiny_checkpoints.hf_model("llama"), extra=add)
    ).metadata
    for name, (value, _) in values.items():
        assert metadata[f"one.{name}"] == value
        assert type(metadata[f"one.{name}"]) is type(value)
        assert list(metadata[f"all.{name}"]) == [value] * 3


def test_a_large_vocabulary_opens_quickly(tmp_path: Path) -> None:
    count = 150_000
    tokens = [f"token {i} é" for i in range(count)]

    def add(writer: GGUFWriter) -> None:
        writer.add_token_list(tokens)
        writer.add_token_types([1] * count)
        writer.add_token_scores([-float(i) for i in range(count)])
        writer.add_token_merges(tokens)

    path = write(tmp_path / "model.gguf", tiny_checkpoints.hf_model("llama"), extra=add)
    begin = time.process_time()
    metadata = read_gguf(path).metadata
    assert time.process_time() - begin < 0.5
    assert metadata["tokenizer.ggml.tokens"] == metadata["tokenizer.ggml.merges"] == tokens
    assert metadata["tokenizer.ggml.scores"][-1] == 1 - count


# GGUF files give the logits of transformers' models with the same, dequantized weights


WIDE = {"hidden_size": 256, "intermediate_size": 512}
FORMATS = [Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K,
           Kind.Q6_K]  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_formats(kind: Kind, tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("llama", **WIDE)
    plain = theirs(model)
    path = write(tmp_path / "model.gguf", model, lambda _: kind)
    assert close(logits(path), theirs(model))
    assert not close(plain, theirs(model))


@pytest.mark.parametrize("kind", ["llama", "llama3_rope", "linear_rope", "tied", "head_dim",
                                  "qwen2", "qwen3", "biases"])  # fmt: skip
def test_models(kind: str, tmp_path: Path) -> None:
    changes = {"biases": {"mlp_bias": False}, "head_dim": {"head_dim": 32}}
    model = tiny_checkpoints.hf_model(kind, **changes.get(kind, {}))
    path = write(tmp_path / "model.gguf", model, lambda _: Kind.Q8_0)
    assert close(logits(path), theirs(model))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gemma3"])
def test_models_of_layers(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_checkpoints.hf_model(kind)
    if kind == "gemma3":  # the file has no key for it: llama.cpp takes the head size
        for layer in model.model.layers:
            layer.self_attn.scaling = model.config.head_dim**-0.5
    path = write(
        tmp_path / "model.gguf", model, lambda _: Kind.F32 if kind == "qwen3_moe" else Kind.Q8_0
    )
    assert close(logits(path), theirs(model))
    assert "proj" not in caplog.text
    assert "w1" not in caplog.text


def mixed(name: str) -> Kind:
    if "v_proj" in name or "down_proj" in name:
        return Kind.Q6_K
    return Kind.F32 if "gate_proj" in name else Kind.Q4_K


def test_different_formats_in_one_layer(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("llama", **WIDE)
    path = write(tmp_path / "model.gguf", model, mixed)
    assert close(logits(path), theirs(model))
    layer = load_model(path).model.layers[0]
    sizes = {name: p.dtype for name, p in layer.named_parameters() if "proj" in name}
    assert sizes["self_attn.qkv_proj.v_proj.weight"] == torch.uint8
    assert sizes["mlp.gate_up_proj.gate_proj.weight"] == torch.bfloat16
    assert sizes["mlp.down_proj.weight"] == torch.uint8


def test_quantized_weights_stay_quantized(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("llama")
    path = write(tmp_path / "model.gguf", model, lambda _: Kind.Q4_0)
    loaded = load_model(path)
    assert loaded.dtype is torch.bfloat16
    kept = [p for name, p in loaded.named_parameters() if "proj" in name]
    assert {p.dtype for p in kept} == {torch.uint8}
    # 18 bytes for 32 weights
    assert sum(p.nbytes for p in kept) * 32 == 18 * sum(
        p.numel() for name, p in model.named_parameters() if "proj" in name
    )


@pytest.mark.parametrize("kind", ["tied", "llama"])
def test_tables_stay_quantized(kind: str, tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model(kind)
    path = write(tmp_path / "model.gguf", model, lambda _: Kind.Q8_0)
    loaded = load_model(path)
    embedding, head = loaded.model.embed_tokens.weight, loaded.lm_head.weight
    assert embedding.dtype is head.dtype is torch.uint8
    assert (embedding is head) == (kind == "tied")
    assert close(logits(path), theirs(model))


def test_a_vocabulary_with_padding(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("tied", vocab_size=321)
    path = write(tmp_path / "model.gguf", model, lambda _: Kind.Q4_0)
    check_ranks(path, 2)
    assert load_model(path).model.embed_tokens.weight.shape[0] == 384
    assert close(logits(path), theirs(model))


def test_a_model_of_transformers_is_not_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", tiny_checkpoints.hf_model("llama"))
    with pytest.raises(UnsupportedModelError, match="GGUF"):
        load_model(path, model_impl="transformers")
