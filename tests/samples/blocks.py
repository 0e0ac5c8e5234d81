"""Reads the fenced blocks in README.md and docs."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)```(.*)$")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: path from the repository root.
        line: line number of the opening fence.
        language: the fence's tag; empty if there is none.
        text: the content without the fence's indentation.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def all_blocks() -> tuple[Block, ...]:
    """Returns the blocks on all pages, in page order."""
    return tuple(block for page in pages() for block in read_blocks(page))


def pages() -> list[Path]:
    """Returns README.md and the pages in docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def without_blocks(page: Path) -> str:
    """Returns a page's text without its fenced blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def read_blocks(page: Path) -> list[Block]:
    """Returns a page's blocks.

    Raises:
        ValueError: the last block has no closing fence.
    """
    name = str(page.relative_to(ROOT))
    blocks: list[Block] = []
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    for number, line in lines:
        if not (opening := _FENCE.match(line)):
            continue
        body: list[str] = []
        for _, inner in lines:
            if inner.strip() == "```":
                break
            body.append(inner)
        else:
            raise ValueError(f"{name}:{number}: the block has no closing fence")
        text = textwrap.dedent("\n".join(body)) + "\n"
        blocks.append(Block(name, number, opening[2].strip(), text))
    return blocks
