"""Prints rows as an aligned text table, for reports, plans, and the demo."""

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
"""Significant digits to show. A sum of doubles is exact to this many digits."""
UNBOUNDED = 10_000
"""Maximum width of a table. Long lines are not wrapped, because programs read them too."""


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns the rows below their headers, which are bold on a terminal.

    Numeric columns are right-aligned, and None is shown as `-`. A column is shown without decimals
    if all its numbers are whole; otherwise, it has two or more.
    """
    columns = [_column(column) for column in zip(*rows, strict=True)] or [[] for _ in heads]
    table = _empty_table(has_heads=True)
    for head, column in zip(heads, columns, strict=True):
        is_left = not column or any(map(_is_word, column))
        table.add_column(Text(head), justify="left" if is_left else "right", no_wrap=True)
    for cells in zip(*columns, strict=True):
        table.add_row(*map(Text, cells))
    return _render(table)


def format_transposed(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns the rows side by side, one line per header, for a few rows with many values."""
    table = _empty_table(has_heads=False)
    table.add_column(no_wrap=True, style="bold")
    for _ in rows:
        table.add_column(justify="right", no_wrap=True)
    for at, head in enumerate(heads):
        table.add_row(Text(head), *map(Text, _column([row[at] for row in rows])))
    return _render(table)


def _empty_table(*, has_heads: bool) -> Table:
    return Table(
        box=None, show_header=has_heads, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0)
    )


def _render(table: Table) -> str:
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
    return [_show_value(value, least) for value in values]


def _show_value(value: object, least_decimals: int) -> str:
    if value is None:
        return "-"
    return _decimal(value, least_decimals) if isinstance(value, float) else str(value)


def _decimal(value: float, least: int) -> str:
    """Formats with `least` decimals, or up to ten significant digits for fractions of a cent."""
    if not math.isfinite(value):
        return str(value)
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    whole, _, decimals = f"{value:.{max(least, SIGNIFICANT - 1 - magnitude)}f}".partition(".")
    decimals = decimals.rstrip("0").ljust(least, "0")
    return f"{whole}.{decimals}" if decimals else whole


def yes_or_no(value: object) -> object:
    """Returns a human-readable cell: a word for a boolean, and None for an empty string."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if value != "" else None


def _is_word(cell: str) -> bool:
    digits = cell.lstrip("-").replace(",", "").replace(".", "", 1)
    return not digits.isdigit() and cell != "-"
