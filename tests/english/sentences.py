"""The sentences people read: docstrings, comments, messages in Python files, and Markdown."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from markdown_it import MarkdownIt

Kind: TypeAlias = Literal["docstring", "argument", "comment", "message", "docs", "heading"]
MIN_MESSAGE_WORDS = 4
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"'(])")
SECTION = re.compile(r"^\s*(Args|Attributes|Returns|Raises|Yields|Example|Examples):$")
ARGUMENT = re.compile(r"^\s+\*{0,2}[\w.]+(?: \([^)]*\))?: ")
CODE = re.compile(r"`[^`]*`")
PLACEHOLDER = "X"
PROSE = re.compile(r"[A-Za-z,.;:'() -]")
MIN_PROSE_SHARE = 0.85
NOT_PROSE = re.compile(r"^\s*(SELECT|WITH|INSERT|MERGE|CREATE|UPDATE|DELETE|<)|\\[dwsb]")
COMMENT = re.compile(r"(?:^|\s)#\s+(\S.*)$")
PRAGMA = re.compile(r"^(noqa|type:|pragma|ruff|mypy|!|shellcheck|pylint|fmt)")


@dataclass(frozen=True)
class Sentence:
    """One sentence, with code spans replaced by `X`, and the line where its paragraph starts."""

    line: int
    kind: Kind
    text: str


def markdown_sentences(text: str) -> Iterator[Sentence]:
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    line = 0
    for before, token in zip([None, *tokens], tokens, strict=False):
        line = token.map[0] + 1 if token.map else line
        if token.type != "inline":
            continue
        is_heading = before is not None and before.type in {"heading_open", "th_open"}
        words = "".join(_inline_text(child.type, child.content) for child in token.children or ())
        yield from _split(line, "heading" if is_heading else "docs", words)


def _inline_text(kind: str, content: str) -> str:
    return {"text": content, "code_inline": PLACEHOLDER, "softbreak": " ", "hardbreak": " "}.get(
        kind, ""
    )


def python_sentences(text: str, nodes: Sequence[ast.AST], *, is_test: bool) -> Iterator[Sentence]:
    """Yields a module's sentences.

    Args:
        nodes: all nodes in the module.
        is_test: True to leave out string literals, which are often data that a test sends.
    """
    strings = [node for node in nodes if _literal(node) is not None]
    docstrings = dict(_docstrings(nodes))
    for line, docstring in docstrings.items():
        for kind, offset, paragraph in _docstring_paragraphs(docstring):
            yield from _split(line + offset, kind, paragraph)
    yield from _comment_sentences(text, strings)
    if not is_test:
        yield from _message_sentences(nodes, strings, docstrings)


def _docstrings(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yields the line and text of docstrings, and of strings below an attribute."""
    for node in nodes:
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if (text := _bare_string(statement)) is not None:
                yield statement.lineno, text


def _bare_string(statement: object) -> str | None:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return None
    return statement.value.value if isinstance(statement.value.value, str) else None


def _docstring_paragraphs(text: str) -> Iterator[tuple[Kind, int, str]]:
    kind: Kind = "docstring"
    paragraph: list[str] = []
    start = 0
    for number, line in enumerate([*text.splitlines(), ""]):
        is_argument = ARGUMENT.match(line) and kind == "argument"
        if paragraph and (not line.strip() or is_argument or SECTION.match(line)):
            yield kind, start, " ".join(paragraph)
            paragraph = []
        if section := SECTION.match(line):
            kind = "argument" if section[1] in {"Args", "Attributes"} else "docstring"
        elif line.strip():
            start = start if paragraph else number
            paragraph.append((ARGUMENT.sub("", line) if is_argument else line).strip())


def _comment_sentences(text: str, strings: Sequence[ast.AST]) -> Iterator[Sentence]:
    quoted = {line for node in strings for line in range(node.lineno, node.end_lineno)}  # type: ignore[attr-defined]
    paragraph: list[str] = []
    start = last = 0
    for number, line in enumerate(text.splitlines(), 1):
        comment = COMMENT.search(line)
        if not comment or number in quoted or PRAGMA.match(comment[1]):
            continue
        if paragraph and number != last + 1:
            yield from _split(start, "comment", " ".join(paragraph))
            paragraph = []
        start = start if paragraph else number
        paragraph.append(comment[1])
        last = number
    yield from _split(start, "comment", " ".join(paragraph))


def _message_sentences(
    nodes: Sequence[ast.AST], strings: Sequence[ast.AST], docstrings: Mapping[int, str]
) -> Iterator[Sentence]:
    """Yields sentences in string literals that read as prose: errors, help, descriptions, logs."""
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in strings:
        text, line = _literal(node) or "", node.lineno  # type: ignore[attr-defined]
        if id(node) not in parts and docstrings.get(line) != text and _is_prose(text):
            yield from _split(line, "message", text)


def _literal(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else PLACEHOLDER
            for part in node.values
        )
    return None


def _is_prose(text: str) -> bool:
    words = [word for word in text.split() if re.fullmatch(r"[A-Za-z'(),.;:-]+", word)]
    share = len(PROSE.findall(text)) / max(1, len(text))
    return (
        len(words) >= MIN_MESSAGE_WORDS and share >= MIN_PROSE_SHARE and not NOT_PROSE.search(text)
    )


def _split(line: int, kind: Kind, paragraph: str) -> Iterator[Sentence]:
    paragraph = re.sub(r"\s+", " ", CODE.sub(PLACEHOLDER, paragraph)).strip()
    for text in SENTENCE_END.split(paragraph):
        if text:
            yield Sentence(line, kind, text)
