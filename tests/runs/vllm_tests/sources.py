"""vLLM's source distribution."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tomllib
from pathlib import Path
from urllib.request import urlopen

# The tests that run, and the plugin that some of them load.
PARTS = ("compile", "ir", "kernels/ir", "model_executor", "plugins", "plugins_tests")
PLUGIN = "tests/plugins/vllm_add_dummy_platform"


def unpack(lock: Path, folder: Path) -> Path:
    """Download the source distribution that *lock* names, and return the folder with its tests.

    The archive and its content are kept in *folder*.
    """
    if not lock.exists():
        raise SystemExit(f"{lock} is missing: make test-vllm-own writes it")
    [package] = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    name = f"{package['name']}-{package['version']}"
    archive, content = folder / f"{name}.tar.gz", folder / name
    if not archive.exists():
        _download(package["sdist"]["url"], archive)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != package["sdist"]["hashes"]["sha256"]:
        raise SystemExit(f"{archive} is damaged: remove it, and run this again")
    if not content.exists():
        _extract(archive, content)
    return content


def _download(url: str, target: Path) -> None:
    partial = target.with_suffix(".part")
    with urlopen(url, timeout=180) as response, partial.open("wb") as file:
        shutil.copyfileobj(response, file)
    partial.rename(target)


def _extract(archive: Path, content: Path) -> None:
    """Extract the tests only: the folder must not contain a package ``vllm``."""
    partial = content.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)
    tests = f"{content.name}/tests"
    wanted = (f"{tests}/__init__.py", *(f"{tests}/{part}/" for part in PARTS))
    with tarfile.open(archive) as tar:
        members = [member for member in tar if member.name.startswith(wanted)]
        tar.extractall(partial, members, filter="data")
    (partial / content.name).rename(content)
    partial.rmdir()
    _write_metadata(content / PLUGIN)


def _write_metadata(folder: Path) -> None:
    """Make the plugin's package look installed, with opweave's name of the entry-point group."""
    metadata = folder / f"{folder.name}-0.1.dist-info"
    metadata.mkdir()
    header = f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 0.1\n"
    (metadata / "METADATA").write_text(header, encoding="utf-8")
    entry = f"[opweave.general_plugins]\ndummy_custom_ops = {folder.name}:register_ops\n"
    (metadata / "entry_points.txt").write_text(entry, encoding="utf-8")
