"""The settings that name a tuning file, and what it then does."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opweave import ir
from opweave.config.sources import tuning_file
from opweave.ir.errors import SettingError, SettingWarning
from opweave.tuning import Cell, Machine, Measurement, Time, TuningFile
from opweave.tuning.choice import ranges_of
from opweave.tuning.measure import digest_of
from opweave.tuning.trace import TuningFileError
from opweave.tuning.tuning_file import apply_tuning_file
from support.warm_python import warm_python


def write(path: Path, machine: Machine | None = None) -> Path:
    """Write a file in which native is faster for one token, and slower for 64."""
    file, impls = TuningFile(), ir.ops.silu_and_mul.impls
    for tokens, native in ((1, 41.0), (64, 99.0)):
        results = tuple(
            Measurement(p, "passed", time=Time(time, 0), chance=0, digest=digest_of(impls[p]))
            for p, time in (("opweave_c", 55.0), ("native", native))
        )
        cell = Cell("silu_and_mul", "x float32[n,16]", tokens, 1, "opweave_c", results)
        file.add(cell, machine or Machine.here())
    file.save(path)
    return path


@pytest.fixture
def registry() -> Iterator[ir.Registry]:
    registry = ir.current_registry()
    registry.ensure_ready()
    yield registry
    registry.settings.set_tuned({})


def chosen() -> list[str]:
    return [ir.ops.silu_and_mul.dispatch(torch.randn(n, 16)).provider for n in (1, 2, 64)]


def test_measurements_choose(registry: ir.Registry, tmp_path: Path) -> None:
    path = write(tmp_path / "tuning.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_tuning_file(registry, path, "a test")
    assert chosen() == ["native", "opweave_c", "opweave_c"]
    shown = str(ir.explain(ir.ops.silu_and_mul, torch.randn(1, 16)))
    assert f"✓ native           chosen  [tuned: 41 µs against 55 µs, {path}]" in shown


def test_measurements_of_a_kernel_that_has_changed_are_ignored_with_a_warning(
    registry: ir.Registry, tmp_path: Path
) -> None:
    path = write(tmp_path / "tuning.json")
    digest = digest_of(ir.ops.silu_and_mul.impls["native"])
    path.write_text(path.read_text(encoding="utf-8").replace(digest, "0" * 32), encoding="utf-8")
    names = re.escape(f"a test: the measurements of silu_and_mul:native in {path} are ignored")
    with pytest.warns(SettingWarning, match=names):
        apply_tuning_file(registry, path, "a test")
    assert chosen() == ["opweave_c"] * 3


def test_programs_do_not_load_the_conformance_kit(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from opweave import ir; x = torch.randn(1, 16);"
        "assert ir.ops.silu_and_mul.dispatch(x).provider == 'native';"
        "assert not any(name.startswith('opweave.conformance') for name in sys.modules)"
    )
    path = write(tmp_path / "tuning.json")
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OPWEAVE_TUNING_FILE": str(path)}
    done = warm_python().run("-c", code, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("field", ["device", "isa", "torch", "opweave"])
def test_a_file_of_another_machine_is_ignored_with_a_warning(
    registry: ir.Registry, tmp_path: Path, field: str
) -> None:
    apply_tuning_file(registry, write(tmp_path / "good.json"), "a test")
    path = write(tmp_path / "tuning.json", replace(Machine.here(), **{field: "other"}))
    with pytest.warns(SettingWarning, match=f"a test is ignored: .*{field} 'other' instead of"):
        apply_tuning_file(registry, path, "a test")
    assert chosen() == ["opweave_c"] * 3


def test_a_missing_or_malformed_file_is_an_error(registry: ir.Registry, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}", encoding="utf-8")
    for name in ("missing.json", "bad.json"):
        with pytest.raises(SettingError, match=f"a test: .*{name}"):
            apply_tuning_file(registry, tmp_path / name, "a test")


CHANGES: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("machines", 0, "machine", "threads"), [1], "no valid 'machine'"),
    (("machines", 0, "machine", "device"), None, "no valid 'machine'"),
    (("machines", 0, "cells", 0, "tokens"), math.inf, "tokens inf should be int"),
    (("machines", 0, "cells", 0, "tokens"), -1, "tokens -1 should be int, not negative"),
    (("machines", 0, "cells", 0, "op"), None, "op None should be str"),
    (("machines", 0, "cells", 0, "results"), [3], "a cell is malformed"),
    (("machines", 0, "cells", 0, "results", 1, "status"), "fine", "status 'fine' should be one of"),
    (("machines", 0, "cells", 0, "results", 1, "noise"), math.nan, "noise nan should be"),
    (("machines", 0, "cells", 0, "results", 1, "chance"), None, "chance None should be"),
    (("machines", 0, "cells", 0, "results", 1, "microseconds"), -41.0, "microseconds -41.0"),
    (("machines", 0, "cells", 0, "results", 1, "microseconds"), "41", "microseconds '41'"),
]


@pytest.mark.parametrize(("place", "value", "message"), CHANGES)
def test_a_malformed_value_is_an_error(
    place: tuple[str | int, ...], value: Any, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "tuning.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    *parents, last = place
    entry = found
    for each in parents:
        entry = entry[each]
    assert last in entry or isinstance(last, int)
    entry[last] = value
    path.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(TuningFileError, match=message) as raised:
        TuningFile.load(path)
    assert str(path) in str(raised.value)


def test_deeply_nested_files(tmp_path: Path) -> None:
    (tmp_path / "tuning.json").write_text("[" * 10**5, encoding="utf-8")
    with pytest.raises(TuningFileError, match="nested too deeply"):
        TuningFile.load(tmp_path / "tuning.json")


def test_where_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPWEAVE_TUNING_FILE", raising=False)
    assert tuning_file() is None
    (tmp_path / "opweave.toml").write_text('tuning_file = "t.json"', encoding="utf-8")
    path = tmp_path / "t.json"
    assert tuning_file() == (path, f"{tmp_path / 'opweave.toml'} tuning_file")
    monkeypatch.setenv("OPWEAVE_TUNING_FILE", "u.json")
    assert tuning_file() == (Path("u.json"), "OPWEAVE_TUNING_FILE")
    monkeypatch.setenv("OPWEAVE_TUNING_FILE", "")
    assert tuning_file() is None
    (tmp_path / "opweave.toml").write_text("tuning_file = 3", encoding="utf-8")
    monkeypatch.delenv("OPWEAVE_TUNING_FILE")
    with pytest.raises(SettingError, match="tuning_file = 3 should be a string"):
        tuning_file()


# Thresholds by number of tokens, from measured cells.

Times = dict[str, float | str]


def cell(
    tokens: int,
    times: Times,
    *,
    family: str = "f",
    calls: int = 1,
    chance: float = 0,
    busy: str = "",
) -> Cell:
    results = tuple(
        Measurement(p, t)
        if isinstance(t, str)
        else Measurement(p, "passed", time=Time(t, 0), chance=chance)
        for p, t in times.items()
    )
    return Cell("op", family, tokens, calls, "a", results, busy)


def chosen_ranges(*cells: Cell) -> list[tuple[int | None, str | None]]:
    found = ranges_of(cells, "tuning.json").get("op", [])
    return [(r.limit, r.entries[0].provider if r.entries else None) for r in found]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({1: {"a": 10, "b": 5}, 64: {"a": 10, "b": 5}}, [(None, "b")]),
        ({1: {"a": 10, "b": 10}, 64: {"a": 10, "b": 10}}, []),
        ({1: {"a": 10, "b": 5}, 64: {"a": 10, "b": 20}}, [(1, "b"), (None, None)]),
        ({1: {"a": 10, "b": 20}, 64: {"a": 10, "b": 5}}, [(32, None), (None, "b")]),
        ({1: {"a": 9, "b": 5, "c": 8}, 64: {"a": 9, "b": 12, "c": 5}}, [(1, "b"), (None, "c")]),
        (  # a choice between two measured sizes
            {1: {"a": 9, "b": 10}, 16: {"a": 9, "b": 5}, 256: {"a": 9, "b": 10}},
            [(8, None), (16, "b"), (None, None)],
        ),
        (  # four ranges: the one that saves least is given up
            {
                1: {"a": 100, "b": 50},
                4: {"a": 100, "b": 150},
                16: {"a": 100, "b": 90},
                64: {"a": 100, "b": 150},
                256: {"a": 100, "b": 20},
            },
            [(1, "b"), (128, None), (None, "b")],
        ),
        ({1: {"a": 10, "b": 5}, 64: {"a": 10, "b": "rejected"}}, [(None, "b")]),
        ({1: {"a": 10, "b": 5}, 64: {"a": 10, "b": "failed"}}, []),
        ({1: {"a": 10, "b": 5}, 64: {"a": 10, "b": "crashed"}}, []),
        ({1: {"a": 10, "b": 5, "c": 6}, 64: {"a": 10, "b": "failed"}}, [(None, "c")]),
    ],
)
def test_ranges(times: dict[int, Times], expected: list[tuple[int | None, str | None]]) -> None:
    assert chosen_ranges(*(cell(tokens, each) for tokens, each in times.items())) == expected


def test_noise_keeps_the_default() -> None:
    assert chosen_ranges(cell(1, {"a": 10, "b": 8}, chance=0.2)) == []


def test_nothing_is_chosen_from_measurements_on_a_busy_machine() -> None:
    fast = cell(4, {"a": 10, "b": 1})
    assert chosen_ranges(fast) == [(None, "b")]
    busy = cell(4, {"a": 10, "b": 1}, family="g", busy="this machine is busy")
    assert chosen_ranges(busy) == chosen_ranges(fast, busy) == []


def test_a_choice_may_not_be_slower_for_any_family() -> None:
    fast = cell(4, {"a": 10, "b": 1}, family="f", calls=100)
    assert chosen_ranges(fast, cell(4, {"a": 10, "b": 11}, family="g")) == []
    assert chosen_ranges(fast, cell(4, {"a": 10, "b": 10}, family="g")) == [(None, "b")]


def test_the_reason_has_both_times() -> None:
    found = ranges_of([cell(1, {"a": 55, "b": 41})], "tuning.json")["op"]
    assert found[0].entries[0].origin == "tuned: 41 µs against 55 µs, tuning.json"
    assert not found[0].entries[0].strict


@given(
    st.dictionaries(
        st.sampled_from([1, 2, 4, 16, 64, 256, 1024]),
        st.tuples(*[st.integers(1, 20)] * 3),
        min_size=1,
    )
)
def test_never_slower_than_the_default_and_at_most_two_thresholds(
    times: dict[int, tuple[int, int, int]],
) -> None:
    cells = [cell(n, dict(zip("abc", found, strict=True))) for n, found in times.items()]
    ranges = chosen_ranges(*cells)
    assert len(ranges) <= 3
    limits = [limit for limit, _ in ranges]
    assert limits[:-1] == sorted(set(limits[:-1]))
    assert limits[-1:] in ([], [None])
    for each in cells:
        fitting = [p for limit, p in ranges if limit is None or each.tokens <= limit]
        provider = (fitting or [None])[0] or "a"
        own, usual = each.time(provider), each.time("a")
        assert own is not None
        assert usual is not None
        assert own.microseconds <= usual.microseconds
