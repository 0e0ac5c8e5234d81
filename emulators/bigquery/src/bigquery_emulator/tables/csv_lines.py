"""Splits a CSV file's lines into cells, noting which cells were quoted.

Python's reader does not report quotes, but an empty cell is NULL or an empty string depending on
whether it is quoted. Source: https://cloud.google.com/bigquery/docs/loading-data-cloud-storage-csv
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

Cell = tuple[str, bool]
"""The text, and whether it was quoted."""
_LINE_ENDS = "\r\n"


class BadLineError(Exception):
    """A line is not valid CSV."""


@dataclass(frozen=True)
class CsvForm:
    """A file's format.

    Attributes:
        quote: character around cells. None: cells are never quoted.
        takes_newlines: True if a quoted cell may contain line breaks.
    """

    delimiter: str
    quote: str | None
    takes_newlines: bool


def csv_lines(text: TextIO, form: CsvForm) -> Iterator[tuple[int, list[Cell] | str]]:
    """Yields each row with the number of its last line, or the reason why the row is invalid.

    Args:
        text: the file, opened with `newline=""`.
    """
    reader = _Lines(text)
    for line in reader:
        if form.quote is None or form.quote not in line:
            bare = line.rstrip(_LINE_ENDS)
            yield (
                reader.number,
                [(cell, False) for cell in bare.split(form.delimiter)] if bare else [],
            )
            continue
        try:
            yield reader.number, _cells(line, reader, form, form.quote)
        except BadLineError as error:
            yield reader.number, str(error)


class _Lines:
    """Counts a file's lines."""

    def __init__(self, text: TextIO) -> None:
        self._lines = iter(text)
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        return line


def _cells(line: str, more: _Lines, form: CsvForm, quote: str) -> list[Cell]:
    cells: list[Cell] = []
    at = 0
    while True:
        is_quoted = line.startswith(quote, at)
        if is_quoted:
            cell, line, at = _read_quoted_cell(line, at + 1, more, form, quote)
        else:
            end = line.find(form.delimiter, at)
            end = len(line.rstrip(_LINE_ENDS)) if end < 0 else end
            cell, at = line[at:end], end
        cells.append((cell, is_quoted))
        if line.startswith(form.delimiter, at):
            at += 1
        elif line[at:].strip(_LINE_ENDS):
            raise BadLineError(f"Data between close quote character ({quote}) and field separator.")
        else:
            return cells


def _read_quoted_cell(
    line: str, at: int, more: _Lines, form: CsvForm, quote: str
) -> tuple[str, str, int]:
    """Returns a quoted cell, the line where it ends, and the position after it."""
    parts = []
    while True:
        end = line.find(quote, at)
        if end < 0:
            parts.append(line[at:])
            following = next(more, None) if form.takes_newlines else None
            if following is None:
                raise BadLineError(f"Missing close quote character ({quote}).")
            line, at = following, 0
        elif line.startswith(quote, end + 1):
            parts.append(line[at : end + 1])
            at = end + 2
        else:
            parts.append(line[at:end])
            return "".join(parts), line, end + 1
