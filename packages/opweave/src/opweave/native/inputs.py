"""The input files of a build: those that flags and sources name, and those that compilers list."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from opweave.native.extension import Extension

# Environment variables from which compilers take search folders or flags.
_VARIABLES = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "SDKROOT",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
)
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)
_INCLUDE_FLAGS = ("-isystem", "-iquote", "-idirafter", "-I")
_JOINED = re.compile(r"[=,@]")
_WORDS = re.compile(r"(?:\\.|[^\s\\])+")


def environment() -> list[str | None]:
    """Return the values of the variables that compilers read, in a fixed order."""
    return [os.environ.get(name) for name in _VARIABLES]


def named(extension: Extension) -> list[Path]:
    """Return the existing headers, libraries and other files that sources and flags name.

    These include candidates in all search folders, not only the files that compilers read: a new
    file in an earlier folder shadows one in a later folder, which dependency files cannot show.
    """
    compiling = [*extension.cflags, *extension.cuda_cflags]
    flags = (*compiling, *extension.ldflags)
    words = [part for flag in flags for part in (flag, *_JOINED.split(flag))]
    folders = [*extension.include_dirs, *_values(compiling, _INCLUDE_FLAGS)]
    folders += _paths("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
    found = {*_headers(extension.all_sources, folders), *_libraries(extension.ldflags)}
    found.update(path for path in map(Path, words) if _is_file(path))
    return sorted(found)


def digest(path: str | Path) -> str:
    """Return a digest of a file's contents; empty if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (OSError, ValueError):  # such as a NUL in its name
        return ""


def listed(folder: Path) -> list[str]:
    """Return the files in the compilers' dependency files ``*.d`` and the linker's ``*.link``."""
    found: dict[str, None] = {}
    for path in sorted(folder.glob("*.d")):
        rule = _first_rule(path)
        found.update(dict.fromkeys(map(_plain, _WORDS.findall(" ".join(rule)))))
    for path in sorted(folder.glob("*.link")):  # one file per line, with unescaped blanks
        found.update(dict.fromkeys(_plain(line.strip()) for line in _first_rule(path)))
    return [name for name in found if name]


def _first_rule(path: Path) -> list[str]:
    """Return the lines of the prerequisites of a makefile's first rule, without line ends."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    rule = re.split(r"(?<!\\)\n", text, maxsplit=1)[0]
    return rule.partition(": ")[2].split("\\\n")


def _plain(word: str) -> str:
    """Undo a makefile's escapes in *word*."""
    return re.sub(r"\\([ #\\:])", r"\1", word).replace("$$", "$")


def _headers(sources: Iterable[Path], folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that the sources include, transitively, next to them or in *folders*."""
    folders = list(folders)
    found: set[Path] = set()
    waiting = list(sources)
    while waiting:
        source = waiting.pop()
        for match in _INCLUDE.finditer(_content(source)):
            name = os.fsdecode(match.group(1))
            for path in {_real(folder / name) for folder in (source.parent, *folders)} - found:
                if _is_file(path):
                    found.add(path)
                    waiting.append(path)
                    yield path


def _libraries(flags: Iterable[str]) -> Iterator[Path]:
    """Yield the candidates of ``-l`` in the folders of ``-L``."""
    flags = list(flags)
    folders = [*_values(flags, ("-L",)), *_paths("LIBRARY_PATH")]
    for name in map(str, _values(flags, ("-l",))):
        files = [name[1:]] if name.startswith(":") else [f"lib{name}.so", f"lib{name}.a"]
        yield from (path for folder in folders for file in files if _is_file(path := folder / file))


def _values(flags: Iterable[str], names: tuple[str, ...]) -> Iterator[Path]:
    """Yield the values of the flags called *names*, in the same word or the next."""
    follows = False
    for flag in flags:
        name = next((name for name in names if flag.startswith(name)), None)
        if follows:
            yield Path(flag)
        elif name is not None and flag != name:
            yield Path(flag[len(name) :])
        follows = not follows and flag == name


def _paths(*variables: str) -> Iterator[Path]:
    for variable in variables:
        value = os.environ.get(variable)
        if value:  # an empty item stands for the working folder
            yield from map(Path, value.split(os.pathsep))


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a flag that is not a path
        return False


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the compiler will report it
        return b""
