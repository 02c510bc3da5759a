"""Keys of caches: what a kernel's result depends on is in its fingerprint, wherever it is kept."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.compile import fingerprint
from support.fixtures import FreshPython

from .conftest import compiled

KERNELS = """
    import functools
    from fp_first import through
    from fp_other import decorate, doubled

    def helper(x):
        return x * 1.0

    def plain(x):
        return helper(x)

    def with_block(block, x):
        return helper(x) * block

    def partial():
        return functools.partial(with_block, 7)

    def decorated():
        return decorate(plain)

    def lazy(x):
        from fp_package import late
        return late.helper(x)

    def lazy_relative(x):
        from .late import helper
        return helper(x)

    def lazy_in_namespaces(x):
        from fp_space.inner.deep import helper
        return helper(x)

    def elsewhere(x):
        return doubled(x)

    def two_packages_away(x):
        return through(x)

    def make(*held):
        def inner(x):
            return x * held[0]
        return inner

    class Callable:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, x):
            return x * self.scale

        def method(self, x):
            return x * self.scale
"""
FILES = {
    "fp_package/__init__.py": "",
    "fp_package/kernels.py": KERNELS,
    "fp_package/late.py": "from fp_package import later\ndef helper(x): return later.helper(x)",
    "fp_package/later.py": "def helper(x): return x * 1.0",
    "fp_package/constants.py": "import os\nSCALE = float(os.environ.get('FP_SCALE', '1'))",
    "fp_first/__init__.py": "from fp_second.deep import tripled\ndef through(x): return tripled(x)",
    "fp_second/__init__.py": "",
    "fp_second/deep.py": "def tripled(x): return x * 3\ndef halved(x): return x / 2",
    "fp_space/inner/deep.py": "def helper(x): return x * 1.0",  # of two packages without a file
    "fp_other.py": """
        def decorate(function):
            def wrapper(x):
                return function(x)
            return wrapper
        def doubled(x):
            return x * 2
    """,
}


class Process:
    """Digests a function of the package as a new process would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))

    def __call__(self, of: Callable[[Any], Any]) -> str:
        forget()
        kernels = importlib.import_module("fp_package.kernels")
        return fingerprint.of_function(of(kernels))


def forget() -> None:
    importlib.invalidate_caches()
    for name in [n for n in sys.modules if n.startswith("fp_")]:
        del sys.modules[name]
    for cached in (
        fingerprint.of_file,
        fingerprint._of_module,
        fingerprint.files_of,
        fingerprint._used_by,
    ):
        cached.cache_clear()


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Process(tmp_path)
    forget()


KERNELS_FILE, LATE, LATER = "fp_package/kernels.py", "fp_package/late.py", "fp_package/later.py"
LATE_CALL = "return later.helper(x)"


@pytest.mark.parametrize(
    ("of", "file", "old", "new"),
    [
        (lambda k: k.plain, KERNELS_FILE, "1.0", "5.0"),
        (lambda k: k.partial(), KERNELS_FILE, "1.0", "5.0"),
        (lambda k: k.decorated(), KERNELS_FILE, "1.0", "5.0"),
        (lambda k: k.decorated(), "fp_other.py", "return function(x)", "return function(x) + 1"),
        (lambda k: k.lazy, LATE, LATE_CALL, "return x * 5.00"),
        (lambda k: k.lazy, LATER, "1.0", "5.0"),
        (lambda k: (k.lazy(1.0), k.lazy)[1], LATER, "1.0", "5.0"),
        (lambda k: k.lazy_relative, LATER, "1.0", "5.0"),
        (lambda k: k.lazy_in_namespaces, "fp_space/inner/deep.py", "1.0", "5.0"),
        (lambda k: k.Callable(1.0), KERNELS_FILE, "1.0", "5.0"),
        (lambda k: k.Callable(1.0).method, KERNELS_FILE, "1.0", "5.0"),
        (lambda k: torch.no_grad()(k.plain), KERNELS_FILE, "1.0", "5.0"),
        (lambda k: k.elsewhere, "fp_other.py", "return x * 2", "return x * 3"),
        (lambda k: k.two_packages_away, "fp_second/deep.py", "return x * 3", "return x * 4"),
    ],
)
def test_source_counts(process: Process, of: Any, file: str, old: str, new: str) -> None:
    first = process(of)
    assert process(of) == first
    assert old in FILES[file]
    process.write(file, FILES[file].replace(old, new))
    assert process(of) != first
    process.write(file, FILES[file])
    assert process(of) == first


def test_a_digest_imports_nothing(process: Process) -> None:
    process(lambda k: k.lazy)
    assert "fp_package.late" not in sys.modules


def test_an_installed_package_counts_by_its_version_and_the_files_that_are_named(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_INSTALLED", {str(process.folder)})
    versions = [process(lambda k: k.elsewhere)]
    for text in (FILES["fp_other.py"] + "    __version__ = '2'", FILES["fp_other.py"]):
        process.write("fp_other.py", text)
        versions.append(process(lambda k: k.elsewhere))
    assert versions[0] != versions[1] != versions[2] == versions[0]
    monkeypatch.setattr(fingerprint, "_INSTALLED", {str(process.folder / "fp_second")})
    first = process(lambda k: k.two_packages_away)
    process.write("fp_second/__init__.py", "__version__ = '2'")
    assert process(lambda k: k.two_packages_away) != first


CHOSEN = """
    import functools, operator, os
    import torch
    import torch.nn.functional as N
    from fp_package import constants
    from fp_second import deep
    from opweave import ir
    SCALE = float(os.environ.get("FP_SCALE", "1"))
    IS_FIRST = SCALE == 1

    @torch.no_grad()
    def scaled(x):
        return x * SCALE

    F = {}

    def impl(x):
        return F(x)
"""


@pytest.mark.parametrize(
    "chosen",
    [
        "N.silu if IS_FIRST else N.selu",
        "torch.sin if IS_FIRST else torch.cos",
        "operator.add if IS_FIRST else torch.add",
        "torch.Tensor.sin if IS_FIRST else torch.Tensor.cos",
        "torch.ops.aten.sin.default if IS_FIRST else torch.ops.aten.cos.default",
        "torch.ops.aten.sin if IS_FIRST else torch.ops.aten.cos",
        "torch.nn.ReLU if IS_FIRST else torch.nn.SELU",
        "ir.ops.silu_and_mul if IS_FIRST else ir.ops.gelu_and_mul",
        "deep.tripled if IS_FIRST else deep.halved",
        "functools.partial(torch.add, other=SCALE)",
        "functools.partial(deep.tripled, SCALE)",
        "scaled",
        "lambda x: x * constants.SCALE",
        "torch.no_grad()(lambda x: x * SCALE)",
    ],
)
def test_values_of_globals_count(
    process: Process, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    process.write("fp_package/kernels.py", CHOSEN.format(chosen))
    first = process(lambda k: k.impl)
    assert process(lambda k: k.impl) == first
    monkeypatch.setenv("FP_SCALE", "5")
    assert process(lambda k: k.impl) != first


HELD = [1.0, 2.0, -0.0, (1, 2), (2, 1), torch.float16, torch.float32, "a", frozenset("abc"), True]


def test_what_is_held_counts(process: Process) -> None:
    for make in (
        lambda k, v: k.make(v),
        lambda k, v: k.Callable(v),
        lambda k, v: k.Callable(v).method,
    ):
        digests = [process(lambda k, make=make, v=v: make(k, v)) for v in HELD]
        assert len(set(digests)) == len(HELD)


def test_a_functional_form_counts(process: Process) -> None:
    def digest() -> str:
        forget()
        kernels = importlib.import_module("fp_package.kernels")
        with ir.isolated_registry():

            @ir.register_op(allow_inplace=True)
            def fp_scale(x: Tensor) -> Tensor:
                return x * 1

            fp_scale.register_impl("k", inplace=True, functional=sys.modules["fp_other"].doubled)(
                kernels.plain
            )
        return fingerprint.of_impl(fp_scale.impls["k"])

    first = digest()
    assert digest() == first
    process.write("fp_other.py", FILES["fp_other.py"].replace("x * 2", "x * 3"))
    assert digest() != first


CELLS = {
    "a lambda": ("def impl(x): return (lambda t: t * 2)(x)", "* 2", "* 3"),
    "a global": ("S = 2.0\ndef impl(x): return x * S", "2.0", "3.0"),
    "a helper": ("def h(x): return x * 2\ndef impl(x): return h(x)", "* 2", "* 3"),
    "a list": ("S = [2.0]\ndef impl(x): return x * S[0]", "2.0", "3.0"),
    "a cycle": (
        "def impl(x, n=2): return h(x, n)\ndef h(x, n): return x * 2 if n < 1 else impl(x, n - 1)",
        "x * 2",
        "x * 3",
    ),
}


def test_processes_agree_on_every_implementation(fresh_python: FreshPython) -> None:
    code = """
        from opweave import ir
        from opweave.compile import fingerprint
        ir.current_registry().ensure_ready()
        for op in ir.current_registry().ops.values():
            print(fingerprint.of_op(op))
    """
    first, second = (fresh_python(code).stdout.split() for _ in range(2))
    assert len(first) > 60
    assert first == second


@pytest.mark.parametrize("cell", [c for c in CELLS if c != "a list"])
def test_code_without_a_file_counts(cell: str) -> None:
    source, old, new = CELLS[cell]
    names: list[dict[str, Any]] = [{"__name__": "__main__"} for _ in range(3)]
    for text, each in zip((source, source, source.replace(old, new)), names, strict=True):
        exec(text, each)
    one, same, other = (fingerprint.of_function(each["impl"]) for each in names)
    assert one == same
    assert one != other


@pytest.mark.parametrize("cell", [c for c in CELLS if c != "a cycle"])
def test_a_cell_that_runs_again_is_compiled_again(cell: str) -> None:
    with ir.isolated_registry() as registry:

        @ir.register_op
        def fp_cell(x: Tensor) -> Tensor:
            return x * 1

    def register(source: str) -> None:
        names: dict[str, Any] = {"__name__": "__main__", "torch": torch}
        exec(source, names)
        fp_cell.register_impl("k", override=True)(names["impl"])

    source, old, new = CELLS[cell]
    register(source)
    registry.ensure_ready()
    fp_cell.set_default(["k"])
    run = compiled(lambda x: fp_cell(x.abs()) + 0)
    x = torch.ones(2)
    with torch.no_grad():
        assert run(x)[0] == 2
        register(source.replace(old, new))
        assert run(x)[0] == 3
