"""The chat templates of a checkpoint by name."""

from __future__ import annotations

from pathlib import Path

from opweave_engine.errors import ChatTemplateError
from opweave_engine.loading.checkpoint import Checkpoint

_FILE, _FOLDER = "chat_template.jinja", "additional_chat_templates"
DEFAULT = "default"

Source = tuple[str, str]  # a template, and where it is from


def sources_of(checkpoint: Checkpoint) -> dict[str, Source]:
    """Return the templates of a checkpoint; files take precedence over ``tokenizer_config.json``.

    Raises:
        ChatTemplateError: a file cannot be read.
        CheckpointError: ``tokenizer_config.json`` is damaged.
    """
    given = (checkpoint.json("tokenizer_config.json") or {}).get("chat_template")
    origin = f"{checkpoint.path / 'tokenizer_config.json'}: chat_template"
    found = {name: (source, origin) for name, source in _named(given).items()}
    for file in sorted((checkpoint.path / _FOLDER).glob("*.jinja")):
        found[file.stem] = (read_template(file), str(file))
    if (file := checkpoint.path / _FILE).is_file():
        found[DEFAULT] = (read_template(file), str(file))
    return found


def read_template(file: Path) -> str:
    """Return the text of *file*.

    Raises:
        ChatTemplateError: it cannot be read.
    """
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ChatTemplateError(
            f"The chat template {str(file)!r} is not UTF-8.", "chat_template"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:  # or a name that no file can have
        why = error.strerror if isinstance(error, OSError) else error
        raise ChatTemplateError(
            f"The chat template {str(file)!r} cannot be read: {why}. Give a file, or the template "
            "itself.",
            "chat_template",
        ) from error


def _named(given: object) -> dict[str, str]:
    if isinstance(given, str):
        return {DEFAULT: given}
    if isinstance(given, list):  # of {"name": ..., "template": ...}
        entries = [(e.get("name"), e.get("template")) for e in given if isinstance(e, dict)]
    else:
        entries = list(given.items()) if isinstance(given, dict) else []
    return {n: t for n, t in entries if isinstance(n, str) and isinstance(t, str)}
