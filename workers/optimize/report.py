"""The results for each variant, and the table that shows them."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from workers.models.artifact import Variant

UNBOUNDED = 10_000
"""Maximum number of columns in the table. Long lines are not wrapped, because programs read them
too.
"""


@dataclass(frozen=True)
class Verdict:
    """A variant that was tried, with its results by table column.

    `refusal` is empty if the variant was accepted.
    """

    variant: Variant
    figures: dict[str, str] = field(default_factory=dict)
    refusal: str = ""

    @property
    def is_accepted(self) -> bool:
        return not self.refusal


@dataclass(frozen=True)
class Made:
    """The results of everything tried for a model.

    `original` contains the reference's results, starting with its name.
    """

    verdicts: list[Verdict]
    original: dict[str, str]


def verdict_table(optimized: Made) -> str:
    """Formats the original and each variant, one per line with its verdict, and then the notes."""
    verdicts, columns = optimized.verdicts, list(optimized.original)
    rows = [list(optimized.original.values())]
    for verdict in verdicts:
        rows.append(
            [verdict.variant.name] + [verdict.figures.get(column, "") for column in columns[1:]]
        )
    ends = [""] + [
        "accepted" if verdict.is_accepted else f"refused: {verdict.refusal}" for verdict in verdicts
    ]
    made_table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for at, column in enumerate([*columns, ""]):
        is_left = at in (0, len(columns))
        made_table.add_column(Text(column), justify="left" if is_left else "right", no_wrap=True)
    for row, end in zip(rows, ends, strict=True):
        made_table.add_row(*map(Text, [*row, end]))
    notes = [
        f"  {verdict.variant.name}: {verdict.variant.note}"
        for verdict in verdicts
        if verdict.variant.note
    ]
    return "\n".join([_render(made_table), *notes])


def verdicts_as_dict(optimized: Made) -> dict[str, object]:
    """Returns the same data for a program: the original's results and all verdicts."""
    tried = [
        {
            "variant": verdict.variant.name,
            "accepted": verdict.is_accepted,
            "refusal": verdict.refusal,
            "relative_speed": verdict.variant.relative_speed,
            "figures": verdict.figures,
            "note": verdict.variant.note,
        }
        for verdict in optimized.verdicts
    ]
    return {"original": optimized.original, "made": tried}


def _render(table: Table) -> str:
    """Returns the table as text, with bold headers on a terminal."""
    is_terminal, buffer = sys.stdout.isatty(), io.StringIO()
    console = Console(
        file=buffer,
        width=UNBOUNDED,
        force_terminal=is_terminal,
        color_system="standard" if is_terminal else None,
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
