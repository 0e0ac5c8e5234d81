"""The plots of a report as series of numbers, for the page and for the console."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shared.reports.definitions import Plot, PlotKind
from shared.reports.runner import ReportResult

MAX_SERIES = 8
"""Colors that can be distinguished. The smallest series are drawn together."""
MAX_BARS = 24
"""Names along an axis that can be read. The smallest ones are drawn together."""
OTHERS = "others"
_WEEKDAYS = ("", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_UNITS = {"_usd": "US dollars", "_percent": "%", "_ms": "ms", "_s": "s"}
_NOT_ADDED = ("_percent", "_ms", "_mean", "_burn", "_max")
"""Endings of columns whose sum means nothing."""


_Cells = dict[tuple[str, str], float | None]
"""Values by series and x."""


class PlotSeries(NamedTuple):
    """One line, or the bars of one color, or one row of a heat map."""

    name: str
    x: list[str]
    y: list[float | None]


class Drawing(NamedTuple):
    """A plot with its numbers."""

    kind: PlotKind
    title: str
    unit: str
    stacked: bool
    series: Sequence[PlotSeries]


def drawings(result: ReportResult) -> list[Drawing]:
    """The plots of a report. None if there are no rows."""
    if not result.rows:
        return []
    return [_drawing(result, plot) for plot in result.report.plots]


def _drawing(result: ReportResult, plot: Plot) -> Drawing:
    cells = _cells(result, plot)
    is_added = len(plot.values) == 1 and not plot.values[0].endswith(_NOT_ADDED)
    if plot.kind != "heat":
        if is_added:
            cells = _fewest_colors(cells)
        if plot.by in ("tenant", "model", "error_code") and is_added:
            cells = _fewest_bars(cells)
    x_values = list(dict.fromkeys(x for _, x in cells))
    if plot.by in ("day", "hour"):
        x_values.sort(key=lambda x: (len(x), x) if plot.kind == "heat" else (0, x))
    series = [
        PlotSeries(name, x_values, [cells.get((name, x)) for x in x_values])
        for name in _names(cells, plot)
    ]
    words = ", ".join(_words(value) for value in plot.values)
    title = f"{words[0].upper()}{words[1:]} by {_words(plot.by)}"
    return Drawing(plot.kind, title, _unit(plot.values[0]), is_added, series)


def _cells(result: ReportResult, plot: Plot) -> _Cells:
    """The values by series and x. Those of one x are added up."""
    cells: _Cells = {}
    for record in result.records():
        x = _label(record[plot.by])
        for value in plot.values:
            name = _words(value)
            if plot.color:
                name = _label(record[plot.color], is_weekday=plot.color == "weekday")
            number = record[value]
            if number is not None:
                cells[name, x] = (cells.get((name, x)) or 0.0) + float(number)
            else:
                cells.setdefault((name, x), None)
    return cells


def _fewest_colors(
    cells: _Cells,
) -> _Cells:
    kept = _largest(((name, value) for (name, _), value in cells.items()), MAX_SERIES)
    return _added(
        ((name if name in kept else OTHERS, x), value) for (name, x), value in cells.items()
    )


def _fewest_bars(cells: _Cells) -> _Cells:
    kept = _largest(((x, value) for (_, x), value in cells.items()), MAX_BARS)
    return _added(((name, x if x in kept else OTHERS), value) for (name, x), value in cells.items())


def _largest(values: Iterable[tuple[str, float | None]], most: int) -> set[str]:
    sums: dict[str, float] = defaultdict(float)
    for name, value in values:
        sums[name] += value or 0.0
    ordered = sorted(sums, key=lambda name: -sums[name])
    return set(ordered if len(ordered) <= most else ordered[: most - 1])


def _added(
    values: Iterable[tuple[tuple[str, str], float | None]],
) -> _Cells:
    cells: _Cells = {}
    for key, value in values:
        cells[key] = (cells.get(key) or 0.0) + (value or 0.0)
    return cells


def _names(cells: _Cells, plot: Plot) -> list[str]:
    names = list(dict.fromkeys(name for name, _ in cells))
    if plot.color == "weekday":
        return sorted(names, key=_WEEKDAYS.index)
    return names


def _label(value: Any, *, is_weekday: bool = False) -> str:
    if is_weekday:
        return _WEEKDAYS[int(value)]
    if value is None or value == "":
        return "(none)"
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def _words(column: str) -> str:
    for ending in _UNITS:
        column = column.removesuffix(ending)
    return column.replace("_", " ").replace("gpu", "GPU").replace("slo", "SLO")


def _unit(column: str) -> str:
    return next((unit for ending, unit in _UNITS.items() if column.endswith(ending)), "")
