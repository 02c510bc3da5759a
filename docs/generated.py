"""Writes the parts of the documentation that are generated from the code.

    python docs/generated.py

replaces the text between ``<!-- NAME -->`` and ``<!-- end -->`` in the pages, for the names of
``PARTS``. mkdocs fills in the certificate, which changes with every kernel.
"""

from __future__ import annotations

import importlib
import inspect
import json
import lzma
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from opweave.config.environment import VARIABLES
from opweave.conformance import CHECKS, Subject, subjects
from opweave.conformance.platform import CHECKS as PLATFORM_CHECKS
from opweave.ir import TRAITS, ops, rules
from opweave.platforms import Capabilities, Platform
from opweave.platforms.base import members
from opweave_engine.server.app import request_fields
from opweave_engine.server.protocol.base import FieldRow

DOCS = Path(__file__).parent
_PART = re.compile(r"(<!-- ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the certificate, for mkdocs."""
    marker = "<!-- certificate -->"
    return markdown.replace(marker, _certificate()) if marker in markdown else markdown


def updated(page: str) -> str:
    """Return the text of *page* with the parts as the code has them now."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", page)


def main() -> None:
    """Update all pages."""
    for path in DOCS.rglob("*.md"):
        page = path.read_text(encoding="utf-8")
        if (new := updated(page)) != page:
            path.write_text(new, encoding="utf-8")
            print(path)


def _ops() -> str:
    """Return a section for each file of ops."""
    files: dict[str, list[str]] = {}
    for name in sorted(ops.__all__):
        files.setdefault(getattr(ops, name).native.__module__, []).append(name)
    sections = []
    for file, names in sorted(files.items()):
        title = (importlib.import_module(file).__doc__ or "").partition("\n")[0].rstrip(".")
        sections += [f"## {title}", *(_entry(getattr(ops, name).native, name) for name in names)]
    return "\n\n".join(sections)


def _rules() -> str:
    functions = {
        name: value
        for name, value in sorted(vars(rules).items())
        if inspect.isfunction(value) and value.__annotations__.get("return") == "Rule"
    }
    entries = {"Rule": rules.Rule, **functions}
    return "\n\n".join(_entry(value, name) for name, value in entries.items())


def _entry(value: Any, name: str) -> str:
    """Return the heading, the signature and the docstring of a function or class."""
    signature = inspect.signature(value)
    parameters = [
        each.replace(annotation=_Annotation(each.annotation))
        for each in signature.parameters.values()
    ]
    returns = signature.return_annotation
    end = "" if returns is signature.empty else f" -> {returns}"
    call = f"{name}({', '.join(map(str, parameters))}){end}"
    if len(call) > _MAX_WIDTH:
        call = "\n".join([f"{name}(", *(f"    {each}," for each in parameters), f"){end}"])
    text = _text(inspect.getdoc(value) or "")
    return "\n".join([f"### {name}", "", "```text", call, "```", "", text])


class _Annotation(str):
    """An annotation, which a signature shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _text(docstring: str) -> str:
    """Return a docstring as Markdown: its sections as lists."""
    lines: list[str] = []
    is_listed = False
    docstring = _DOCTEST.sub(r"```python\n\g<0>\n```", docstring)
    for line in _ROLE.sub(r"`\1`", docstring).replace("``", "`").splitlines():
        text = line.strip()
        if line in ("Args:", "Returns:", "Raises:", "Attributes:", "Yields:"):
            is_listed = line not in ("Returns:", "Yields:")
            lines += [f"**{line}**", ""]
        elif is_listed and (item := _ITEM.match(line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif is_listed and line.startswith("     "):
            lines.append(f"  {text}")
        else:
            is_listed = is_listed and (not text or line.startswith(" "))
            lines.append(text)
    return "\n".join(lines)


def _environment() -> str:
    rows = [
        f"| `{v.name}` | {f'`{v.file_key}`' if v.in_file else '-'} | {v.kind} | {v.default or '-'} "
        f"| {v.doc} |"
        for v in VARIABLES
    ]
    header = ["| variable | key of the config file | type | default | meaning |"]
    return "\n".join([*header, "|---|---|---|---|---|", *rows])


def _traits() -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in TRAITS.items()]
    return "\n".join(["| trait | promise |", "|---|---|", *rows])


def _checks() -> str:
    rows = [f"| `{name}` | {check.promise} |" for name, check in CHECKS.items()]
    return "\n".join(["| check | guarantees |", "|---|---|", *rows])


def _platform_checks() -> str:
    rows = [f"| `{name}` | {check.promise} |" for name, check in PLATFORM_CHECKS.items()]
    return "\n".join(["| check | guarantees |", "|---|---|", *rows])


def _certificate() -> str:
    return verified(json.loads(lzma.decompress(_CERTIFICATE.read_bytes())))


def verified(issued: dict[str, Any]) -> str:
    """Return what a certificate says of the implementations that are registered now."""
    found = {(result["op"], result["provider"]): result for result in issued["results"]}
    registered = subjects()
    providers = list(dict.fromkeys(subject.impl.base for subject in registered))
    cells: dict[str, dict[str, str]] = {}
    for subject in registered:
        said = _said(subject, found.get((subject.op.name, subject.provider)))
        base = subject.impl.base
        # A row of its own for each value of a tunable parameter.
        row = f"`{subject.op.name}`{subject.provider.removeprefix(base)}"
        cells.setdefault(row, {})[base] = said
    rows = [
        f"| {op} | {' | '.join(row.get(provider, '') for provider in providers)} |"
        for op, row in cells.items()
    ]
    header = f"| op | {' | '.join(f'`{provider}`' for provider in providers)} |"
    return "\n".join([_conditions(issued), "", header, "|---|" + "--:|" * len(providers), *rows])


def _said(subject: Subject, result: dict[str, Any] | None) -> str:
    """Return the cell of an implementation: a certificate of other sources says nothing of it."""
    if result is None:
        return "not yet verified"
    digests = subject.impl.uuid(), subject.op.impls["native"].uuid()
    if (result["source"], result["definition"]) != digests:
        return f"{result['status']}, changed since"
    if result["status"] != "passed":
        return f"**{result['status']}**"
    return f"{sum(check['cases'] for check in result['checks']):,}"


def _adapters() -> str:
    """Return a row for each kernel of other packages that make verify-adapters has verified."""
    header = "| provider | op | package | dtypes | checks | cases | result | where | date |"
    rows = [
        f"| `{row['provider']}` | `{row['op']}` | `{row['package']}` {row['version']} "
        f"| {', '.join(row['dtypes'])} | {len(row['checks'])} | {sum(row['checks'].values()):,} "
        f"| {row['status']} | {row['where']} | {row['date']} |"
        for row in json.loads(_ADAPTERS.read_text(encoding="utf-8"))
    ]
    return "\n".join([header, "|---|---|---|---|--:|--:|---|---|---|", *rows])


def _conditions(issued: dict[str, Any]) -> str:
    versions, machine = issued["versions"], issued["machine"]
    counts = ", ".join(f"{count} {status}" for status, count in issued["summary"].items() if count)
    return (
        f"{counts}. opweave {versions['opweave']}, "
        f"torch {versions['torch']}, Python {versions['python']}, {machine['system']} on "
        f"{machine['architecture']} ({machine['isa']}), seed {issued['seed']}."
    )


def _platform() -> str:
    rows = [f"| {_member(name)} | {_meaning(Platform, name)} |" for name in members(Platform)]
    return "\n".join(["| member | meaning |", "|---|---|", *rows])


def _request_fields() -> str:
    """Return a heading and the table of the fields of each endpoint, under its first path."""
    endpoints = request_fields()
    return "\n\n".join(
        "\n".join([f"## {path}", "", "| field | status | meaning |", "|---|---|---|", *_rows(rows)])
        for path, rows in endpoints.items()
        if f"/v1{path}" not in endpoints
    )


def _rows(rows: dict[str, FieldRow]) -> list[str]:
    return [f"| `{path}` | {_status(row)} | {row.note} |" for path, row in rows.items()]


def _status(row: FieldRow) -> str:
    off = ", ".join(f"`{json.dumps(value)}`" for value in row.off)
    return f"{row.status}, unless {off}" if off else row.status


def _member(name: str) -> str:
    value = getattr(Platform, name, None)
    if not inspect.isfunction(value):
        return f"`{name}`"
    parameters = list(inspect.signature(value).parameters.values())[1:]
    bare = [str(p.replace(annotation=p.empty)) for p in parameters]
    return f"`{name}({', '.join(bare)})`"


def _capabilities() -> str:
    rows = [f"| `{f.name}` | {_meaning(Capabilities, f.name)} |" for f in fields(Capabilities)]
    return "\n".join(["| capability | the device |", "|---|---|", *rows])


def _meaning(owner: type, name: str) -> str:
    """Return what the docstring of a class says of a member: of an attribute, all."""
    value = getattr(owner, name, None)
    if inspect.isfunction(value):
        text = (inspect.getdoc(value) or "").partition("\n\n")[0]
    else:
        found = re.search(
            rf"^ +{name}: (.*?)(?=^ +\w+: |^\S|\Z)", inspect.getdoc(owner) or "", re.M | re.S
        )
        text = found[1] if found else ""
    return " ".join(_ROLE.sub(r"`\1`", text).replace("``", "`").split())


_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_DOCTEST = re.compile(r"^>>> .*(?:\n\S.*)*", re.MULTILINE)
_MAX_WIDTH = 90  # of a signature on one line
_ITEM = re.compile(r"^    ([\w*, ]+): (.*)")
_CERTIFICATE = DOCS / "reference" / "certificate.json.xz"
_ADAPTERS = DOCS / "reference" / "adapters.json"
PARTS = {
    "adapters": _adapters,
    "ops": _ops,
    "rules": _rules,
    "environment": _environment,
    "traits": _traits,
    "platform": _platform,
    "request fields": _request_fields,
    "capabilities": _capabilities,
    "checks": _checks,
    "platform checks": _platform_checks,
}

if __name__ == "__main__":
    main()
