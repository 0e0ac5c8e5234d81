"""What came of each variant, and the table that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.models.artifact import Variant


@dataclass(frozen=True)
class Verdict:
    """A variant that was tried, with its figures as the table shows them, by column; `refusal` is empty if accepted."""

    variant: Variant
    figures: dict[str, str] = field(default_factory=dict)
    refusal: str = ""

    @property
    def is_accepted(self) -> bool:
        """Whether workers may use it."""
        return not self.refusal


@dataclass(frozen=True)
class Made:
    """All that was tried of a model; `original` has the figures of what it was judged by, the first is its name."""

    verdicts: list[Verdict]
    original: dict[str, str]


def verdict_table(made: Made) -> str:
    """The original and every variant, one a line with its fate at the end, and the notes below."""
    verdicts, columns = made.verdicts, list(made.original)
    rows = [list(made.original.values())]
    for verdict in verdicts:
        rows.append([verdict.variant.name] + [verdict.figures.get(column, "") for column in columns[1:]])
    ends = [""] + ["accepted" if verdict.is_accepted else f"refused: {verdict.refusal}" for verdict in verdicts]
    widths = [max(len(row[at]) for row in [columns, *rows]) for at in range(len(columns))]
    lines = [_line(columns, widths, "")] + [_line(row, widths, end) for row, end in zip(rows, ends, strict=True)]
    notes = [f"  {verdict.variant.name}: {verdict.variant.note}" for verdict in verdicts if verdict.variant.note]
    return "\n".join(lines + notes)


def _line(cells: Sequence[str], widths: Sequence[int], end: str) -> str:
    first, *others = (
        cell.ljust(width) if at == 0 else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *others, end]).rstrip()
