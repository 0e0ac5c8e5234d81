"""Shows reports as one page that needs nothing else: plots, each with a table.

It is for screens of any width, dark ones too, and for paper.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import resources
from typing import Any

from shared.errors import BadInput
from shared.reports.plots import Drawing, drawings
from shared.reports.runner import USD_PER_TIB, ReportResult

MAX_LINES = 500
"""Maximum rows of a table. CSV and Parquet have all rows."""
LONG = 40
"""Characters of a cell that is broken into lines."""
PLOT_PX = 320
# Okabe and Ito's colors, which color-blind people can distinguish: https://jfly.uni-koeln.de/color/
COLORS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7"),
    *("#56b4e9", "#d55e00", "#b8a800", "#808080"),
)
_CONFIG = {"displaylogo": False, "responsive": True, "displayModeBar": False}


def as_html(results: Sequence[ReportResult]) -> bytes:
    """The page. It has its own copy of plotly.js, about 5 MB.

    Raises:
        BadInput: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise BadInput("format: html needs the `simulation` extra", field="format") from None
    style = resources.files("infra.reports").joinpath("page.css").read_text(encoding="utf-8")
    title = results[0].report.title if len(results) == 1 else "Usage reports"
    links = "".join(
        f'<li><a href="#{result.report.name}">{_escaped(_name(result))}</a></li>'
        for result in results
    )
    sections = "".join(_section(result) for result in results)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_escaped(title)}</title><style>{style}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>"
        f"<header><h1>{_escaped(title)}</h1>{_about(results[0])}"
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
    return f"<p>{_escaped('. '.join(words))}.</p>"


def _section(result: ReportResult) -> str:
    report = result.report
    since, until = result.question[:2]
    plots = "".join(_plot(result, number, one) for number, one in enumerate(drawings(result)))
    usd = result.read_bytes / 1024**4 * USD_PER_TIB
    return (
        f'<section id="{report.name}"><h2>{_escaped(_name(result))}</h2>'
        f"<p>{_escaped(report.title)}</p>"
        f'<p class="meta">For {report.owner}. From {since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M}'
        f" UTC. Read {result.read_bytes / 1024**2:,.1f} MiB (${usd:.4f} on demand).</p>"
        f'<div class="plots">{plots}</div>{_table(result)}{_legend(result)}</section>'
    )


def _plot(result: ReportResult, number: int, drawing: Drawing) -> str:
    from plotly.io import to_html

    drawn = to_html(
        _figure(drawing),
        include_plotlyjs=False,
        full_html=False,
        config=_CONFIG,
        div_id=f"plot-{result.report.name}-{number}",
    )
    title = _escaped(drawing.title)
    return (
        f'<figure role="group" aria-label="Plot: {title}. The table below has its numbers.">'
        f"<figcaption>{title}</figcaption>{drawn}</figure>"
    )


def _figure(drawing: Drawing) -> Any:
    import plotly.graph_objects as go

    if drawing.kind == "heat":
        traces = [
            go.Heatmap(
                x=drawing.series[0].x,
                y=[one.name for one in drawing.series],
                z=[one.y for one in drawing.series],
                colorscale="Viridis",
            )
        ]
    elif drawing.kind == "bars":
        traces = [
            go.Bar(x=_safe(one.x), y=one.y, name=_escaped(one.name)) for one in drawing.series
        ]
    else:
        traces = [
            go.Scatter(x=_safe(one.x), y=one.y, name=_escaped(one.name), mode="lines+markers")
            for one in drawing.series
        ]
    figure = go.Figure(traces)
    figure.update_layout(
        height=PLOT_PX,
        barmode="stack" if drawing.stacked else "group",
        colorway=COLORS,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        legend={"orientation": "h", "y": -0.25},
        showlegend=len(drawing.series) > 1 and drawing.kind != "heat",
        # Readable on white and on black, so that the page may be either.
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
        # Shares near 100 % would all be one line.
        figure.update_yaxes(rangemode="tozero")
    if drawing.kind == "bars":
        figure.update_traces(marker_line_width=0)
    return figure


def _safe(labels: Sequence[str]) -> list[str]:
    # Plotly reads tags in labels.
    return [_escaped(label) for label in labels]


def _table(result: ReportResult) -> str:
    if not result.rows:
        return "<p>No rows.</p>"
    heads = "".join(f'<th scope="col">{_escaped(head)}</th>' for head in result.heads)
    lines = []
    for row in result.rows[:MAX_LINES]:
        lines.append(f"<tr>{''.join(map(_td, row))}</tr>")
    more = ""
    if len(result.rows) > MAX_LINES:
        more = f'<p class="meta">The first {MAX_LINES} of {len(result.rows):,} lines.</p>'
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{_escaped(_name(result))}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>{more}"
    )


def _td(value: object) -> str:
    kind = ""
    if isinstance(value, int | float):
        kind = ' class="number"'
    elif isinstance(value, str) and len(value) > LONG:
        kind = ' class="long"'
    return f"<td{kind}>{_shown(value)}</td>"


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6f}".rstrip("0").rstrip(".")
    return _escaped(f"{value:%Y-%m-%d %H:%M:%S}" if hasattr(value, "hour") else str(value))


def _legend(result: ReportResult) -> str:
    entries = "".join(
        f"<dt>{_escaped(name)}</dt><dd>{_escaped(about)}</dd>"
        for name, about in result.report.columns.items()
    )
    notes = f"<p>{_escaped(result.report.notes)}</p>" if result.report.notes else ""
    return f"<details><summary>What the columns mean</summary>{notes}<dl>{entries}</dl></details>"


def _escaped(text: str) -> str:
    return html.escape(text)
