"""Prints rows of values as an aligned text table, for reports, plans and the demo."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

INDENT = "  "
SIGNIFICANT = 10
"""Digits of a number. A sum of doubles is exact to that many."""
UNBOUNDED = 10_000
"""Columns of a table. Long lines are not folded, because programs read them too."""


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The rows below their heads, which are bold on a terminal.

    Columns of numbers are aligned to the right, and None is shown as `-`. Numbers of a column are
    whole if all of them are. Otherwise they have two decimals or more.
    """
    columns = [_column(column) for column in zip(*rows, strict=True)] or [[] for _ in heads]
    table = _empty_table(has_heads=True)
    for head, column in zip(heads, columns, strict=True):
        is_left = not column or any(map(_is_word, column))
        table.add_column(Text(head), justify="left" if is_left else "right", no_wrap=True)
    for cells in zip(*columns, strict=True):
        table.add_row(*map(Text, cells))
    return _rendered(table)


def transposed(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The rows side by side, one line for each head: for few rows with many values."""
    table = _empty_table(has_heads=False)
    table.add_column(no_wrap=True, style="bold")
    for _ in rows:
        table.add_column(justify="right", no_wrap=True)
    for at, head in enumerate(heads):
        table.add_row(Text(head), *map(Text, _column([row[at] for row in rows])))
    return _rendered(table)


def _empty_table(*, has_heads: bool) -> Table:
    return Table(
        box=None, show_header=has_heads, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0)
    )


def _rendered(table: Table) -> str:
    is_terminal = sys.stdout.isatty()
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=UNBOUNDED,
        force_terminal=is_terminal,
        color_system="standard" if is_terminal else None,
    )
    console.print(table)
    return "\n".join((INDENT + line).rstrip() for line in buffer.getvalue().splitlines())


def _column(values: Sequence[object]) -> list[str]:
    least = 0 if all(value.is_integer() for value in values if isinstance(value, float)) else 2
    return [_shown(value, least) for value in values]


def _shown(value: object, least_decimals: int) -> str:
    if value is None:
        return "-"
    return _decimal(value, least_decimals) if isinstance(value, float) else str(value)


def _decimal(value: float, least: int) -> str:
    """Shows `least` decimals, or more up to ten significant digits, for fractions of a cent."""
    if not math.isfinite(value):
        return str(value)
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    whole, _, decimals = f"{value:.{max(least, SIGNIFICANT - 1 - magnitude)}f}".partition(".")
    decimals = decimals.rstrip("0").ljust(least, "0")
    return f"{whole}.{decimals}" if decimals else whole


def _is_word(cell: str) -> bool:
    digits = cell.lstrip("-").replace(",", "").replace(".", "", 1)
    return not digits.isdigit() and cell != "-"
