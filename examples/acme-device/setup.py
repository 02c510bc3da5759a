"""Builds the driver against the headers of the torch that it will run with.

A C++ extension of torch fits the torch it was built for and no other, so the wheel requires just
that one. It is found where the package is to be installed, not downloaded: build isolation hides
installed packages from this file, but its interpreter still knows the folder that they are in.
"""

import os
import re
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


def torch_folder() -> Path:
    places = [*sys.path, sysconfig.get_path("platlib")]
    for folder in (Path(place) / "torch" for place in places):
        if (folder / "include" / "ATen").is_dir():
            return folder
    sys.exit(
        "acme-device is built against torch, which is not installed here. Install it first; where "
        "packages are built elsewhere (uv, for one), add --no-build-isolation."
    )


class ParallelBuild(build_ext):
    """Compiles the sources side by side."""

    def build_extension(self, ext: Extension) -> None:
        compile_one = self.compiler.compile

        def compile_all(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_one([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_all
        super().build_extension(ext)


TORCH = torch_folder()
VERSION = re.search(r"'(\d+\.\d+)", (TORCH / "version.py").read_text()).group(1)

setup(
    install_requires=["opweave", "opweave-engine", f"torch=={VERSION}.*"],
    ext_modules=[
        Extension(
            "acme_device._driver",
            sorted(str(path) for path in Path("csrc").rglob("*.cpp")),
            include_dirs=["csrc"],
            depends=["setup.py", *sorted(str(path) for path in Path("csrc").rglob("*.h"))],
            library_dirs=[str(TORCH / "lib")],
            libraries=["torch_cpu", "c10"],
            extra_compile_args=[
                "-std=c++20",
                "-O2",
                "-g0",
                # a * b + c rounds twice, as the ops say it does
                "-ffp-contract=off",
                # not -I, to silence warnings in torch's headers
                "-isystem",
                str(TORCH / "include"),
                "-DAT_PER_OPERATOR_HEADERS",
            ],
            language="c++",
        )
    ],
    cmdclass={"build_ext": ParallelBuild},
)
