"""``opweave new``: start a package with a kernel, from templates."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from typing import Literal

import jinja2
from rich.markup import escape

from opweave.cli.options import Flag
from opweave.cli.output import CliError, fail, out, print_json
from opweave.ir.schema import ADAPTERS, OWN_PROVIDERS, RESERVED_PROVIDERS
from opweave.native.builder import check_name
from opweave.plugins.entry import BUILTIN_PLATFORMS

_TEMPLATES = Path(__file__).parent / "templates"
_PLACES = {"package": "src/{name}", "gitignore": ".gitignore"}
_TAKEN = frozenset(
    {*BUILTIN_PLATFORMS, *RESERVED_PROVIDERS, *OWN_PROVIDERS, *ADAPTERS, "opweave", "tests"}
)

Kernel = Literal["cpp", "triton", "python"]


def new(
    name: str,
    /,
    *,
    kernel: Kernel = "python",
    device: Flag = False,
    layer: Flag = False,
    json: Flag = False,
) -> None:
    """Create a package with an op, a kernel for it and tests, in a new folder.

    opweave finds the installed package by its entry point.

    Parameters
    ----------
    name
        Name of the package, its folder, its provider and the namespace of its torch ops.
    kernel
        Language of the kernel.
    device
        Add a device that torch does not know, simulated in the host's memory, and its platform.
    layer
        Add a layer that replaces one of opweave's.
    json
        Print JSON.
    """
    if device and kernel == "triton":
        fail("Triton does not run on a device in the memory of the host; use another --kernel.")
    files = create(name, Path.cwd(), kernel=kernel, device=device, layer=layer)
    if json:
        print_json({"name": name, "files": [str(path) for path in files]})
        return
    for path in files:
        out.print(escape(str(path.relative_to(Path.cwd()))))
    install = escape(f"pip install -e './{name}[test]'")
    out.print(f"\nNow: {install} && pytest {name} && opweave ops {name}_softcap")


def create(
    name: str, parent: Path, *, kernel: Kernel, device: bool = False, layer: bool = False
) -> list[Path]:
    """Create the package *name* in the new folder *parent*/*name*; return its files.

    A template is a file ``*.tmpl``. Those in a folder ``package`` become the Python package.

    Raises:
        CliError: the name is not valid or taken, or the folder exists or cannot be written.
        NativeBuildError: the name is taken in ``torch.ops``.
    """
    folder = parent / name
    _check_name(name, folder)
    values: dict[str, str | bool] = {
        "name": name,
        "class": "".join(part.capitalize() for part in name.split("_")),
        "kernel": kernel,
        "device": device,
        "layer": layer,
    }
    parts = ["all", kernel, *(["device"] if device else []), *(["layer"] if layer else [])]
    try:
        folder.mkdir()
        return [
            _write(template, template.relative_to(_TEMPLATES / part), folder, values)
            for part in parts
            for template in sorted((_TEMPLATES / part).rglob("*.tmpl"))
        ]
    except FileExistsError as error:
        raise CliError(f"{folder} already exists; choose another name.") from error
    except OSError as error:
        raise CliError(f"Cannot write {folder}: {error.strerror}.") from error


def _check_name(name: str, folder: Path) -> None:
    if not re.fullmatch(r"[a-z]([a-z0-9_]*[a-z0-9])?", name) or keyword.iskeyword(name):
        raise CliError(
            f"{name!r} is not a valid name for a package; use lowercase letters, digits and "
            "underscores, starting with a letter and not ending in an underscore, but not a Python "
            "keyword."
        )
    if name in _TAKEN or name in sys.stdlib_module_names:
        raise CliError(f"The name {name!r} is taken; choose another one.")
    if not folder.exists() and importlib.util.find_spec(name) is not None:
        raise CliError(
            f"A Python package {name!r} is already installed and would conflict; choose another "
            "name."
        )
    check_name(name)


def _write(template: Path, relative: Path, folder: Path, values: dict[str, str | bool]) -> Path:
    first, *rest = relative.with_suffix("").parts
    path = folder.joinpath(_PLACES.get(first, first).format(name=values["name"]), *rest)
    path.parent.mkdir(parents=True, exist_ok=True)
    source = jinja2.Template(
        template.read_text(encoding="utf-8"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    path.write_text(source.render(values), encoding="utf-8")
    return path
