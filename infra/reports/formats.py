"""Writes report results as a text table, CSV, JSON, Parquet, or HTML.

The HTML is one self-contained page of plots, each with a table. It works on screens of any width,
in dark mode, and on paper.
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, TypeGuard

from infra.text_table import table
from shared.errors import BadInput
from shared.money.amounts import amount, dollars, plain
from shared.reports.invoice import plain_cell
from shared.reports.parquet import report_parquet
from shared.reports.runner import USD_PER_TIB, Drawing, ReportResult, drawings

Formatted = Callable[[Sequence[ReportResult]], bytes]
CSV_PLACES = 12
"""Number of decimal places in a CSV amount. More than usual, because a program may add up many
amounts.
"""
MAX_LINES = 500
"""Maximum number of rows in a table. CSV and Parquet files contain all rows."""
LONG = 40
"""Maximum number of characters per line in a cell."""
PLOT_PX = 320
# Okabe and Ito's colors, which color-blind people can distinguish: https://jfly.uni-koeln.de/color/
COLORS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7"),
    *("#56b4e9", "#d55e00", "#b8a800", "#808080"),
)
_CONFIG = {"displaylogo": False, "responsive": True, "displayModeBar": False}


def as_text(results: Sequence[ReportResult]) -> bytes:
    parts = []
    for result in results:
        text = table(result.heads, _format_money(result)) if result.rows else _nothing(result)
        parts.append(text if len(results) == 1 else f"{result.report.title}\n\n{text}\n")
    return ("\n".join(parts) + "\n").encode()


def _format_money(result: ReportResult) -> list[list[object]]:
    """Returns the rows with formatted amounts of money."""
    return [
        [
            amount(value) if _is_money(value, head) else value
            for head, value in zip(result.heads, row, strict=True)
        ]
        for row in result.rows
    ]


def _is_money(value: object, head: str) -> TypeGuard[float]:
    is_named_so = head.endswith("_usd") or "_usd_" in head
    return is_named_so and isinstance(value, float) and math.isfinite(value)


def _nothing(result: ReportResult) -> str:
    since, until = result.question[:2]
    return f"no rows from {since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M} UTC"


def as_json(results: Sequence[ReportResult]) -> bytes:
    """Returns the rows as JSON objects. Several reports become one object, keyed by report name.

    Times and decimals, for which JSON has no type, are written as strings.
    """
    content: Any = {result.report.name: result.records() for result in results}
    if len(results) == 1:
        (content,) = content.values()
    return (json.dumps(content, indent=2, default=str) + "\n").encode()


def as_csv(results: Sequence[ReportResult]) -> bytes:
    """Returns one report as CSV (RFC 4180). NULL is an empty cell.

    Raises:
        BadInput: there are several reports.
    """
    result = _only(results, "csv")
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(result.heads)
    writer.writerows(map(_cell, result.heads, row) for row in result.rows)
    return file.getvalue().encode()


def _cell(head: str, value: object) -> object:
    if isinstance(value, str):
        return plain_cell(value)
    if _is_money(value, head):
        return plain(value, CSV_PLACES)
    return value.isoformat() if hasattr(value, "isoformat") else value


def as_parquet(results: Sequence[ReportResult]) -> bytes:
    """Returns one report as Parquet, with its column types.

    Raises:
        BadInput: there are several reports, or DuckDB, which writes the file, is not installed.
    """
    return report_parquet(_only(results, "parquet"))


def _only(results: Sequence[ReportResult], format_: str) -> ReportResult:
    if len(results) != 1:
        raise BadInput(
            f"format: {format_} requires a single report; specify its name", field="format"
        )
    return results[0]


FORMATS: Mapping[str, Formatted] = {
    "table": as_text,
    "csv": as_csv,
    "json": as_json,
    "parquet": as_parquet,
}
"""Writers, keyed by the value of --format."""


def as_html(results: Sequence[ReportResult]) -> bytes:
    """Returns the page. The page contains a copy of plotly.js, about 5 MB.

    Raises:
        BadInput: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise BadInput("format: html requires the `simulation` extra", field="format") from None
    style = resources.files("infra.reports").joinpath("page.css").read_text(encoding="utf-8")
    title = results[0].report.title if len(results) == 1 else "Usage reports"
    links = "".join(
        f'<li><a href="#{result.report.name}">{_escape(_name(result))}</a></li>'
        for result in results
    )
    sections = "".join(_section(result) for result in results)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_escape(title)}</title><style>{style}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>"
        f"<header><h1>{_escape(title)}</h1>{_about(results[0])}"
        f"{f'<nav aria-label=Reports><ul>{links}</ul></nav>' if len(results) > 1 else ''}</header>"
        f"<main>{sections}</main></body></html>\n"
    ).encode()


def _name(result: ReportResult) -> str:
    return result.report.name.replace("_", " ").capitalize()


def _about(result: ReportResult) -> str:
    question = result.question
    words = [f"Time zone {question.tz}"]
    for label, names in (("Tenants", question.tenants), ("Models", question.models)):
        words.append(f"{label}: {', '.join(names) if names else 'all'}")
    return f"<p>{_escape('. '.join(words))}.</p>"


def _section(result: ReportResult) -> str:
    report = result.report
    since, until = result.question[:2]
    plots = "".join(
        _plot(result, number, drawing) for number, drawing in enumerate(drawings(result))
    )
    usd = result.read_bytes / 1024**4 * USD_PER_TIB
    return (
        f'<section id="{report.name}"><h2>{_escape(_name(result))}</h2>'
        f"<p>{_escape(report.title)}</p>"
        f'<p class="meta">For {report.owner}. From {since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M}'
        f" UTC. Read {result.read_bytes / 1024**2:,.1f} MiB ({dollars(usd)} on demand).</p>"
        f'<div class="plots">{plots}</div>{_table(result)}{_legend(result)}</section>'
    )


def _plot(result: ReportResult, number: int, drawing: Drawing) -> str:
    from plotly.io import to_html

    chart = to_html(
        _figure(drawing),
        include_plotlyjs=False,
        full_html=False,
        config=_CONFIG,
        div_id=f"plot-{result.report.name}-{number}",
    )
    title = _escape(drawing.title)
    return (
        f'<figure role="group" aria-label="Plot: {title}. The table below has its numbers.">'
        f"<figcaption>{title}</figcaption>{chart}</figure>"
    )


def _traces(drawing: Drawing) -> list[Any]:
    import plotly.graph_objects as go

    series = drawing.series
    if drawing.kind == "heat":
        names, values = [points.name for points in series], [points.y for points in series]
        return [go.Heatmap(x=series[0].x, y=names, z=values, colorscale="Viridis")]
    if drawing.kind == "bars":
        return [
            go.Bar(x=_safe(points.x), y=points.y, name=_escape(points.name)) for points in series
        ]
    return [
        go.Scatter(x=_safe(points.x), y=points.y, name=_escape(points.name), mode="lines+markers")
        for points in series
    ]


def _figure(drawing: Drawing) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure(_traces(drawing))
    figure.update_layout(
        height=PLOT_PX,
        barmode="stack" if drawing.stacked else "group",
        colorway=COLORS,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        legend={"orientation": "h", "y": -0.25},
        showlegend=len(drawing.series) > 1 and drawing.kind != "heat",
        # Readable on both white and black, so the page can have either background.
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#808080"},
        hovermode="closest",
    )
    lines = {"gridcolor": "rgba(128,128,128,.3)", "automargin": True}
    figure.update_xaxes(**lines)
    figure.update_yaxes(title_text=drawing.unit, **lines)
    if drawing.kind == "heat":
        figure.update_yaxes(autorange="reversed")
        figure.update_xaxes(type="category")
    elif drawing.unit != "%":
        # On a linear axis, percentages near 100% would look the same.
        figure.update_yaxes(rangemode="tozero")
    if drawing.kind == "bars":
        figure.update_traces(marker_line_width=0)
    return figure


def _safe(labels: Sequence[str]) -> list[str]:
    # Plotly parses HTML tags in labels.
    return [_escape(label) for label in labels]


def _table(result: ReportResult) -> str:
    if not result.rows:
        return "<p>No rows.</p>"
    heads = "".join(f'<th scope="col">{_escape(head)}</th>' for head in result.heads)
    lines = []
    for row in result.rows[:MAX_LINES]:
        lines.append(f"<tr>{''.join(map(_td, result.heads, row))}</tr>")
    more = ""
    if len(result.rows) > MAX_LINES:
        more = f'<p class="meta">The first {MAX_LINES} of {len(result.rows):,} lines.</p>'
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{_escape(_name(result))}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>{more}"
    )


def _td(head: str, value: object) -> str:
    kind = ""
    if isinstance(value, int | float):
        kind = ' class="number"'
    elif isinstance(value, str) and len(value) > LONG:
        kind = ' class="long"'
    return f"<td{kind}>{_show_value(head, value)}</td>"


def _show_value(head: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if _is_money(value, head):
        return amount(value)
    if isinstance(value, float):
        return f"{value:,.6f}".rstrip("0").rstrip(".")
    return _escape(f"{value:%Y-%m-%d %H:%M:%S}" if hasattr(value, "hour") else str(value))


def _legend(result: ReportResult) -> str:
    entries = "".join(
        f"<dt>{_escape(name)}</dt><dd>{_escape(about)}</dd>"
        for name, about in result.report.columns.items()
    )
    notes = f"<p>{_escape(result.report.notes)}</p>" if result.report.notes else ""
    return f"<details><summary>What the columns mean</summary>{notes}<dl>{entries}</dl></details>"


def _escape(text: str) -> str:
    return html.escape(text)
