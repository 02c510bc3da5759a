"""Converts reStructuredText roles and literal blocks in docstrings to Markdown."""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)([^`]+)`")
_BLOCK = re.compile(r"^( *)(.*)::\n\n((?:\1 +.*\n|\n)*\1 +.*)$", re.MULTILINE)
_SOURCE = re.compile(r"^( *Source: .*)\n +", re.MULTILINE)  # it looks like an admonition


class Docstrings(griffe.Extension):
    """Rewrites docstrings with roles or literal blocks."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of *obj*."""
        if obj.docstring is not None:
            text = _SOURCE.sub(r"\1 ", _BLOCK.sub(_fenced, obj.docstring.value))
            obj.docstring.value = _ROLE.sub(lambda role: _link(obj, role), text)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite the docstring of the package itself."""
        self.on_object(obj=pkg)


def _link(obj: griffe.Object, role: re.Match[str]) -> str:
    """Return the name as code, with a link if some page has an entry for it."""
    target = role[2].lstrip(".")
    code = f"`{target.rpartition('.')[2] if role[1] else target}`"
    if not target.startswith("opweave."):
        first, dot, rest = target.partition(".")
        try:
            target = obj.resolve(first) + dot + rest
        except griffe.NameResolutionError:
            return code
    return f'<autoref identifier="{target}" optional>{code}</autoref>'


def _fenced(block: re.Match[str]) -> str:
    """Return a literal block as a fenced block, after its introductory line."""
    indent, line, code = block[1], block[2], textwrap.dedent(block[3])
    fenced = "\n".join([f"```{_language(code)}", code, "```"])
    said = f"{indent}{line}:\n\n" if line else ""
    return said + textwrap.indent(fenced, indent)


def _language(code: str) -> str:
    try:
        ast.parse(code)
    except SyntaxError:
        return "toml"
    return "python"
