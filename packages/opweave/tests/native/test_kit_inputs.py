"""A cached module is used only if a build would read the same inputs again."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from opweave.native import NativeBuildError, builder, cache
from opweave.native.builder import Extension

from .kit_module import compiler_calls

SOURCE = """
#include <opweave/extension.h>
{include}
static void f(const opweave::View&) {{ throw std::runtime_error(MARK); }}
OPWEAVE_EXTENSION_MODULE(m) {{ m.def("f(Tensor x) -> ()", f); }}
"""


@pytest.fixture
def folder(native_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the folders ``a`` and ``b`` for headers and libraries."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def header(path: str, mark: str) -> None:
    Path(path).write_text(f'#define MARK "mark-{mark}"\n', encoding="utf-8")


def source(include: str) -> Path:
    path = Path("m.cpp").absolute()
    path.write_text(SOURCE.format(include=include), encoding="utf-8")
    return path


def build(path: Path, **options: Any) -> tuple[bool, str]:
    """Build; return whether that was needed, and the mark that is in the module."""
    built = cache.build(Extension("kit_input", "kit_input", (path,), **options))
    content = built.path.read_bytes()
    marks = [mark for mark in ("one", "two", "three") if f"mark-{mark}".encode() in content]
    return not built.cached, " ".join(marks)


def test_the_order_of_folders(folder: Path) -> None:
    header("a/x.h", "one")
    header("b/x.h", "two")
    path = source("#include <x.h>")
    assert build(path, include_dirs=(folder / "a", folder / "b")) == (True, "one")
    assert build(path, include_dirs=(folder / "b", folder / "a")) == (True, "two")
    assert build(path, include_dirs=(folder / "a", folder / "b")) == (False, "one")


@pytest.mark.parametrize(
    "flags",
    [
        ("-isystem", "a"),
        ("-include", "a/x.h"),
        ("-DX=<../a/x.h>", "-Ib"),
        *(
            pytest.param(flags, marks=pytest.mark.slow)
            for flags in (
                *(("-I", "a"), ("-Ia",), ("-iquote", "a"), ("-idiraftera",)),
                ("-imacros", "a/x.h"),
            )
        ),
    ],
)
def test_headers_by_flags(folder: Path, flags: tuple[str, ...]) -> None:
    header("a/x.h", "one")
    named = "" if "a/x.h" in flags else "#include X" if "-Ib" in flags else '#include "x.h"'
    path = source(named)
    assert build(path, cflags=flags) == (True, "one")
    assert build(path, cflags=flags) == (False, "one")
    header("a/x.h", "two")
    assert build(path, cflags=flags) == (True, "two")
    header("a/x.h", "one")
    assert build(path, cflags=flags) == (False, "one")


@pytest.mark.parametrize(
    "variable", ["CPATH", pytest.param("CPLUS_INCLUDE_PATH", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_headers_by_the_environment(
    folder: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    header("a/x.h", "one")
    header("b/x.h", "two")
    path = source("#include <x.h>")
    monkeypatch.setenv(variable, str(folder / "a"))
    assert build(path) == (True, "one")
    monkeypatch.setenv(variable, str(folder / "b"))
    assert build(path) == (True, "two")
    header("b/x.h", "three")
    assert build(path) == (True, "three")


def test_a_header_that_shadows_another(folder: Path) -> None:
    header("b/x.h", "two")
    path, folders = source("#include <x.h>"), (folder / "a", folder / "b")
    assert build(path, include_dirs=folders) == (True, "two")
    header("a/x.h", "one")
    assert build(path, include_dirs=folders) == (True, "one")
    Path("a/x.h").unlink()
    assert build(path, include_dirs=folders) == (False, "two")


def library(path: str, mark: str) -> None:
    Path("l.cpp").write_text(f'const char* mark() {{ return "mark-{mark}"; }}', encoding="utf-8")
    compiler, is_object = os.environ["CXX"], path.endswith(".o")
    subprocess.run(
        [compiler, "-fPIC", "-c", "l.cpp", "-o", path if is_object else "l.o"], check=True
    )
    if not is_object:
        Path(path).unlink(missing_ok=True)
        subprocess.run(["ar", "rcs", path, "l.o"], check=True)


@pytest.mark.parametrize("linker_lists", [True, False])
@pytest.mark.parametrize(
    ("file", "flags"),
    [
        ("a/libl.a", ("-La", "-ll")),
        ("a/l.o", ("a/l.o",)),
        *(
            pytest.param(file, flags, marks=pytest.mark.slow)
            for file, flags in (
                ("a/libl.a", ("-L", "a", "-l", "l")),
                ("a/l.a", ("-La", "-l:l.a")),
                ("a/libl.a", ("a/libl.a",)),
                ("a/libl.a", ("-Wl,--whole-archive,a/libl.a,--no-whole-archive",)),
            )
        ),
    ],
)
def test_libraries(
    folder: Path,
    file: str,
    flags: tuple[str, ...],
    linker_lists: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not linker_lists:
        monkeypatch.setattr(builder, "_linker_list", lambda *_: ())
    path = source("const char* mark();\n#define MARK mark()")
    library(file, "one")
    assert build(path, ldflags=flags) == (True, "one")
    assert build(path, ldflags=flags) == (False, "one")
    library(file, "two")
    assert build(path, ldflags=flags) == (True, "two")


def test_a_library_that_a_script_names(folder: Path) -> None:
    path = source("const char* mark();\n#define MARK mark()")
    library("b/other.a", "one")
    Path("a/libl.a").write_text(f"INPUT({folder}/b/other.a)", encoding="utf-8")
    assert build(path, ldflags=("-La", "-ll")) == (True, "one")
    assert build(path, ldflags=("-La", "-ll")) == (False, "one")
    library("b/other.a", "two")
    assert build(path, ldflags=("-La", "-ll")) == (True, "two")


def test_a_file_written_while_the_compiler_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header("a/x.h", "one")
    path, real = source("#include X"), builder.build

    def slow_build(*arguments: Any, **options: Any) -> Path:
        done = real(*arguments, **options)
        header("a/x.h", "two")
        return done

    flags = ('-DX="a/x.h"', f"-I{folder}")
    with monkeypatch.context() as patch:
        patch.setattr(builder, "build", slow_build)
        assert build(path, cflags=flags) == (True, "one")
    assert build(path, cflags=flags) == (True, "two")


def test_which_flags_are_whose(tmp_path: Path) -> None:
    path = tmp_path / "m.cpp"
    path.touch()
    path.write_text("x", encoding="utf-8")
    first = cache.content_key(Extension("m", "m", (path,), cflags=("-g",)))
    assert cache.content_key(Extension("m", "m", (path,), ldflags=("-g",))) != first


def test_lists_of_compilers(tmp_path: Path) -> None:
    (tmp_path / "a.d").write_text(
        "/x\\ y/a.o: a\\ b.cpp /usr/c.h \\\n d\\#e$$f.h\n\n/usr/c.h:\n", encoding="utf-8"
    )
    (tmp_path / "a.link").write_text(
        "/x y/a.so: \\\n  /x y/l m.a \\\n  crt.o\n\ncrt.o:\n", encoding="utf-8"
    )
    assert builder.listed(tmp_path) == ["a b.cpp", "/usr/c.h", "d#e$f.h", "/x y/l m.a", "crt.o"]


def test_what_killed_builds_left(folder: Path) -> None:
    path = source('#define MARK "mark-one"')
    stale = cache.cache_dir() / "native" / "kit_gone-0" / "tmpkilled"
    busy = cache.cache_dir() / "native" / "kit_busy-0" / "tmpbusy"
    stale.mkdir(parents=True)
    busy.mkdir(parents=True)
    with open(busy.parent / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert build(path) == (True, "one")
        assert busy.is_dir()
    assert not stale.exists()
    shutil.rmtree(busy)


def test_a_cache_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = source('#define MARK "mark-one"')
    key = cache.content_key(Extension("kit_input", "kit_input", (path,)))
    lock = cache.cache_dir() / "native" / f"kit_input-{key}" / "lock"
    lock.mkdir(parents=True)  # also root cannot open it
    with pytest.raises(NativeBuildError, match=r"Cannot write the cache folder .*OPWEAVE_CACHE_D"):
        build(path)
    lock.rmdir()
    assert build(path) == (True, "one")
    lock.unlink()
    lock.mkdir()
    assert build(path) == (False, "one")  # needs no lock
    for damaged in lock.parent.glob("*/files.json"):
        damaged.write_text("{", encoding="utf-8")
    lock.rmdir()
    assert build(path) == (True, "one")
    monkeypatch.setattr(Path, "home", lambda: Path("/proc/none"))
    monkeypatch.delenv("OPWEAVE_CACHE_DIR")
    with pytest.raises(NativeBuildError, match="Cannot write the cache folder /proc/none"):
        build(path)


@pytest.mark.parametrize(
    "manifest",
    [
        *("{", '{"\\u0000": "1"}'),
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("[]", "3", "null", "{}")),
    ],
)
def test_a_damaged_manifest(folder: Path, manifest: str) -> None:
    path = source('#define MARK "mark-one"')
    build(path)
    for known in cache.cache_dir().glob("native/kit_input-*/*/files.json"):
        known.write_text(manifest, encoding="utf-8")
    assert build(path) == (True, "one")
    assert build(path) == (False, "one")


def damage(path: Path, how: str) -> None:
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: {"cut": 20_000, "empty": 0}[how]])


@pytest.mark.parametrize("how", ["cut", pytest.param("empty", marks=pytest.mark.slow), "gone"])
def test_a_damaged_module(folder: Path, how: str) -> None:
    path = source('#define MARK "mark-one"')
    damage(cache.build(Extension("kit_input", "kit_input", (path,))).path, how)
    assert build(path) == (True, "one")
    assert build(path) == (False, "one")


@pytest.mark.parametrize("how", ["empty", "gone"])
@pytest.mark.slow
def test_a_damaged_kit(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("OPWEAVE_CACHE_DIR", str(folder / "cache"))
    build(source('#define MARK "mark-one"'))
    damage(next(cache.cache_dir().glob("native/kit-*/objects/*.o")), how)
    assert build(source('#define MARK "mark-two"')) == (True, "two")


def test_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("OPWEAVE_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"opweave-{os.getuid()}"
    assert cache.cache_dir() == own
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    with pytest.raises(
        NativeBuildError, match=r"other users can write to .*; set OPWEAVE_CACHE_DIR"
    ):
        cache.cache_dir()
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(NativeBuildError, match=r"set OPWEAVE_CACHE_DIR"):
        cache.cache_dir()


def test_a_warm_load_starts_no_compiler(folder: Path) -> None:
    path = source('#define MARK "mark-one"')
    build(path)
    before = compiler_calls()
    assert build(path) == (False, "one")
    assert compiler_calls() == before


def test_a_source_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "m.cpp"
    path.symlink_to("/proc/self/mem")  # also root cannot
    with pytest.raises(NativeBuildError, match=r"Cannot read the source .*m\.cpp"):
        build(path)
