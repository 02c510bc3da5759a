"""Check the prose and the names of the repository: phrases, page length, class names, subjects.

    python tests/runs/writing.py [FILE...]           check these files, or everything
    python tests/runs/writing.py --commit-message FILE

Prose is the text of Markdown pages outside code blocks, and the docstrings, comments and string
literals of Python sources. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

PHRASES = {
    r"(?<![Tt]here\s)\b(?:is|are|was|were|be|been)\s+no\s+(?!longer\b|more\b|less\b|\w+er\s+than)":
        "negate the verb: 'is not a ...', 'does not have ...'",
    r"\b(?:is|are|was|were|be)\s+none\b": "say what is missing",
    r"\b[Ww]hatever\b": "use 'regardless of', 'any' or the noun",
    r"\b[Bb]eside\b": "use 'next to', 'besides' or 'in addition to'",
    # These are not in codespell's dictionary.
    r"(?i)(?:quant|material|memo|token|functional|normal)is(?:e[ds]?|ing|ations?)\b":
        "use American spelling: '-ize'",
    r"\b[Aa]new\b": "use 'again'",
    r"\bwhat\s+is\s+(?:not|there|told|no)\b": "name the noun",
    r"\b(?:is|are|was|were)\s+told\s+(?:by|from|of|at|in)\b": "name the subject: 'X says'",
    r"\bwhich\s+others\s+use\b": "use 'shared', 'busy' or 'noisy'",
    r"\bcores\s+that\s+others\b": "use 'a shared host'",
    r"\blinear\s+maps?\b": "use 'linear layer'",
    r"(?:\A|(?<=[.!:] )|(?<=\n\n)|(?<=[-*#|] ))What (?![^.|\n]*\?)":
        "do not begin a sentence with 'What': name the noun",
}  # fmt: skip
BANNED = [(re.compile(pattern), hint) for pattern, hint in PHRASES.items()]

# Their inputs are such phrases.
NEVER_CHECKED = (
    "packages/opweave-engine/tests/engine/test_chat_messages.py",
    "tests/runs/writing.py",
    "tests/test_writing.py",
)

SUFFIXES = (".md", ".py", ".cpp", ".h")
# Of pages to read from beginning to end; tables of results and notes may be longer.
LENGTH_CHECKED = ("README.md", "docs/", "examples/")
MAX_WORDS = 900
MAX_SENTENCE = 40  # words
LONG_PAGES: dict[str, str] = {
    # page: why it is longer than MAX_WORDS
    "docs/design/acceptance.md": "a table with one row per requirement, read by searching"
}
# It repeats vLLM's names on purpose.
OTHER_NAMESPACES = ("opweave-vllm/src/opweave_vllm/vllm_api",)

MAX_SUBJECT = 72
SUBJECT = re.compile(
    r"(?:[a-z][a-z0-9_.-]*(?:, [a-z][a-z0-9_.-]*)*: .*\S|(?:fixup|squash)! .*|(?:Merge|Revert) .*)"
)

# Written by docs/generated.py from docstrings, which are checked in the sources.
_GENERATED = re.compile(r"^<!-- [a-z ]+ -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\([^)\s]*\)")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n|:\n|\n\s*[-*] |\n\s*\d+\. ")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--commit-message", type=Path)
    options = parser.parse_args(arguments)
    if options.commit_message:
        findings = subject_findings(options.commit_message.read_text(encoding="utf-8"))
    elif options.files:
        files = [file.resolve() for file in options.files]
        findings = [found for file in files for found in file_findings(file)]
    else:
        findings = repository_findings()
    for finding in findings:
        print(finding)
    return bool(findings)


def repository_findings() -> list[str]:
    """Return the findings in every file, and in the lists of this program."""
    findings = [finding for file in _files() for finding in file_findings(file)]
    findings += class_findings(ROOT / "packages")
    unused = [page for page in LONG_PAGES if not (ROOT / page).exists()]
    return findings + [f"{page} does not exist: remove it from LONG_PAGES" for page in unused]


def file_findings(file: Path) -> list[str]:
    """Return the findings in one file."""
    name = file.relative_to(ROOT).as_posix()
    if name in NEVER_CHECKED:
        return []
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        findings = page_findings(text, name)
    elif file.suffix == ".py":
        findings = source_findings(_prose_of_python(text))
    else:
        findings = source_findings(_prose_of_cpp(text))
    return [f"{name}:{finding}" for finding in findings]


def page_findings(text: str, name: str) -> list[str]:
    """Return the findings in a Markdown page: phrases, long sentences and length."""
    prose = prose_of_page(text)
    findings = [f"{line}: {found}" for line, found in phrase_findings(prose)]
    if name.startswith(LENGTH_CHECKED):
        findings += length_findings(prose, name)
    return findings


def length_findings(prose: str, name: str) -> list[str]:
    """Return the long sentences of a page, and its length if it is too long."""
    findings = []
    start = 0
    for end in [*_SENTENCE_END.finditer(prose), None]:
        sentence = prose[start : end.start() if end else len(prose)]
        words = len(re.findall(r"\w+", sentence))
        if words > MAX_SENTENCE and "|" not in sentence and ":::" not in sentence:
            line = 1 + prose[:start].count("\n") + len(sentence) - len(sentence.lstrip("\n"))
            findings.append(f"{line}: a sentence of {words} words (at most {MAX_SENTENCE})")
        start = end.end() if end else start
    words = len([word for word in prose.split() if re.search(r"\w", word)])
    if words > MAX_WORDS and name not in LONG_PAGES:
        findings.append(f"1: {words} words (at most {MAX_WORDS}); split the page")
    if words <= MAX_WORDS and name in LONG_PAGES:
        findings.append(f"1: {words} words, remove the page from LONG_PAGES")
    return findings


def source_findings(prose_by_line: Iterable[tuple[int, str]]) -> list[str]:
    """Return the phrases in the docstrings, comments and string literals of a source file."""
    findings = []
    for line, prose in prose_by_line:
        findings += [(line + offset - 1, found) for offset, found in phrase_findings(prose)]
    return [f"{line}: {found}" for line, found in sorted(set(findings))]


def phrase_findings(prose: str) -> list[tuple[int, str]]:
    """Return the line and the description of every banned phrase in *prose*."""
    return [
        (1 + prose[: found.start()].count("\n"), f"{' '.join(found[0].split())!r}: {hint}")
        for pattern, hint in BANNED
        for found in pattern.finditer(prose)
    ]


def prose_of_page(text: str) -> str:
    """Blank code blocks, comments, inline code and link targets, and keep every line break."""
    text = _GENERATED.sub(lambda part: "\n" * part[0].count("\n"), text)
    text = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    text = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
    return _LINK.sub("]", _CODE.sub("`x`", text))


def _prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each comment and string literal."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, _CODE.sub("`x`", node.value)


def _prose_of_cpp(text: str) -> Iterator[tuple[int, str]]:
    """Yield the same for C++: runs of ``//`` comments, and string literals."""
    for found in re.finditer(r"(?:^ *//.*\n)+|//.*|\"(?:[^\"\\\n]|\\.)*\"", text, re.MULTILINE):
        prose = re.sub(r"^ *// ?", "", found[0], flags=re.MULTILINE)
        yield 1 + text[: found.start()].count("\n"), prose


def class_findings(folder: Path) -> list[str]:
    """Return the class names that more than one module of the packages defines."""
    places: dict[str, list[str]] = {}
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder).as_posix()
        if path.startswith(OTHER_NAMESPACES) or "/tests/" in path:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                place = f"{path}:{node.lineno}"
                places.setdefault(node.name, []).append(place)
    return [
        f"class {name} is defined {len(found)} times: {', '.join(found)}"
        for name, found in places.items()
        if len(found) > 1
    ]


def subject_findings(message: str) -> list[str]:
    """Return what is wrong with the subject of a commit message."""
    subject = message.partition("\n")[0]
    findings = []
    if len(subject) > MAX_SUBJECT:
        findings.append(f"subject has {len(subject)} characters (at most {MAX_SUBJECT}): {subject}")
    if not SUBJECT.fullmatch(subject):
        findings.append(f"subject does not begin with a part, such as 'engine: ': {subject}")
    return findings


def _files() -> Iterator[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.splitlines():
        if name.endswith(SUFFIXES) and (ROOT / name).is_file():
            yield ROOT / name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
