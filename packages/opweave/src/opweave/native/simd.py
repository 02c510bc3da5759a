"""Sources that are compiled once per instruction set; see ``opweave/simd.h`` of the kit."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from opweave.native import toolchain
from opweave.native.errors import NativeBuildError

# Products and sums must round alike on every level. Exceptions would need symbols that all levels
# share. Loops start where processors fetch instructions.
FLAGS = (
    "-fno-exceptions",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-falign-loops=32",
    # GCC's own AVX-512 headers trip these warnings (GCC bug 105593); Clang has no such option.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-unknown-warning-option",
)

_LEVELS = {
    "x86_64": {
        "avx512bf16": ("-march=x86-64-v4", "-mavx512bf16"),
        "avx512": ("-march=x86-64-v4",),
        "avx2": ("-march=x86-64-v3",),
        "base": ("-march=x86-64-v2",),
    }
}
_OTHERS: Mapping[str, tuple[str, ...]] = {"base": ()}


def levels() -> Mapping[str, tuple[str, ...]]:
    """Return the levels of this architecture, with the compiler flags of each."""
    machine = platform.machine()
    return _LEVELS.get("x86_64" if machine == "AMD64" else machine, _OTHERS)


def check_symbols(source: Path, objects: Iterable[Path]) -> None:
    """Check that objects of *source* have no symbols of which the linker keeps one for all levels.

    Raises:
        NativeBuildError: they have one, or it cannot be checked.
    """
    for path in objects:
        found = toolchain.run((toolchain.nm(), "-C", str(path)))
        if found.returncode != 0:
            raise NativeBuildError(f"Cannot read the symbols of {path}.", found.stderr)
        for line in found.stdout.splitlines():
            # 16 digits or blanks, a blank, the kind (weak or unique), a blank, the name
            if line[17:18] in ("W", "V", "u"):
                raise NativeBuildError(
                    f"{source.name} has the function {line[19:]}, of which the linker keeps one "
                    "copy for all instruction sets; put it into an anonymous namespace, or do not "
                    "use it in a SIMD source."
                )
