"""Prints rows of values as an aligned text table; for reports and the demo."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

INDENT = "  "
SIGNIFICANT = 10
"""Digits of a number; what a sum of doubles is surely right to."""


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The rows below their heads. Columns of numbers are aligned to the right, and None is shown as `-`.

    Numbers of a column are whole if all of them are. Otherwise they have two decimals or more.
    """
    columns = [_column(column) for column in zip(*rows, strict=True)]
    cells = list(zip(*columns, strict=True))
    lines: list[Sequence[str]] = [heads, *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    is_left = [any(_is_word(cell[column]) for cell in cells) or not cells for column in range(len(heads))]
    return "\n".join(_line(line, widths, is_left) for line in lines)


def transposed(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The rows side by side, one line for each head: for few rows with many values."""
    lines = [[head, *_column([row[column] for row in rows])] for column, head in enumerate(heads)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(rows) + 1)]
    return "\n".join(_line(line, widths, [True] + [False] * len(rows)) for line in lines)


def _column(values: Sequence[object]) -> list[str]:
    least = 0 if all(value.is_integer() for value in values if isinstance(value, float)) else 2
    return [_shown(value, least) for value in values]


def _shown(value: object, least_decimals: int) -> str:
    if value is None:
        return "-"
    return _decimal(value, least_decimals) if isinstance(value, float) else str(value)


def _decimal(value: float, least: int) -> str:
    """With `least` decimals, and as many more as ten significant digits need: fractions of a cent are money too."""
    if not math.isfinite(value):
        return str(value)
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    whole, _, decimals = f"{value:.{max(least, SIGNIFICANT - 1 - magnitude)}f}".partition(".")
    decimals = decimals.rstrip("0").ljust(least, "0")
    return f"{whole}.{decimals}" if decimals else whole


def _is_word(cell: str) -> bool:
    return not cell.lstrip("-").replace(".", "", 1).isdigit() and cell != "-"


def _line(cells: Sequence[str], widths: Sequence[int], is_left: Sequence[bool]) -> str:
    placed = [
        cell.ljust(width) if left else cell.rjust(width)
        for cell, width, left in zip(cells, widths, is_left, strict=True)
    ]
    return (INDENT + "  ".join(placed)).rstrip()
