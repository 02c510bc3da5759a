"""Cells of a tuning file: which calls share one, and which implementation wins."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
from pathlib import Path

import pytest
import torch

from opweave import ir
from opweave.tuning import (
    Cell,
    Effort,
    Machine,
    Measurement,
    Time,
    Trace,
    TracedCall,
    TuningFile,
    TuningFileError,
    record_calls,
)
from opweave.tuning.choice import ranges_of
from opweave.tuning.measure import cells_to_measure, digest_of, family_of, with_times
from opweave.tuning.tuning_file import merge
from support.warm_python import warm_python

HERE = Machine("cpu", "a processor", "amx", 2, "2.13", "0.1")
OTHER = Machine("cpu", "another processor", "avx2", 2, "2.13", "0.1")


def cell(tokens: int = 4, default: str = "a", **times: tuple[float, float]) -> Cell:
    """Return a cell of times, and of the chances that they appear better than the default's."""
    results = tuple(
        Measurement(p, "passed", time=Time(time, 0), chance=chance)
        for p, (time, chance) in times.items()
    )
    return Cell("rms_norm", "x float32[n,8]", tokens, 3, default, results)


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({"a": (10, 1), "b": (9, 0.001)}, "b"),
        ({"a": (10, 1), "b": (9, 0.01)}, "a"),
        ({"a": (10, 1), "b": (9, 0.001), "c": (8, 0.001)}, "c"),
        ({"a": (10, 1), "b": (7, 0.01), "c": (8, 0.001)}, "c"),  # b is too uncertain
        ({"a": (10, 1), "b": (9, 0.001)} | dict.fromkeys("cdefgh", (11, 1)), "a"),  # one of many
        ({"a": (8, 1), "b": (9, 0.9)}, "a"),
        ({"b": (9, 1), "c": (8, 1)}, "c"),  # the default has no time: it is wrong here
        ({}, "a"),
    ],
)
def test_the_default_stays_unless_another_is_faster_by_more_than_chance(
    times: dict[str, tuple[float, float]], best: str
) -> None:
    assert cell(**times).best == best


# The durations of a call on two cores with a load of 8, as multiples of their median.
NOISE = [
    0.23, 0.23, 0.24, 0.25, 0.26, 0.31, 0.34, 0.36, 0.37, 0.38, 0.39, 0.44, 0.55, 0.67, 0.74, 0.83,
    0.9, 0.95, 0.98, 1.0, 1.0, 1.01, 1.03, 1.04, 1.05, 1.06, 1.08, 1.1, 1.13, 1.17, 1.22, 1.3, 1.38,
    1.47, 1.57, 1.65, 1.77, 2.0, 2.52, 3.9, 271.7,
]  # fmt: skip


def drawn(generator: random.Random, noise: list[float], **speeds: float) -> Cell:
    rounds = {
        name: [microseconds * 1e-6 * generator.choice(noise) for _ in range(Effort().rounds)]
        for name, microseconds in speeds.items()
    }
    results = (with_times(Measurement(name, "passed"), rounds, "a") for name in speeds)
    return Cell("rms_norm", "x float32[n,8]", 4, 3, "a", tuple(results))


def test_of_equal_implementations_the_default_stays_under_load() -> None:
    generator = random.Random(0)
    trials = [drawn(generator, NOISE, **dict.fromkeys("abcdefgh", 10)) for _ in range(200)]
    assert sum(trial.best == "a" for trial in trials) >= 196
    assert sum(not ranges_of([trial], "") for trial in trials) >= 196


def test_a_faster_implementation_is_found_among_many() -> None:
    generator = random.Random(0)
    speeds = {"a": 10.0, "b": 9.0} | dict.fromkeys("cdefgh", 10.0)
    noise = [share for share in NOISE if 0.98 <= share <= 1.03]
    assert all(drawn(generator, noise, **speeds).best == "b" for _ in range(200))


def recorded() -> Trace:
    with record_calls() as recorder:
        for tokens in (1, 3, 4, 4, 5, 9):
            ir.ops.rms_norm(torch.randn(tokens, 8), torch.ones(8), 1e-6)
        ir.ops.rms_norm(torch.randn(4, 16), torch.ones(16), 1e-6)
        ir.ops.rms_norm(torch.randn(4, 8), torch.ones(8), 1e-5)
        ir.ops.rms_norm(torch.randn(4, 16)[:, ::2], torch.ones(8), 1e-6)
        ir.ops.embedding(torch.arange(4), torch.randn(9, 8))  # has one implementation
    return recorder.trace


def test_a_cell_is_a_family_and_a_bucket_of_tokens() -> None:
    calls = cells_to_measure(recorded(), {})
    families: dict[str, list[int]] = {}
    for call in calls:
        families.setdefault(family_of(call), []).append(call.tokens)
    usual = "x float32[n,8], weight float32[8], epsilon 1e-06, variance_size None"
    assert {family: sorted(tokens) for family, tokens in families.items()} == {
        usual: [1, 4, 5, 9],  # 3 and 4 share a bucket, where 4 is more frequent
        usual.replace("8", "16"): [4],
        usual.replace("1e-06", "1e-05"): [4],
        usual.replace("[n,8]", "[n,8] strides [16, 2]"): [4],
    }
    assert calls[0].tokens == 4
    assert calls[0].count == 2


def measured(call: TracedCall, **digests: str) -> Cell:
    """Return the cell of a call, with a digest of each implementation that can run."""
    impls = ir.ops.rms_norm.impls
    current = {p: digest_of(impls[p]) for p in ir.ops.rms_norm.supported_providers()}
    results = tuple(
        Measurement(p, "passed", time=Time(1, 0), digest=digest)
        for p, digest in (current | digests).items()
        if digest
    )
    return Cell(call.op, family_of(call), call.tokens, 1, "native", results)


def test_measured_cells_are_left_out() -> None:
    trace = recorded()
    done = [measured(call) for call in cells_to_measure(trace, {}) if call.tokens == 4]
    cells = {cell.key: cell for cell in done}
    assert sorted(c.tokens for c in cells_to_measure(trace, cells)) == [1, 5, 9]


@pytest.mark.parametrize("digest", ["old", ""], ids=["changed", "not measured"])
def test_cells_of_changed_and_new_implementations_are_measured_again(digest: str) -> None:
    trace = recorded()
    call = cells_to_measure(trace, {})[0]
    cell = measured(call, native=digest)
    assert call in cells_to_measure(trace, {cell.key: cell})
    assert cell.stale(ir.ops.rms_norm) == (["native"] if digest else [])


KERNELS = """
from torch import Tensor
from opweave import ir
from opweave.kernels.wrap import wrap
from acme_kernels.helpers import twice
from opweave.tuning.measure import digest_of

@ir.register_op
def acme_double(x: Tensor) -> Tensor:
    return x * 2

@acme_double.register_impl("own")
def own(x):
    return twice(x)

wrap(acme_double, "wrapped", "acme_library:double", ["x"])
for provider in ("own", "wrapped"):
    print(digest_of(acme_double.impls[provider]))
"""


def test_a_digest_covers_the_package_of_a_kernel_and_the_versions_of_libraries(
    tmp_path: Path,
) -> None:
    kernels, library = tmp_path / "acme_kernels", tmp_path / "acme_library-1.0.dist-info"
    files = {
        kernels / "__init__.py": "",
        kernels / "helpers.py": "def twice(x):\n    return x + x\n",
        kernels / "kernels.py": KERNELS,
        tmp_path / "acme_library.py": "def double(x):\n    return x * 2\n",
        library / "METADATA": "Name: acme-library\nVersion: 1.0\n",
    }
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def digests() -> list[str]:
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        done = warm_python().run("-m", "acme_kernels.kernels", env=environment)
        assert done.returncode == 0, done.stderr
        return list(done.stdout.split())

    first = digests()
    assert digests() == first
    (library / "METADATA").write_text("Name: acme-library\nVersion: 1.1\n", encoding="utf-8")
    other_library = digests()
    assert (other_library[0] == first[0], other_library[1] == first[1]) == (True, False)
    (kernels / "helpers.py").write_text("def twice(x):\n    return 2 * x\n", encoding="utf-8")
    assert set(digests()).isdisjoint(other_library)


def test_ops_with_one_implementation_are_left_out() -> None:
    assert {call.op for call in cells_to_measure(recorded(), {})} == {"rms_norm"}


def test_a_file_gives_the_same_cells(tmp_path: Path) -> None:
    file, path = TuningFile(), tmp_path / "tuning.json"
    failed = Measurement("c", "crashed", "ended with SIGSEGV while timing")
    found = cell(a=(10.5, 1), b=(9.25, 0.001))
    found = Cell(found.op, found.family, 4, 3, "a", (*found.results, failed))
    file.add(found, HERE)
    file.add(cell(8, a=(1, 0)), OTHER)
    file.save(path)
    assert TuningFile.load(path) == file
    assert [p.name for p in tmp_path.iterdir()] == ["tuning.json"]
    assert json.loads(path.read_text(encoding="utf-8"))["machines"][0]["cells"][0]["best"] == "b"


def test_processes_can_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_cells, args=(path, first)) for first in (0, 10, 20)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    cells = TuningFile.load(path).machines[HERE]
    assert sorted(tokens for _, _, tokens in cells) == [2**i for i in range(30)]
    assert [p.name for p in tmp_path.iterdir()] == ["tuning.json"]


def write_cells(path: Path, first: int) -> None:
    for i in range(first, first + 10):
        TuningFile.add_to(path, cell(2**i, a=(1, 1)), HERE)


def test_the_last_of_merged_files_wins() -> None:
    first, second = TuningFile(), TuningFile()
    first.add(cell(4, a=(1, 0)), HERE)
    first.add(cell(8, a=(2, 0)), HERE)
    second.add(cell(3, a=(3, 0)), HERE)  # the bucket of 4
    second.add(cell(4, a=(4, 0)), OTHER)
    merged = merge([first, second])
    times = {
        (machine, tokens): found.results[0].time.microseconds  # type: ignore[union-attr]
        for machine, cells in merged.machines.items()
        for (_, _, tokens), found in cells.items()
    }
    assert times == {(HERE, 4): 3, (HERE, 8): 2, (OTHER, 4): 4}


def test_a_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    file = TuningFile()
    file.add(cell(a=(1, 0)), OTHER)
    with pytest.raises(
        TuningFileError, match=r"no measurements of this machine: .*device"
    ) as error:
        file.here(tmp_path / "tuning.json")
    assert "\n" not in str(error.value)
    file.add(cell(a=(1, 0)), Machine.here())
    assert len(file.here(tmp_path)) == 1


ENTRY = '{"format": "opweave tuning", "version": 1, "machines": %s}'
MACHINE = json.dumps(HERE.__dict__)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read the tuning file"),
        ("[]", "is not a tuning file of version 1"),
        ('{"format": "opweave tuning", "version": 9}', "is not a tuning file of version 1"),
        (ENTRY % "3", "expected a list of objects"),
        (ENTRY % "[{}]", "no valid 'machine'"),
        (ENTRY % f'[{{"machine": {MACHINE}, "cells": [{{}}]}}]', "a cell is malformed"),
        (ENTRY % f'[{{"machine": {MACHINE}, "cells": [1]}}]', "expected a list of objects"),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TuningFileError, match=message):
        TuningFile.load(path)
