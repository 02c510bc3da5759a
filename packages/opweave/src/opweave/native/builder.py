"""Native modules to build: their description, inputs, compilation and linking."""

from __future__ import annotations

import hashlib
import keyword
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from opweave import torch_compat
from opweave.ir.errors import did_you_mean
from opweave.native import toolchain
from opweave.native.toolchain import NativeBuildError

# The description of a native module to build: names, sources and flags.


CUDA_SUFFIX = ".cu"
_SUFFIXES = (".cpp", ".cc", ".cxx", CUDA_SUFFIX)
_RESERVED_NAMES = frozenset({"aten", "opweave", "opweave_c", "prim", "prims", "torch"})


@dataclass(frozen=True, slots=True)
class Extension:
    """A native module to build.

    ``module`` is the name of the Python module without its package, ``namespace`` that of its torch
    ops. ``simd_sources`` are compiled once per instruction set.
    """

    module: str
    namespace: str
    sources: tuple[Path, ...]
    simd_sources: tuple[Path, ...] = ()
    include_dirs: tuple[Path, ...] = ()
    cflags: tuple[str, ...] = ()
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()

    @property
    def filename(self) -> str:
        """The name of the module's file."""
        return f"{self.module}.abi3.so"

    @property
    def label(self) -> str:
        """The module's name for messages."""
        is_alone = self.module == self.namespace
        return self.module if is_alone else f"{self.namespace}.{self.module}"

    @property
    def all_sources(self) -> tuple[Path, ...]:
        """All source files."""
        return (*self.sources, *self.simd_sources)

    @property
    def has_cuda(self) -> bool:
        """Whether nvcc is needed."""
        return any(source.suffix == CUDA_SUFFIX for source in self.sources)


def check_name(name: str) -> str:
    """Return *name*; raise NativeBuildError unless it is valid for a module and a namespace."""
    fits = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", name)
    if not fits or keyword.iskeyword(name):
        raise NativeBuildError(
            f"{name!r} is not a valid name for a native module; use lowercase letters, digits and "
            "underscores, starting with a letter, but not a Python keyword."
        )
    # torch.ops also has attributes that are not namespaces, such as load_library.
    is_namespace = torch_compat.is_op_namespace(getattr(torch.ops, name))
    if name in _RESERVED_NAMES or not is_namespace:
        raise NativeBuildError(f"The name {name!r} is taken; choose another one.")
    return name


def check_list(value: object, name: str, item: str) -> tuple[Any, ...]:
    """Return *value* as a tuple of strings or, if *item* is "path", of strings and paths.

    Raises:
        TypeError: it is not an iterable of these, or is a single string or path.
    """
    kinds = (str, os.PathLike) if item == "path" else (str,)
    if isinstance(value, (*kinds, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of {item}s, found {value!r}; write [{value!r}].")
    elements = tuple(value)
    for element in elements:
        if not isinstance(element, kinds):
            raise TypeError(f"{name} must be a list of {item}s, found {element!r} in it.")
        if "\0" in os.fspath(element):
            raise TypeError(f"{name} has {element!r}; commands cannot contain NUL characters.")
    return elements


def check_sources(sources: Iterable[str | Path]) -> tuple[Path, ...]:
    """Return *sources* as absolute paths.

    Raises:
        NativeBuildError: the list is empty, a file does not exist, or is not C++ or CUDA.
    """
    paths = _check_files(sources)
    if not paths:
        raise NativeBuildError("There are no sources to build.")
    return paths


def check_simd_sources(sources: Iterable[str | Path]) -> tuple[Path, ...]:
    """Return *sources*, to be compiled once per instruction set, as absolute paths.

    Raises:
        NativeBuildError: a file does not exist or is not C++.
    """
    paths = _check_files(sources)
    for path in paths:
        if path.suffix == CUDA_SUFFIX:
            raise NativeBuildError(f"{path} is CUDA, but SIMD sources are for the CPU's vectors.")
    return paths


def _check_files(sources: Iterable[str | Path]) -> tuple[Path, ...]:
    paths = tuple(Path(source).absolute() for source in sources)
    for path in paths:
        if path.suffix not in _SUFFIXES:
            raise NativeBuildError(f"{path} is not a source file ({', '.join(_SUFFIXES)}).")
        if path.is_dir():
            raise NativeBuildError(f"{path} is a folder; name the source files in it.")
        if not path.is_file():
            nearby = [p.name for p in path.parent.glob("*") if p.suffix in _SUFFIXES]
            raise NativeBuildError(
                f"The source file {path} does not exist. {did_you_mean(path.name, nearby)}"
            )
    return paths


# The input files of a build: those that flags and sources name, and those that compilers list.


# Environment variables from which compilers take search folders or flags.
_COMPILER_VARIABLES = (
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
_SEPARATORS = re.compile(r"[=,@]")
_MAKEFILE_WORDS = re.compile(r"(?:\\.|[^\s\\])+")


def environment() -> list[str | None]:
    """Return the values of the variables that compilers read, in a fixed order."""
    return [os.environ.get(name) for name in _COMPILER_VARIABLES]


def named(extension: Extension) -> list[Path]:
    """Return the existing headers, libraries and other files that sources and flags name.

    These include candidates in all search folders, not only the files that compilers read: a new
    file in an earlier folder shadows one in a later folder, which dependency files cannot show.
    """
    compiling = [*extension.cflags, *extension.cuda_cflags]
    flags = (*compiling, *extension.ldflags)
    words = [part for flag in flags for part in (flag, *_SEPARATORS.split(flag))]
    folders = [*extension.include_dirs, *_values(compiling, _INCLUDE_FLAGS)]
    folders += _paths("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
    files = {*_headers(extension.all_sources, folders), *_libraries(extension.ldflags)}
    files.update(path for path in map(Path, words) if _is_file(path))
    return sorted(files)


def digest(path: str | Path) -> str:
    """Return a digest of a file's contents; empty if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (OSError, ValueError):  # such as a NUL in its name
        return ""


def listed(folder: Path) -> list[str]:
    """Return the files in the compilers' dependency files ``*.d`` and the linker's ``*.link``."""
    words: list[str] = []
    for path in sorted(folder.glob("*.d")):
        words += _MAKEFILE_WORDS.findall(" ".join(_first_rule(path)))
    for path in sorted(folder.glob("*.link")):  # one file per line, with unescaped blanks
        words += [line.strip() for line in _first_rule(path)]
    return [name for name in dict.fromkeys(map(_unescaped, words)) if name]


def _first_rule(path: Path) -> list[str]:
    """Return the lines of the prerequisites of a makefile's first rule, without line ends."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    rule = re.split(r"(?<!\\)\n", text, maxsplit=1)[0]
    return rule.partition(": ")[2].split("\\\n")


def _unescaped(word: str) -> str:
    """Undo a makefile's escapes in *word*."""
    return re.sub(r"\\([ #\\:])", r"\1", word).replace("$$", "$")


def _headers(sources: Iterable[Path], folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that the sources include, transitively, next to them or in *folders*."""
    folders = list(folders)
    headers: set[Path] = set()
    queue = list(sources)
    while queue:
        source = queue.pop()
        try:
            content = source.read_bytes()
        except OSError:  # the compiler will report it
            continue
        for match in _INCLUDE.finditer(content):
            name = os.fsdecode(match.group(1))
            places = {os.path.realpath(folder / name) for folder in (source.parent, *folders)}
            for path in set(map(Path, places)) - headers:
                if _is_file(path):
                    headers.add(path)
                    queue.append(path)
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


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a flag that is not a path
        return False


# Compiling and linking of native modules.


_COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
KIT_FLAGS = (*_COMMON, "-O2", "-DPy_LIMITED_API=0x030a0000")
_USER_FLAGS = (*_COMMON, "-O3", "-Wall")
_CUDA_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden")

# Not PyInit_##name: the module's name may be a predefined macro, such as linux.
_ENTRY_TEMPLATE = """\
#include <opweave/python_module.h>

PyMODINIT_FUNC PyInit_{module}() {{
  return opweave::create_python_module("{module}", "{namespace}", nullptr);
}}
"""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A compiler call: *command* makes *output* from *source*."""

    source: Path
    output: Path
    command: tuple[str, ...]


def flags(extension: Extension) -> list[list[str]]:
    """Return all flags that *extension* is built with, grouped by use, in order."""
    return [
        [*KIT_FLAGS, *_USER_FLAGS, *_link_flags()],
        [str(folder) for folder in extension.include_dirs],
        list(extension.cflags),
        list(extension.ldflags),
        [*_CUDA_FLAGS, *_architecture(), *extension.cuda_cflags] if extension.has_cuda else [],
        [*toolchain.FLAGS, *map(str, toolchain.levels().items())] if extension.simd_sources else [],
    ]


def compile_kit(folder: Path, *, verbose: bool = False) -> None:
    """Compile the sources that all modules share into objects in *folder*."""
    _run_all([_kit_job(source, folder) for source in toolchain.core_sources()], verbose=verbose)


def build(extension: Extension, kit_objects: Path, folder: Path, *, verbose: bool = False) -> Path:
    """Build *extension* in *folder* and return the module's file.

    The folder also gets the dependency files of the compilers, for `inputs.listed`.

    Raises:
        NativeBuildError: a compiler is missing or fails.
    """
    jobs = [
        _user_job(f"{i}_{source.stem}", source, extension, folder)
        for i, source in enumerate(extension.sources)
    ]
    entry = folder / "entry.cpp"
    names = {"module": extension.module, "namespace": extension.namespace}
    entry.write_text(_ENTRY_TEMPLATE.format(**names), encoding="utf-8")
    jobs.append(_kit_job(entry, folder))
    by_source = [
        _simd_jobs(i, source, extension, folder) for i, source in enumerate(extension.simd_sources)
    ]
    jobs += chain.from_iterable(by_source)
    _run_all(jobs, verbose=verbose)
    for simd_jobs in by_source:
        toolchain.check_symbols(simd_jobs[0].source, [job.output for job in simd_jobs])
    objects = [*(job.output for job in jobs), *sorted(kit_objects.glob("*.o"))]
    output = folder / extension.filename
    link = CompileJob(Path("the objects"), output, _link(extension, objects, output))
    _run_all([link], verbose=verbose)
    return output


def _kit_job(source: Path, folder: Path) -> CompileJob:
    output = folder / f"kit_{source.stem}.o"
    includes = (f"-I{toolchain.include_dir()}", f"-I{toolchain.python_include()}")
    command = (*toolchain.cxx().command, *KIT_FLAGS, *includes)
    return CompileJob(source, output, (*command, "-c", str(source), "-o", str(output)))


def _user_job(
    name: str, source: Path, extension: Extension, folder: Path, flags: Sequence[str] = ()
) -> CompileJob:
    output = folder / f"{name}.o"
    includes = [f"-I{path}" for path in (*extension.include_dirs, toolchain.include_dir())]
    if source.suffix == CUDA_SUFFIX:
        host = ("-ccbin", toolchain.cxx().command[0])
        command = (*toolchain.nvcc().command, *host, *_CUDA_FLAGS, *_architecture(), *includes)
        command = (*command, *extension.cuda_cflags)
    else:
        command = (*toolchain.cxx().command, *_USER_FLAGS, *includes, *extension.cflags, *flags)
    lists = ("-MD", "-MF", str(output.with_suffix(".d")))
    return CompileJob(source, output, (*command, *lists, "-c", str(source), "-o", str(output)))


def _simd_jobs(number: int, source: Path, extension: Extension, folder: Path) -> list[CompileJob]:
    """Return one job per instruction set."""
    jobs = []
    for level, level_flags in toolchain.levels().items():
        flags = (*toolchain.FLAGS, *level_flags, f"-DOPWEAVE_ISA={level}")
        name = f"simd_{number}_{source.stem}_{level}"
        jobs.append(_user_job(name, source, extension, folder, flags))
    return jobs


def _architecture() -> tuple[str, ...]:
    """Return the flag for this machine's GPU; without a GPU, nvcc's portable default applies."""
    if not torch.cuda.is_available():
        return ()
    major, minor = torch.cuda.get_device_capability()
    return (f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}",)


def _link(extension: Extension, objects: Iterable[Path], output: Path) -> tuple[str, ...]:
    files = (*map(str, objects), *_linker_list(extension, output), "-o", str(output))
    if not extension.has_cuda:
        return (*toolchain.cxx().command, *_link_flags(), *files, *extension.ldflags, "-ldl")
    # nvcc finds the CUDA runtime library.
    host = ("-ccbin", toolchain.cxx().command[0])
    passed_on = _through_nvcc((*_link_flags(), *extension.ldflags))
    return (*toolchain.nvcc().command, *host, *files, *passed_on, "-ldl")


def _linker_list(extension: Extension, output: Path) -> tuple[str, ...]:
    """Return flags for a dependency file of the linker, if supported (binutils 2.35, LLVM 13)."""
    chosen = (flag for flag in extension.ldflags if flag.startswith(("-fuse-ld", "-B")))
    command = (*toolchain.cxx().command, *chosen, "-Wl,--help")
    if "--dependency-file" not in toolchain.run(command).stdout:
        return ()
    return ("-Xlinker", f"--dependency-file={output.with_suffix('.link')}")


def _through_nvcc(link_flags: Iterable[str]) -> Iterator[str]:
    """Translate link flags of a C++ compiler to those of nvcc."""
    for flag in link_flags:
        if flag.startswith("-Wl,"):
            for part in flag.removeprefix("-Wl,").split(","):
                yield from ("-Xlinker", part)
        elif flag.startswith("-static-"):
            yield from ("-Xcompiler", flag)
        else:
            yield flag


def _link_flags() -> tuple[str, ...]:
    """Return flags that link the C++ runtime statically, independent of torch's."""
    if sys.platform == "darwin":
        return ("-shared", "-undefined", "dynamic_lookup")
    return ("-shared", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs=ALL")


def _run_all(jobs: Sequence[CompileJob], *, verbose: bool) -> None:
    with ThreadPoolExecutor(max_workers=_processors()) as pool:
        results = list(pool.map(lambda job: _run(job, verbose=verbose), jobs))
    failed = [(job, log) for job, log in zip(jobs, results, strict=True) if log is not None]
    if not failed:
        return
    names = ", ".join(job.source.name for job, _ in failed)
    links = names.startswith("the ")
    verb = "do" if len(failed) > 1 or links else "does"
    raise NativeBuildError(
        f"{names} {verb} not {'link' if links else 'compile'}; the compiler's message follows.",
        "\n".join(f"{shlex.join(job.command)}\n{log}" for job, log in failed),
    )


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run(job: CompileJob, *, verbose: bool) -> str | None:
    """Return the compiler's messages if it failed, else None."""
    done = toolchain.run(job.command)
    log = done.stdout + done.stderr
    if verbose:
        print(shlex.join(job.command), log, sep="\n", end="", file=sys.stderr)
    if done.returncode == 0 and not job.output.is_file():
        raise NativeBuildError(
            f"{job.command[0]} reports success but writes no file for {job.source.name}: it is not "
            "a compiler, or a flag suppresses the output; name a compiler in CXX (or CUDACXX), or "
            "remove the flag."
        )
    return log if done.returncode != 0 else None
