"""Compiling and linking of native modules."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from opweave.native import kit, simd, toolchain
from opweave.native.errors import NativeBuildError
from opweave.native.extension import CUDA_SUFFIX, Extension

_COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
_KIT_FLAGS = (*_COMMON, "-O2", "-DPy_LIMITED_API=0x030a0000")
_USER_FLAGS = (*_COMMON, "-O3", "-Wall")
_CUDA_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden")

# Not PyInit_##name: the module's name may be a predefined macro, such as linux.
_ENTRY = """\
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
        [*_KIT_FLAGS, *_USER_FLAGS, *_link_flags()],
        [str(folder) for folder in extension.include_dirs],
        list(extension.cflags),
        list(extension.ldflags),
        [*_CUDA_FLAGS, *_architecture(), *extension.cuda_cflags] if extension.has_cuda else [],
        [*simd.FLAGS, *map(str, simd.levels().items())] if extension.simd_sources else [],
    ]


def kit_flags() -> list[str]:
    """Return the flags that the kit is built with."""
    return list(_KIT_FLAGS)


def compile_kit(folder: Path, *, verbose: bool = False) -> None:
    """Compile the sources that all modules share into objects in *folder*."""
    _run_all([_kit_job(source, folder) for source in kit.core_sources()], verbose=verbose)


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
    jobs.append(_kit_job(_write_entry(extension, folder), folder))
    by_level = [
        _simd_jobs(i, source, extension, folder) for i, source in enumerate(extension.simd_sources)
    ]
    jobs += [job for each in by_level for job in each]
    _run_all(jobs, verbose=verbose)
    for same in by_level:
        simd.check_symbols(same[0].source, [job.output for job in same])
    objects = [*(job.output for job in jobs), *sorted(kit_objects.glob("*.o"))]
    output = folder / extension.filename
    _run_all(
        [CompileJob(Path("the objects"), output, _link(extension, objects, output))],
        verbose=verbose,
    )
    return output


def _write_entry(extension: Extension, folder: Path) -> Path:
    path = folder / "entry.cpp"
    path.write_text(
        _ENTRY.format(module=extension.module, namespace=extension.namespace), encoding="utf-8"
    )
    return path


def _kit_job(source: Path, folder: Path) -> CompileJob:
    output = folder / f"kit_{source.stem}.o"
    includes = (f"-I{kit.include_dir()}", f"-I{toolchain.python_include()}")
    command = (*toolchain.cxx().command, *_KIT_FLAGS, *includes)
    return CompileJob(source, output, (*command, "-c", str(source), "-o", str(output)))


def _user_job(
    name: str, source: Path, extension: Extension, folder: Path, flags: Sequence[str] = ()
) -> CompileJob:
    output = folder / f"{name}.o"
    includes = [f"-I{path}" for path in (*extension.include_dirs, kit.include_dir())]
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
    for level, own in simd.levels().items():
        flags = (*simd.FLAGS, *own, f"-DOPWEAVE_ISA={level}")
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
    verb = "do" if len(failed) > 1 or names.startswith("the ") else "does"
    what = "link" if names.startswith("the ") else "compile"
    raise NativeBuildError(
        f"{names} {verb} not {what}; the compiler's message follows.",
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
