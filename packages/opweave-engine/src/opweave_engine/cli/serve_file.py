"""Option files of ``opweave serve --config``."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cyclopts import App, Argument, ArgumentCollection
from cyclopts.config import Dict

from opweave.cli.errors import CliError
from opweave.ir.errors import did_you_mean

_SECRET = ("--api-key",)
_KINDS = ".yaml, .yml, .json or .toml"


class OptionSources:
    """Reads options from the ``--config`` file, and records the source of each option.

    Attributes:
        given: values and their source, for each given option.
    """

    def __init__(self) -> None:
        self.given: dict[str, str] = {}

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Add the file's options; cyclopts calls this between parsing and conversion."""
        for argument in arguments:
            if argument.name == "--config" and argument.tokens:
                path = argument.tokens[0].value
                values = _read(Path(path).expanduser())
                _check_names(values, arguments, path)
                file = Dict(values, source=path, use_commands_as_keys=False)
                file(app, commands, arguments)
        self.given = {argument.name: _origin(argument) for argument in arguments if argument.tokens}


def _origin(argument: Argument) -> str:
    source = argument.tokens[0].source
    values = [".".join([*token.keys, token.value]) for token in argument.tokens]
    shown = "***" if argument.name in _SECRET else ", ".join(values)
    return f"{shown} ({'command line' if source == 'cli' else source})"


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values = _parser(path)(text)
    except OSError as error:
        raise CliError(f"Cannot read --config {path}: {error.strerror}.") from error
    except ValueError as error:
        raise CliError(f"--config {path} is malformed: {error}.") from error
    if values is None:  # an empty YAML file
        return {}
    if not isinstance(values, dict):
        raise CliError(f"--config {path} must hold options by name, such as port: 8000.")
    return {str(name).replace("_", "-"): _flat(value) for name, value in values.items()}


def _parser(path: Path) -> Callable[[str], Any]:
    if path.suffix == ".json":
        return json.loads
    if path.suffix == ".toml":
        return tomllib.loads
    if path.suffix in (".yaml", ".yml"):
        return _parse_yaml
    raise CliError(f"--config {path}: its name must end in {_KINDS}.")


def _parse_yaml(text: str) -> Any:
    from opweave_engine.dependencies import require

    yaml = require("yaml")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _flat(value: Any) -> Any:
    """Join lists inside tables with commas, as on the command line."""
    if not isinstance(value, Mapping):
        return value
    return {
        str(key): ",".join(map(str, each)) if isinstance(each, list) else _flat(each)
        for key, each in value.items()
    }


def _check_names(values: Mapping[str, Any], arguments: ArgumentCollection, path: str) -> None:
    known = {
        name.removeprefix("--")
        for argument in arguments
        for name in argument.names
        if name.startswith("--") and name != "--config" and "_" not in name
    }
    for name in values:
        if name not in known:
            raise CliError(f"--config {path}: unknown option {name!r}. {did_you_mean(name, known)}")
