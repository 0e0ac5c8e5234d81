"""Each thing has only one name, and words that were replaced don't come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("api", "bench", "examples", "infra", "models", "shared", "workers")
FOLDERS = (*PRODUCT, "docs", "tests")
HERE = Path(__file__).relative_to(ROOT)

GIVEN_UP = {
    r"\blanes?\b|Lane[A-Z]|_lanes?_": "priority",
    r"\b[pP]ictures?\b": "image",
    r"\bis_promised\b": "counts_toward_slo",
    r"\binnocents?\b": "tolerated crashes, other items",
    r"\boutlook\b": "wait estimate",
    r"\bsalvage": "lenient decode",
    r"\bTextModel\(|\bTextTask\b|\b_Text\b|models[./]text\b": "generation",
    r"\b(gives?|gave) (away )?(its|their) places? (away|to)": "is preempted",
    r"\btake_joining\b|\byield_places\b|\bJoining[A-Z]": "admit, preempt",
    r"\b([Mm]odels?|[Cc]lass(es)?) of one's own\b": "custom model, custom class",
    r"\b[A-Z]\w*Turns\b": "Permits, for what is held; rounds of a queue are turns",
    r"\b(Queue|Report)Place\b": "QueuePosition, ReportDataset",
    r"\b(MOST|LEAST|LONGEST|SHORTEST)_[A-Z]": "MAX_, MIN_",
}
"""Patterns for retired words, and their replacements."""

ELSEWHERE = re.compile(
    r"""(?i:x[-_]penstock[-_]lane) | ["`/ ,]lane["`,\\] | attributes\.lane | labels\.lane
    | \{\{lane\}\} | [,{ ]lane[!]?= | slot\|lane | batch_lane_share | \(model,\ lane\) | s,lane$
    | \?lane!= | "lane\ =
    | "a\ picture\ of | console-picture | penstock_api_pictures | (?i:picture_(processes|budget))
    """,
    re.VERBOSE | re.MULTILINE,
)
"""Names in messages, metrics, and settings, which must stay, and captions that a model knows."""

EMPTY_NAMES = {"found", "given", "made", "what", "whose"}
"""Names that show that there is a value, but not which one."""


@cache
def pages(*folders: str) -> list[Path]:
    return sorted(
        path.relative_to(ROOT)
        for folder in folders
        for kind in ("*.py", "*.md")
        for path in (ROOT / folder).rglob(kind)
        if "swagger-ui-dist" not in path.parts and path.relative_to(ROOT) != HERE
    )


@pytest.mark.parametrize("word", GIVEN_UP)
def test_words_that_were_given_up_do_not_come_back(word: str) -> None:
    pattern = re.compile(word)
    again = [
        f"{page}:{number}: say {GIVEN_UP[word]}: {line.strip()}"
        for page in pages(*FOLDERS)
        if pattern.search(_own_words(page))
        for number, line in enumerate(_own_words(page).splitlines(), 1)
        if pattern.search(line)
    ]
    assert again == []


@cache
def _own_words(page: Path) -> str:
    return ELSEWHERE.sub("", (ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", PRODUCT)
def test_names_of_locals_say_what_they_hold(folder: str) -> None:
    empty = [
        f"{page}:{line}: {name}"
        for page in pages(folder)
        if page.suffix == ".py"
        for name, line in _locals(ast.parse((ROOT / page).read_text(encoding="utf-8")))
        if name in EMPTY_NAMES
    ]
    assert empty == []


def _locals(module: ast.Module) -> Iterator[tuple[str, int]]:
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.arg):
                yield node.arg, node.lineno
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, node.lineno
