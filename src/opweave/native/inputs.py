"""What a build reads: what its flags and sources name, and what its compilers list afterwards."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from opweave.native.extension import Extension

# Compilers search these folders, or take flags from these variables, without being told to.
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
    """Return the variables that compilers read, in a fixed order."""
    return [os.environ.get(name) for name in _VARIABLES]


def named(extension: Extension) -> list[Path]:
    """Return the headers, libraries and other files that the sources and flags name, if they exist.

    They may be more than the compilers read, and must be: a file that comes to be in an earlier
    folder shadows one in a later folder, which no list from the build before can show.
    """
    compiling = [*extension.cflags, *extension.cuda_cflags]
    flags = (*compiling, *extension.ldflags)
    words = [part for flag in flags for part in (flag, *_JOINED.split(flag))]
    folders = [*extension.include_dirs, *_values(compiling, _INCLUDE_FLAGS)]
    folders += _paths("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
    found = {*_headers(extension.sources, folders), *_libraries(extension.ldflags)}
    found.update(path for path in map(Path, words) if _is_file(path))
    return sorted(found)


def digest(path: str | Path) -> str:
    """Return a digest of a file's bytes; empty if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (OSError, ValueError):  # such as a NUL in its name
        return ""


def listed(folder: Path) -> list[str]:
    """Return what the compilers read, by their lists ``*.d`` (and the linker's, ``*.link``)."""
    found: dict[str, None] = {}
    for path in sorted(folder.glob("*.d")):
        rule = _first_rule(path)
        found.update(dict.fromkeys(map(_plain, _WORDS.findall(" ".join(rule)))))
    for path in sorted(folder.glob("*.link")):  # one file in a line, blanks in names as they are
        found.update(dict.fromkeys(_plain(line.strip()) for line in _first_rule(path)))
    return [name for name in found if name]


def _first_rule(path: Path) -> list[str]:
    """Return the lines of what the first rule of a makefile depends on, without their ends."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    rule = re.split(r"(?<!\\)\n", text, maxsplit=1)[0]
    return rule.partition(": ")[2].split("\\\n")


def _plain(word: str) -> str:
    """Undo a makefile's escapes in *word*."""
    return re.sub(r"\\([ #\\:])", r"\1", word).replace("$$", "$")


def _headers(sources: Iterable[Path], folders: Iterable[Path]) -> Iterator[Path]:
    """Find every file that the sources include, directly or not, in *folders* or beside them."""
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
    """Find the files that ``-l`` may mean, in the folders of ``-L``."""
    flags = list(flags)
    folders = [*_values(flags, ("-L",)), *_paths("LIBRARY_PATH")]
    for name in map(str, _values(flags, ("-l",))):
        files = [name[1:]] if name.startswith(":") else [f"lib{name}.so", f"lib{name}.a"]
        yield from (path for folder in folders for file in files if _is_file(path := folder / file))


def _values(flags: Iterable[str], names: tuple[str, ...]) -> Iterator[Path]:
    """Return what follows one of *names* in *flags*, in the same word or as the next one."""
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
        if value:  # an empty part is the working folder
            yield from map(Path, value.split(os.pathsep))


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a flag that is no path
        return False


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the compiler will say so
        return b""
