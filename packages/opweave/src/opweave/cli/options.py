"""Options that several commands share, and the conversion of their texts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import CoercionError, Parameter, Token, convert
from cyclopts.validators import Number

from opweave import platforms
from opweave.cli.output import CliError
from opweave.config import current_compilation_config
from opweave.config.compilation import CustomOps, apply_command_line_config
from opweave.config.environment import TUNING_FILE
from opweave.config.plugin_options import apply_plugin_options
from opweave.config.sources import apply_command_line
from opweave.config.values import read_object
from opweave.ir import current_registry
from opweave.plugins import load_general_plugins

# Boolean options without a value.


Flag = Annotated[bool, Parameter(negative=())]
"""``--name``, without ``--no-name``."""


# Options with a number in a range.


SeedOption = Annotated[int, Parameter(validator=Number(gte=-(2**63), lt=2**64))]
"""``--seed``, in the range of ``torch.manual_seed``."""
RoundsOption = Annotated[int, Parameter(show=False, validator=Number(gte=1))]
"""``--rounds``, of measurements."""


# Conversion of option texts to values.


def converted(kind: Any, tokens: Sequence[Token]) -> Any:
    """Convert *tokens* to *kind*; unlike cyclopts, do not round fractions to an int.

    Raises:
        CoercionError: *tokens* are not valid for *kind*.
    """
    if int in (kind, *get_args(kind)):
        for token in tokens:
            if "." in token.value:
                raise CoercionError(token=token, target_type=int)
    return convert(kind, tokens)


def by_key(kind: Any, tokens: Mapping[str, Any] | Sequence[Token]) -> dict[str, Any]:
    """Return the values of ``--option.key=value`` by key, or of ``--option`` with a JSON object.

    Values of keys are strings; values of a JSON object keep their types.

    Raises:
        CliError: a key is nested.
        SettingError: (a ValueError) the text is not a JSON object.
    """
    if not isinstance(tokens, Mapping):
        return read_object("JSON", tokens[0].value)
    for key, value in tokens.items():
        if isinstance(value, Mapping):
            raise CliError(f"{key!r} takes one value, such as JSON, not nested keys: {[*value]}.")
    return {key: texts[0].value for key, texts in tokens.items()}


# Validation of prompts from the command line.


def check_utf8(text: str) -> None:
    """Raise CliError if *text* has surrogates, which stand for bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CliError(f"The prompt {text!a} is not UTF-8 text.") from error


# The option ``--import MODULE``, for modules that register ops and implementations.


ImportOption = Annotated[
    list[str] | None,
    Parameter(
        name="--import",
        negative=(),
        help="Import this module first, to register ops, implementations or layers; "
        "repeatable. The current directory is searched too.",
    ),
]


def import_modules(names: Iterable[str] | None) -> None:
    """Import modules by name, with the current directory last on sys.path.

    Raises:
        OpweaveError: a module is missing or fails to import.
    """
    sys.path.append(os.getcwd())
    if names:
        from opweave.conformance.find import import_named

        with redirect_stdout(sys.stderr):  # stdout is for results only
            for name in names:
                import_named("--import", name)


# The option ``--compilation-config.<key>=value``, or ``--compilation-config`` and JSON.


CompilationOption = Annotated[
    dict[str, Any] | None,
    Parameter(
        name=("--compilation-config", "--compilation_config"),
        negative=(),
        converter=by_key,
        allow_leading_hyphen=True,  # for -op
        help="Settings of compilation and of enabled layers (custom_ops): "
        "--compilation-config.mode=3, --compilation-config.backend=inductor, "
        '--compilation-config.custom_ops \'["none","+rms_norm"]\' or none,+rms_norm, '
        "--compilation-config.options '{\"fusion\": false}'. Also accepts one JSON object.",
    ),
]


# The option ``--ir-op-priority.<op>=a,b``, shared by the commands.


PriorityOption = Annotated[
    dict[str, Any] | None,
    Parameter(
        name="--ir-op-priority",
        negative=(),
        converter=by_key,
        help="Providers to prefer for an op: --ir-op-priority.rms_norm=opweave_c,native. "
        "A provider written as name! is required. Also accepts one JSON object for all ops.",
    ),
]


TuningFileOption = Annotated[
    Path | None,
    Parameter(
        name="--tuning-file", help="Tuning file of opweave tune, whose measurements choose kernels."
    ),
]


# The option ``--plugin.<plugin>.<key>=value``, shared by the commands that load plugins.


GivenOptions = dict[str, dict[str, str]] | None
"""Option texts by plugin and key."""

PluginOption = Annotated[
    GivenOptions,
    Parameter(
        name="--plugin",
        negative=(),
        allow_leading_hyphen=True,  # for negative numbers
        help="An option of a plugin or the platform: --plugin.acme.queue-depth=8. "
        "opweave doctor lists them.",
    ),
]


def apply_plugins(values: GivenOptions) -> None:
    """Load the plugins that declare options, and set the given ones.

    Raises:
        SettingError: an option is unknown, or a value is of another type than the option.
        PluginError: a plugin failed.
    """
    load_general_plugins()
    platforms.resolution()
    set_options(values)


def set_options(values: GivenOptions) -> None:
    """Set the given options of loaded plugins.

    Raises:
        SettingError: an option is unknown, or a value is of another type than the option.
    """
    by_plugin = (values or {}).items()
    apply_plugin_options(
        {f"{p}.{key}": text for p, keys in by_plugin for key, text in keys.items()}
    )


# Options that select kernels, and how they are applied.


@Parameter(name="*")
@dataclass(frozen=True)
class SelectionOptions:
    """The options of commands that call ops."""

    ir_op_priority: PriorityOption = None
    plugin: PluginOption = None

    def apply(self) -> None:
        """Load the plugins, and apply and check the options.

        Raises:
            SettingError: an option, or a setting of a weaker source, is invalid.
            PluginError: a plugin failed.
        """
        apply_plugins(self.plugin)
        apply_command_line(current_registry(), self.ir_op_priority or {})


@Parameter(name="*")
@dataclass(frozen=True)
class RunOptions(SelectionOptions):
    """The options of commands that run a model."""

    tuning_file: TuningFileOption = None
    compilation_config: CompilationOption = None

    def apply(self) -> None:
        """Load the plugins, and apply and check the options; child processes use them too.

        Raises:
            SettingError: an option, or a setting of a weaker source, is invalid.
            PluginError: a plugin failed.
        """
        super().apply()
        if self.tuning_file is not None:
            from opweave.tuning.tuning_file import apply_tuning_file

            current_registry().ensure_ready()
            apply_tuning_file(current_registry(), self.tuning_file, "--tuning-file")
            os.environ[TUNING_FILE] = str(self.tuning_file.resolve())
        apply_command_line_config(self.compilation_config or {})

    def apply_like_eager(self) -> None:
        """Apply the options, with defaults for which compiled results equal eager results.

        They are equal bit for bit: the kernels of eager mode run, and fused code rounds alike.
        """
        self.apply()
        config, unset = current_compilation_config(), dict[str, object]()
        if config.uses_passes and not config.backend_options:
            unset["options"] = {"eager_rounding": True}
        if config.uses_passes and isinstance(config.custom_ops, CustomOps):
            unset |= {} if config.custom_ops.given else {"custom_ops": "all"}
        if unset:
            apply_command_line_config({**(self.compilation_config or {}), **unset})
