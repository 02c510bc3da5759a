"""``--compilation-config`` and the layers that ``opweave ops`` lists, as a user types it."""

from __future__ import annotations

import json

import pytest

from opweave.cli.options import RunOptions
from opweave.config import CompilationConfig, current_compilation_config
from opweave.config.compilation import _of_process
from opweave.layers import CustomOp, op_registry
from test_cli import CHECKPOINT, Run, assert_one_line_error
from test_cli import run as run  # the fixture


@pytest.mark.parametrize("option", ["--compilation-config", "--compilation_config"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([".custom_ops", '["none","+rms_norm"]'], "none,+rms_norm"),
        ([".custom-ops", '["all,-relu2"]'], "all,-relu2"),
        ([".custom_ops=none,+rms-norm"], "none,+rms_norm"),
        ([".custom_ops", "-relu2"], "-relu2"),
        (['={"custom_ops": ["none", "+rms_norm"]}'], "none,+rms_norm"),
        (["", '{"custom-ops": "none", "mode": 0}'], "none"),
    ],
)
def test_custom_ops(option: str, arguments: list[str], expected: str, run: Run) -> None:
    name, *values = arguments
    done = run("ops", "--json", option + name, *values)
    assert done.returncode == 0, done.stderr
    config = CompilationConfig(custom_ops=expected)
    assert current_compilation_config() == config
    listed = {each["layer"]: each for each in json.loads(done.stdout) if each["kind"] != "op"}
    for layer in ("rms_norm", "relu2", "silu_and_mul"):
        assert listed[layer]["enabled"] is config.enables_custom_op(layer)


def test_generate_takes_it(run: Run) -> None:
    arguments = ("generate", CHECKPOINT, "--prompt", "a", "--max-tokens", "1")
    assert run(*arguments, "--compilation-config.custom_ops=none").returncode == 0
    assert_one_line_error(
        run(*arguments, "--compilation-config.backend", "inducto"),
        "'inducto'",
        "Did you mean 'inductor'",
    )


def test_options_of_the_backend(run: Run) -> None:
    option = '--compilation-config.options={"sequence_parallelism": false}'
    assert run("ops", option, "--compilation-config.mode=3").returncode == 0
    config = CompilationConfig(mode=3, options={"sequence_parallelism": False})
    assert current_compilation_config() == config


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        (".custom_ops=all,none", ["--compilation-config.custom_ops", "'all' and 'none'"]),
        (".custom_ops=rms_norm", ["'rms_norm' must be 'all', 'none', '+op' or '-op'"]),
        (".mod=1", ["unknown key 'mod'", "Did you mean 'mode'"]),
        (".options=fusion", ["--compilation-config.options", "is not a JSON object, such as"]),
        (".mode=fast", ["--compilation-config.mode", "3 (OPWEAVE_COMPILE)"]),
        ('={"mode": [3]}', ["--compilation-config.mode", "[3]", "3 (OPWEAVE_COMPILE)"]),
        ("=none", ["--compilation-config", "'none' is not a JSON object, such as"]),
        ("=[3]", ["'[3]' must be a mapping or a JSON object"]),
        (".options.fusion=false", ["'options' takes one value", "JSON", "['fusion']"]),
    ],
)
def test_mistakes_are_one_line(argument: str, parts: list[str], run: Run) -> None:
    assert_one_line_error(run("ops", f"--compilation-config{argument}"), *parts)


def test_ops_lists_the_layers(run: Run) -> None:
    entries = json.loads(run("ops", "--json").stdout)
    layers = {entry["layer"]: entry for entry in entries if entry["kind"] != "op"}
    assert layers.keys() == op_registry.keys()
    for name, layer in layers.items():
        cls = op_registry[name]
        assert layer["class"] == f"{cls.__module__}.{cls.__qualname__}"
        assert layer["kind"] == ("CustomOp" if issubclass(cls, CustomOp) else "PluggableLayer")
        assert layer["summary"]
        assert layer["replacement"] is None
    text = run("ops").stdout
    assert all(name in text for name in layers)


def test_one_name_may_be_an_op_and_a_layer(run: Run) -> None:
    both = json.loads(run("ops", "silu-and-mul", "--json").stdout)
    assert [entry["kind"] for entry in both] == ["op", "CustomOp"]
    (layer,) = json.loads(run("ops", "fused_moe", "--json").stdout)
    assert (layer["layer"], layer["enabled"]) == ("fused_moe", None)
    assert "PluggableLayer" in run("ops", "fused_moe").stdout


def test_ops_shows_replacements(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from opweave.layers import SiluAndMul, op_registry_oot

    class Mine(SiluAndMul):
        pass

    monkeypatch.setitem(op_registry_oot, "SiluAndMul", Mine)
    (_, layer) = json.loads(run("ops", "silu_and_mul", "--json").stdout)
    assert layer["replacement"].endswith("Mine")
    assert "Mine" in run("ops", "silu_and_mul").stdout


def test_doctor_says_what_is_wrong(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWEAVE_COMPILATION_CONFIG__CUSTOM_OPS", "rms_norm")
    _of_process.cache_clear()
    done = run("doctor", "--json")
    monkeypatch.undo()
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert "OPWEAVE_COMPILATION_CONFIG__CUSTOM_OPS: custom_ops: 'rms_norm' must be" in problem


@pytest.mark.parametrize(
    ("given", "custom_ops", "options"),
    [
        ({"mode": 3}, ("all",), {"eager_rounding": True}),
        ({"mode": 3, "custom_ops": "none"}, ("none",), {"eager_rounding": True}),
        ({"mode": 3, "options": {"fusion": False}}, ("all",), {"fusion": False}),
        ({"mode": 1}, ("none",), {}),
    ],
)
def test_generate_compiles_like_eager_unless_told_otherwise(
    given: dict[str, object], custom_ops: tuple[str, ...], options: dict[str, object]
) -> None:
    try:
        RunOptions(compilation_config=given).apply_like_eager()
        config = current_compilation_config()
    finally:
        RunOptions().apply()
    assert tuple(config.custom_ops) == custom_ops
    assert config.options == options


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_generate_writes_the_text_of_eager(run: Run) -> None:
    arguments = ["generate", "examples/models/tiny-pydoc", "--prompt", "Return a list of"]
    eager = run(*arguments).stdout
    assert eager.startswith("Return a list of")
    assert run(*arguments, "--compilation-config.mode=3").stdout == eager
