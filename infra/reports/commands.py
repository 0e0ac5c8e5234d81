"""`penstock report`, `penstock invoice` and `penstock run-daily`.

Reports are text tables, CSV, JSON, Parquet or a page of plots. The scheduled ones run manually or
by your own timer.
"""

from __future__ import annotations

import asyncio
import csv
import html
import io
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.text_table import table
from shared.errors import BadInput, Unavailable
from shared.reports.invoice import plain_cell
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
    for what, names in (("Tenants", question.tenants), ("Models", question.models)):
        words.append(f"{what}: {', '.join(names) if names else 'all'}")
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


Formatted = Callable[[Sequence[ReportResult]], bytes]
_DUCKDB_TYPES = {
    "STRING": "VARCHAR",
    "INTEGER": "BIGINT",
    "FLOAT": "DOUBLE",
    "BOOLEAN": "BOOLEAN",
    "DATE": "DATE",
    "DATETIME": "TIMESTAMP",
    "TIMESTAMP": "TIMESTAMPTZ",
    "NUMERIC": "DECIMAL(38, 9)",
}


def as_text(results: Sequence[ReportResult]) -> bytes:
    """Aligned tables, with titles if there are several."""
    parts = []
    for result in results:
        shown = table(result.heads, result.rows) if result.rows else _nothing(result)
        parts.append(shown if len(results) == 1 else f"{result.report.title}\n\n{shown}\n")
    return ("\n".join(parts) + "\n").encode()


def _nothing(result: ReportResult) -> str:
    since, until = result.question[:2]
    return f"no rows from {since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M} UTC"


def as_json(results: Sequence[ReportResult]) -> bytes:
    """The rows as objects. Of several reports an object by their names.

    Times and decimals, which JSON does not have, become strings.
    """
    shown: Any = {result.report.name: result.records() for result in results}
    if len(results) == 1:
        (shown,) = shown.values()
    return (json.dumps(shown, indent=2, default=str) + "\n").encode()


def as_csv(results: Sequence[ReportResult]) -> bytes:
    """CSV (RFC 4180) of one report. NULL is an empty cell.

    Raises:
        BadInput: there are several.
    """
    result = _only(results, "csv")
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(result.heads)
    writer.writerows([_cell(value) for value in row] for row in result.rows)
    return file.getvalue().encode()


def _cell(value: object) -> object:
    if isinstance(value, str):
        return plain_cell(value)
    return value.isoformat() if hasattr(value, "isoformat") else value


def as_parquet(results: Sequence[ReportResult]) -> bytes:
    """Parquet of one report, with its types.

    Raises:
        BadInput: there are several, or DuckDB, which writes it, is not installed.
    """
    result = _only(results, "parquet")
    try:
        import duckdb
    except ImportError:
        raise BadInput("format: parquet needs the `local` extra", field="format") from None
    columns = ", ".join(
        '"{}" {}'.format(column.name.replace('"', '""'), _DUCKDB_TYPES[column.type])
        for column in result.columns
    )
    with tempfile.TemporaryDirectory() as folder, duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE result ({columns})")
        if result.rows:
            places = ", ".join("?" for _ in result.columns)
            connection.executemany(f"INSERT INTO result VALUES ({places})", list(result.rows))
        path = Path(folder) / "result.parquet"
        connection.execute("COPY result TO ? (FORMAT parquet)", [str(path)])
        return path.read_bytes()


def _only(results: Sequence[ReportResult], format_: str) -> ReportResult:
    if len(results) != 1:
        raise BadInput(f"format: {format_} is for one report; name it", field="format")
    return results[0]


FORMATS: Mapping[str, Formatted] = {
    "table": as_text,
    "csv": as_csv,
    "json": as_json,
    "parquet": as_parquet,
}
"""Writers by the word after --format. The page is in infra/reports/commands.py."""


if TYPE_CHECKING:
    from shared.reports.definitions import Report
    from shared.reports.runner import ReportResult

LIST, ALL = "list", "all"
GIB = 1024**3
Tz = Annotated[str, typer.Option(metavar="ZONE", help="of days, such as Europe/Berlin")]
Tenants = Annotated[list[str] | None, typer.Option("--tenant", help="only this tenant's rows")]
Output = Annotated[Path | None, typer.Option(metavar="PATH", help="a file, or a folder for many")]
MostGib = Annotated[float, typer.Option(min=0.001, help="GiB that a query may read at most")]


def report(
    name: Annotated[str, typer.Argument(help="its name, `list` or `all`")] = LIST,
    days: Annotated[int, typer.Option(min=0, help="days to look back, without --from")] = 0,
    since: Annotated[str, typer.Option("--from", metavar="DAY", help="first day or moment")] = "",
    until: Annotated[str, typer.Option("--to", metavar="DAY", help="first that is too late")] = "",
    tz: Tz = "UTC",
    tenant: Tenants = None,
    model: Annotated[list[str] | None, typer.Option(help="only this model's rows")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=NUMBER", help="as its head says")
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="table, csv, json, parquet or html")
    ] = "table",
    output: Output = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what it would cost")] = False,
    max_gib: MostGib = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="the same as --format json")] = False,
) -> None:
    """Run usage reports on the configured BigQuery, or list them."""
    if name == LIST:
        _list(as_json=as_json or format_ == "json")
        return
    from infra.reports.runs import configured_runner
    from shared.reports.definitions import find_report, reports
    from shared.reports.question import ask

    format_ = "json" if as_json else format_
    _check_format(format_, is_one=name != ALL or output is not None)
    chosen = list(reports().values()) if name == ALL else [find_report(name)]
    tenants, models = (tuple(names) if names else None for names in (tenant, model))
    if name == ALL:
        asked = {field for field, names in (("tenants", tenants), ("models", models)) if names}
        chosen = [one for one in chosen if not asked & one.without]
    values = _numbers(changes or ())
    questions = [
        ask(since, until, tz, tenants=tenants, models=models, days=days or one.days)
        for one in chosen
    ]
    results: list[ReportResult] = []
    with _waiting(), configured_runner(int(max_gib * GIB)) as runner:
        for one, question in zip(chosen, questions, strict=True):
            own = _own(one, values, is_only=name != ALL)
            if dry_run:
                _say_cost(one, runner.cost(one, question, own))
            else:
                results.append(runner.run(one, question, own))
    if not dry_run:
        _write(results, format_, output)


def invoice(
    month: Annotated[str, typer.Option(metavar="MONTH", help="such as 2026-10")],
    tenant: Tenants = None,
    tz: Tz = "UTC",
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="html or csv")
    ] = "html",
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="a folder")] = None,
    max_gib: MostGib = 20.0,
) -> None:
    """Make the invoices of a month: pages to print, or CSV. With --output a file per tenant."""
    from infra.reports.runs import configured_runner
    from shared.reports.definitions import find_report
    from shared.reports.invoice import invoice_page, invoices, invoices_csv
    from shared.reports.question import ask_month

    if format_ not in ("html", "csv"):
        raise BadInput(f"format: {format_!r} is not html or csv", field="format")
    formatted = invoice_page if format_ == "html" else invoices_csv
    question = ask_month(month, tz, tenants=tuple(tenant) if tenant else None)
    with _waiting(), configured_runner(int(max_gib * GIB)) as runner:
        made = invoices(runner.run(find_report("invoice"), question))
    if output is None:
        sys.stdout.buffer.write(formatted(made))
        sys.stdout.buffer.flush()
        return
    for one in made:
        _save(output / f"{one.number}.{format_}", formatted([one]))
    if not made:
        typer.echo("nothing was used in that month", err=True)


def _list(*, as_json: bool) -> None:
    import json

    from infra.text_table import table
    from shared.reports.definitions import reports

    heads = ("report", "owner", "for", "shows")
    rows = [(one.name, one.owner, one.audience, one.title) for one in reports().values()]
    if as_json:
        print(json.dumps([dict(zip(heads, row, strict=True)) for row in rows], indent=2))
    else:
        print(table(heads, rows))


def _check_format(format_: str, *, is_one: bool) -> None:

    known = [*FORMATS, "html"]
    if format_ not in known:
        raise BadInput(f"format: {format_!r} is not one of {', '.join(known)}", field="format")
    if format_ in ("csv", "parquet") and not is_one:
        raise BadInput(f"format: {format_} is for one report, or for --output", field="format")


def _numbers(changes: Sequence[str]) -> dict[str, float]:
    found = {}
    for change in changes:
        name, _, text = change.partition("=")
        try:
            found[name] = float(text)
        except ValueError:
            raise BadInput(f"set: {change!r} is not NAME=NUMBER", field="set") from None
    return found


def _own(report_: Report, values: Mapping[str, float], *, is_only: bool) -> dict[str, float]:
    if is_only:
        return dict(values)
    own = {one.name for one in report_.parameters}
    return {name: value for name, value in values.items() if name in own}


def _say_cost(report_: Report, read_bytes: int) -> None:
    from shared.reports.runner import USD_PER_TIB

    usd = read_bytes / 1024**4 * USD_PER_TIB
    typer.echo(f"{report_.name}: {read_bytes / 1024**2:,.1f} MiB, ${usd:.4f} on demand")


def _write(results: Sequence[ReportResult], format_: str, output: Path | None) -> None:
    formatted = _formatter(format_)
    if output is None:
        if format_ == "parquet" and sys.stdout.isatty():
            raise BadInput("output: parquet is not for a terminal", field="output")
        sys.stdout.buffer.write(formatted(results))
        sys.stdout.buffer.flush()
        return
    if len(results) > 1 and format_ in ("csv", "parquet"):
        for result in results:
            _save(output / f"{result.report.name}.{format_}", formatted([result]))
    else:
        _save(output, formatted(results))


def _formatter(format_: str) -> Callable[[Sequence[ReportResult]], bytes]:

    return as_html if format_ == "html" else FORMATS[format_]


def _save(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise BadInput(f"output: {path}: {error.strerror}", field="output") from error
    typer.echo(f"wrote {path}", err=True)


def _waiting() -> Any:
    from rich.console import Console

    return Console(stderr=True).status("waiting for BigQuery")  # shown on a terminal only


Day = Annotated[str, typer.Option(metavar="DAY", help="such as 2026-10-31: only this day")]
CALL_LIMIT_S = 600.0
"""A run takes less, see shared/reports/scheduled.py."""


def run_daily(
    day: Day = "",
    since: Annotated[str, typer.Option("--from", metavar="DAY", help="first day")] = "",
    until: Annotated[str, typer.Option("--to", metavar="DAY", help="last day, included")] = "",
    hours: Annotated[
        bool, typer.Option("--hours", help="only judge the hours of today that are over")
    ] = False,
    function: Annotated[
        str, typer.Option(metavar="URL", help="have a function do it, whose metrics report it")
    ] = "",
) -> None:
    """Sum up days, make invoices and summaries, find anomalies. Says the last day's summary."""
    if day and (since or until):
        raise BadInput("day: is not for a range; use --from and --to", field="day")
    if hours and (day or since or until):
        raise BadInput("hours: are those of today; give no day", field="hours")
    given = {"from": day or since, "to": day or until}
    asked = {name: text for name, text in given.items() if text}
    if function:
        typer.echo(_called(function, {"only": "anomalies"} if hours else asked))
    else:
        _run(asked, hours=hours)


def _run(asked: Mapping[str, str], *, hours: bool) -> None:
    from shared.reports.day_tables import days_asked
    from shared.reports.scheduled import opened_reports
    from shared.reports.summary import as_text
    from shared.settings import ReportSettings, read_settings

    settings = read_settings(ReportSettings)
    days = days_asked(asked, settings.billing_tz, datetime.now(UTC))
    with opened_reports(settings) as reports:
        work = reports.judge_hours(settings.billing_tz) if hours else reports.run(days)
        result = asyncio.run(work)
    if result.summary is not None:
        typer.echo(as_text(result.summary), nl=False)
    typer.echo(f"{len(result.objects)} objects written, {result.anomalies} new anomalies", err=True)


def _called(url: str, asked: Mapping[str, str]) -> str:
    """Returns the answer of the function at this URL."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if not url.startswith(("http://", "https://")):
        raise BadInput(f"function: {url[:80]!r} is not an http or https URL", field="function")
    headers = {"content-type": "application/json"}
    request = Request(url, json.dumps(dict(asked)).encode(), headers)
    try:
        with urlopen(request, timeout=CALL_LIMIT_S) as answer:
            return str(answer.read().decode())
    except HTTPError as error:
        reason = error.read().decode(errors="replace")[:400]
        raise Unavailable(f"the function answered {error.code}: {reason}") from error
    except OSError as error:
        raise Unavailable(f"the function can't be reached: {error}") from error
