"""Names that are participles or pronouns (P14), and docstrings that only repeat a name (P15)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import TypeGuard

EMPTY_LOCALS = {"one", "asked", "shown", "left", "kept"}
IRREGULAR = re.compile(
    "begun|bought|bound|brought|built|chosen|done|drawn|found|given|gone|had|held|kept|known|left|lost|"
    "made|meant|met|paid|said|seen|sent|shown|sold|spent|taken|told|thrown|understood|won|written"
)
PRONOUNS = {
    "all",
    "another",
    "each",
    "it",
    "none",
    "one",
    "other",
    "others",
    "that",
    "this",
    "those",
    "whose",
}
VERBS_IN_ED = {
    "bleed",
    "breed",
    "embed",
    "exceed",
    "feed",
    "heed",
    "need",
    "proceed",
    "seed",
    "shed",
    "speed",
}
VALUES = {
    "property",
    "cached_property",
    "fixture",
    "overload",
    "validator",
    "strategy",
    "composite",
}
"""Decorators of functions whose names are nouns."""
MAX_DOCSTRING_WORDS = 5
MAX_ARGUMENT_WORDS = 4
FACT = re.compile(
    r"\d|\b(None|True|False|seconds?|ms|milliseconds?|minutes?|hours?|bytes|MiB|USD|UTC|URL|JSON|default|"
    r"optional|exclusive|inclusive|at (most|least)|or|per|if|shape|pixels|tokens|items)\b|`"
)
ARGUMENT_SECTIONS = {"Args:", "Attributes:"}
ARGUMENT = re.compile(r"^\s+\*{0,2}[\w.]+(?: \([^)]*\))?: (.*)$")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def participles_of(nodes: Sequence[ast.AST], *, is_test: bool) -> Iterator[tuple[int, str]]:
    """Yields the line and name of functions not named with verbs, and of locals in EMPTY_LOCALS."""
    for node in nodes:
        if isinstance(node, Function) and not is_test and _is_participle(node):
            yield node.lineno, node.name
        elif _is_stored(node) and node.id in EMPTY_LOCALS:
            yield node.lineno, node.id


def _is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _is_participle(function: Function) -> bool:
    if any(_decorator_name(node) in VALUES for node in function.decorator_list):
        return False
    first = function.name.strip("_").split("_")[0]
    is_past = first.endswith("ed") and first not in VERBS_IN_ED
    return is_past or bool(IRREGULAR.fullmatch(first)) or first in PRONOUNS


def _decorator_name(node: ast.expr) -> str:
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def empty_docstrings_of(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yields the line and text of docstrings and `Args:` lines that are short and state no fact."""
    for node in nodes:
        if not isinstance(node, Function | ast.ClassDef):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        line = node.body[0].lineno
        if isinstance(node, Function) and _is_empty(text, MAX_DOCSTRING_WORDS):
            yield line, text
        yield from _empty_arguments(line, text)


def _empty_arguments(line: int, docstring: str) -> Iterator[tuple[int, str]]:
    is_section = False
    for number, text in enumerate(docstring.splitlines(), line):
        is_section = text in ARGUMENT_SECTIONS or (is_section and text.startswith(" "))
        argument = ARGUMENT.match(text)
        if is_section and argument and _is_empty(argument[1], MAX_ARGUMENT_WORDS):
            yield number, text.strip()


def _is_empty(text: str, max_words: int) -> bool:
    return len(text.split()) <= max_words and not FACT.search(text)
