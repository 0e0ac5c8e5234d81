"""The replies about reports: which there are, and what one says."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Cell = str | int | float | bool | None
"""Of a table. Days and moments are text in ISO 8601."""


class ReportEntry(msgspec.Struct, kw_only=True):
    """One report that this key may read."""

    object: Literal["report.entry"] = "report.entry"
    name: str
    title: str
    owner: Literal["finance", "product", "operations"]
    days: Annotated[int, msgspec.Meta(ge=1)]
    """How far it looks back if nothing is said."""
    filters: list[Literal["tenant", "model"]]
    """What its rows can be limited to."""


class ReportsReply(msgspec.Struct, kw_only=True):
    """The reports that this key may read."""

    object: Literal["list"] = "list"
    data: list[ReportEntry]


class ReportColumnReply(msgspec.Struct, kw_only=True):
    """A column of a report."""

    name: str
    type: str
    about: str


class ReportSeries(msgspec.Struct, kw_only=True):
    """One line of a plot, the bars of one color, or one row of a heat map."""

    name: str
    x: list[str]
    y: list[float | None]


class ReportPlot(msgspec.Struct, kw_only=True):
    """A plot of a report."""

    kind: Literal["bars", "lines", "heat"]
    title: str
    unit: str
    stacked: bool
    series: list[ReportSeries]


class ReportReply(msgspec.Struct, kw_only=True):
    """What a report says."""

    object: Literal["report"] = "report"
    name: str
    title: str
    owner: str
    notes: str
    since: str
    """The first moment, in ISO 8601."""
    until: str
    """The first moment that is too late."""
    tz: str
    columns: list[ReportColumnReply]
    rows: list[list[Cell]]
    plots: list[ReportPlot]
