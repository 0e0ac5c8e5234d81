"""The reports: GoogleSQL files, whose heads say what each shows, to whom, and in which columns.

A head is the comment at the top of a file of `queries`:

    -- What each tenant used of each model, per day.      the title
    -- owner: product                                     who answers for it
    -- audience: tenants                                  or operators: who may see it
    -- without: tz                                        standard parameters that it does not have
    -- days: 42                                           how far it looks back if nothing is said
    -- @target FLOAT64 = 0.99: what it is                 a parameter of its own
    -- plot: bars cost_usd by day, one color per model    how it is drawn
    -- column day: what it is                             each column, in order

Further lines are notes. Every report has the parameters of `shared.reports.question` but those that
it names after `without`. Tenants see a report for `tenants` with their own rows only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, TypeAlias, cast, get_args

from shared.errors import BadInput

Owner: TypeAlias = Literal["finance", "product", "operations"]
Audience: TypeAlias = Literal["tenants", "operators"]
PlotKind: TypeAlias = Literal["bars", "lines", "heat"]
DEFAULT_DAYS = 7
_PARAMETER = re.compile(r"@(\w+) ([A-Z0-9<>]+)(?: = (\S+?))?: (.+)")
_PLOT = re.compile(r"(\w+) ([\w, ]+?) by (\w+)(?: and (\w+)|, one color per (\w+))?")


@dataclass(frozen=True)
class Parameter:
    """A parameter that only this report has."""

    name: str
    type: str
    """Its GoogleSQL type."""
    default: float | None
    """None: the caller that runs the report passes it."""
    about: str


@dataclass(frozen=True)
class Plot:
    """A plot of some columns of a report."""

    kind: PlotKind
    values: tuple[str, ...]
    """The columns that are drawn."""
    by: str
    """The column along the horizontal axis."""
    color: str = ""
    """The column with one color per value; of a heat map the one along the vertical axis."""


@dataclass(frozen=True)
class Report:
    """A query about usage. `title` says what it shows."""

    name: str
    title: str
    owner: Owner
    audience: Audience
    sql: str
    columns: Mapping[str, str]
    """The description of each column, in order."""
    parameters: tuple[Parameter, ...]
    """Its own ones."""
    without: frozenset[str]
    """Standard parameters that it does not have: tenants, models or tz."""
    plots: tuple[Plot, ...]
    notes: str
    days: int
    """The number of days that it looks back by default."""


@cache
def reports() -> Mapping[str, Report]:
    """All reports, by their names."""
    folder = resources.files("shared.reports").joinpath("queries")
    files = sorted((file for file in folder.iterdir()), key=lambda file: file.name)
    return {
        name: parse_report(name, file.read_text(encoding="utf-8"))
        for file in files
        if (name := file.name.removesuffix(".sql")) != file.name
    }


def find_report(name: str) -> Report:
    """The report of that name.

    Raises:
        BadInput: there is no such report.
    """
    report = reports().get(name)
    if report is None:
        raise BadInput(
            f"no report {name[:80]!r}; there are: {', '.join(reports())}", field="report"
        )
    return report


def parse_report(name: str, sql: str) -> Report:
    """Reads the head of a file.

    Raises:
        ValueError: the head is not as the module says. This is a bug of the file.
    """
    head = _head(sql)
    facts: dict[str, str] = {}
    columns: dict[str, str] = {}
    parameters, plots, notes = [], [], []
    for line in head[1:]:
        key, _, text = line.partition(": ")
        if key.startswith("column "):
            columns[key.removeprefix("column ")] = text
        elif key.startswith("@"):
            parameters.append(_parameter(name, line))
        elif key == "plot":
            plots.append(_plot(name, text))
        elif key in ("owner", "audience", "without", "days"):
            facts[key] = text
        else:
            notes.append(line)
    owner, audience = facts.get("owner"), facts.get("audience")
    if owner not in get_args(Owner) or audience not in get_args(Audience) or not columns:
        raise ValueError(f"{name}.sql: its head needs owner, audience and columns; this is a bug")
    return Report(
        name=name,
        title=head[0],
        owner=cast(Owner, owner),
        audience=cast(Audience, audience),
        sql=sql,
        columns=columns,
        parameters=tuple(parameters),
        without=frozenset(facts["without"].split(", ")) if "without" in facts else frozenset(),
        plots=tuple(plots),
        notes=" ".join(notes),
        days=int(facts.get("days", DEFAULT_DAYS)),
    )


def _head(sql: str) -> list[str]:
    lines = []
    for line in sql.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return lines


def _parameter(name: str, line: str) -> Parameter:
    match = _PARAMETER.fullmatch(line)
    if match is None:
        raise ValueError(f"{name}.sql: {line!r} is not a parameter; this is a bug")
    parameter, kind, default, about = match.groups()
    return Parameter(parameter, kind, None if default is None else float(default), about)


def _plot(name: str, text: str) -> Plot:
    match = _PLOT.fullmatch(text)
    if match is None or match[1] not in get_args(PlotKind):
        raise ValueError(f"{name}.sql: {text!r} is not a plot; this is a bug")
    kind, values, by, rows, color = match.groups()
    return Plot(cast(PlotKind, kind), tuple(values.split(", ")), by, rows or color or "")
