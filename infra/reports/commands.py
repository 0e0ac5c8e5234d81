"""`penstock report`, `penstock invoice`, and `penstock run-daily` for scheduled reports."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.errors import BadInput, Unavailable

if TYPE_CHECKING:
    from shared.reports.definitions import Report
    from shared.reports.runner import ReportResult

LIST, ALL = "list", "all"
GIB = 1024**3
Tz = Annotated[
    str, typer.Option(metavar="ZONE", help="time zone that defines days, such as Europe/Berlin")
]
Tenants = Annotated[list[str] | None, typer.Option("--tenant", help="only rows of this tenant")]
Output = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help=("output file, or a folder for multiple reports")),
]
MostGib = Annotated[float, typer.Option(min=0.001, help="maximum GiB that a query may read")]

Day = Annotated[str, typer.Option(metavar="DAY", help="only this day, such as 2026-10-31")]
CALL_LIMIT_S = 600.0
"""Scheduled runs use a lower limit, see shared/reports/scheduled.py."""


def report(
    name: Annotated[str, typer.Argument(help="name of the report, `list` or `all`")] = LIST,
    days: Annotated[int, typer.Option(min=0, help="days to look back if --from is not set")] = 0,
    since: Annotated[str, typer.Option("--from", metavar="DAY", help="first day or time")] = "",
    until: Annotated[str, typer.Option("--to", metavar="DAY", help="end (exclusive)")] = "",
    tz: Tz = "UTC",
    tenant: Tenants = None,
    model: Annotated[list[str] | None, typer.Option(help="only rows of this model")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=NUMBER", help="the report's header lists its parameters"
        ),
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="table, csv, json, parquet or html")
    ] = "table",
    output: Output = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help=("only print the expected cost"))
    ] = False,
    max_gib: MostGib = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="same as --format json")] = False,
) -> None:
    """Run usage reports on the configured BigQuery, or list them."""
    if name == LIST:
        _list(as_json=as_json or format_ == "json")
        return
    from infra.reports.runs import open_configured_runner
    from shared.reports.definitions import ask, find_report, reports

    format_ = "json" if as_json else format_
    _check_format(format_, is_one=name != ALL or output is not None)
    chosen = list(reports().values()) if name == ALL else [find_report(name)]
    tenants, models = (tuple(names) if names else None for names in (tenant, model))
    if name == ALL:
        filters = {field for field, names in (("tenants", tenants), ("models", models)) if names}
        chosen = [report_ for report_ in chosen if not filters & report_.without]
    values = parse_numbers(changes or ())
    questions = [
        ask(since, until, tz, tenants=tenants, models=models, days=days or report_.days)
        for report_ in chosen
    ]
    results: list[ReportResult] = []
    with _waiting(), open_configured_runner(_bytes_of(max_gib)) as runner:
        for report_, question in zip(chosen, questions, strict=True):
            own = _own(report_, values, is_only=name != ALL)
            if dry_run:
                _say_cost(report_, runner.cost(report_, question, own))
            else:
                results.append(runner.run(report_, question, own))
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
    """Create a month's invoices: pages to print, or CSV. With --output, one file per tenant."""
    from infra.reports.runs import open_configured_runner
    from shared.reports.definitions import ask_month, find_report
    from shared.reports.invoice import invoice_page, invoices, invoices_csv, terms_of
    from shared.settings import InvoiceSettings, read_settings

    if format_ not in ("html", "csv"):
        raise BadInput(f"format: must be html or csv, got {format_!r}", field="format")
    formatted = invoice_page if format_ == "html" else invoices_csv
    question = ask_month(month, tz, tenants=tuple(tenant) if tenant else None)
    with _waiting(), open_configured_runner(_bytes_of(max_gib)) as runner:
        result = runner.run(find_report("invoice"), question)
    documents = invoices(result, terms_of(read_settings(InvoiceSettings)))
    if output is None:
        sys.stdout.buffer.write(formatted(documents))
        sys.stdout.buffer.flush()
        return
    for document in documents:
        _save(output / f"{document.number}.{format_}", formatted([document]))
    if not documents:
        typer.echo("there was no usage in that month", err=True)


def _bytes_of(gib: float) -> int:
    if not math.isfinite(gib):
        raise BadInput(f"max-gib: must be a finite number, got {gib}", field="max_gib")
    return int(gib * GIB)


def _list(*, as_json: bool) -> None:
    from infra.text_table import table
    from shared.reports.definitions import reports

    heads = ("report", "owner", "for", "shows")
    rows = [
        (report_.name, report_.owner, report_.audience, report_.title)
        for report_ in reports().values()
    ]
    if as_json:
        print(json.dumps([dict(zip(heads, row, strict=True)) for row in rows], indent=2))
    else:
        print(table(heads, rows))


def _check_format(format_: str, *, is_one: bool) -> None:
    from infra.reports.formats import FORMATS

    known = [*FORMATS, "html"]
    if format_ not in known:
        raise BadInput(
            f"format: must be one of {', '.join(known)}, got {format_!r}", field="format"
        )
    if format_ in ("csv", "parquet") and not is_one:
        raise BadInput(f"format: {format_} requires a single report or --output", field="format")


def parse_numbers(changes: Sequence[str]) -> dict[str, float]:
    """Parses the values of `--set`, or raises BadInput."""
    parameters = {}
    for change in changes:
        name, _, text = change.partition("=")
        try:
            parameters[name] = float(text)
        except ValueError:
            raise BadInput(f"set must be NAME=NUMBER, got {change!r}", field="set") from None
    return parameters


def _own(report_: Report, values: Mapping[str, float], *, is_only: bool) -> dict[str, float]:
    if is_only:
        return dict(values)
    own = {parameter.name for parameter in report_.parameters}
    return {name: value for name, value in values.items() if name in own}


def _say_cost(report_: Report, read_bytes: int) -> None:
    from shared.money.amounts import dollars
    from shared.reports.runner import USD_PER_TIB

    usd = read_bytes / 1024**4 * USD_PER_TIB
    typer.echo(f"{report_.name}: {read_bytes / 1024**2:,.1f} MiB, {dollars(usd)} on demand")


def _write(results: Sequence[ReportResult], format_: str, output: Path | None) -> None:
    from infra.reports.formats import FORMATS, as_html

    formatted = as_html if format_ == "html" else FORMATS[format_]
    if output is None:
        if format_ == "parquet" and sys.stdout.isatty():
            raise BadInput(
                "output: parquet can't be printed to a terminal; use --output", field="output"
            )
        sys.stdout.buffer.write(formatted(results))
        sys.stdout.buffer.flush()
        return
    if len(results) > 1 and format_ in ("csv", "parquet"):
        for result in results:
            _save(output / f"{result.report.name}.{format_}", formatted([result]))
    else:
        _save(output, formatted(results))


def _save(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise BadInput(f"output: {path}: {error.strerror}", field="output") from error
    typer.echo(f"wrote {path}", err=True)


def _waiting() -> Any:
    from rich.console import Console

    return Console(stderr=True).status("waiting for BigQuery")  # only shown on a terminal


def run_daily(
    day: Day = "",
    since: Annotated[str, typer.Option("--from", metavar="DAY", help="first day")] = "",
    until: Annotated[str, typer.Option("--to", metavar="DAY", help="last day, included")] = "",
    hours: Annotated[
        bool, typer.Option("--hours", help="only check today's completed hours")
    ] = False,
    function: Annotated[
        str,
        typer.Option(
            metavar="URL", help="run it in the function at this URL, which records metrics"
        ),
    ] = "",
) -> None:
    """Aggregate days, create invoices and summaries, find anomalies. Prints the latest summary."""
    if day and (since or until):
        raise BadInput("day can't be a range; use --from and --to", field="day")
    if hours and (day or since or until):
        raise BadInput("hours are always today's; omit the day", field="hours")
    options = {"from": day or since, "to": day or until}
    body = {name: text for name, text in options.items() if text}
    if function:
        typer.echo(_call(function, {"only": "anomalies"} if hours else body))
    else:
        _run(body, hours=hours)


def _run(parameters: Mapping[str, str], *, hours: bool) -> None:
    from shared.reports.day_tables import days_asked
    from shared.reports.scheduled import open_reports
    from shared.reports.summary import as_text
    from shared.settings import ReportSettings, read_settings

    settings = read_settings(ReportSettings)
    days = days_asked(parameters, settings.billing_tz, datetime.now(UTC))
    with open_reports(settings) as reports:
        work = reports.judge_hours(settings.billing_tz) if hours else reports.run(days)
        result = asyncio.run(work)
    if result.summary is not None:
        typer.echo(as_text(result.summary), nl=False)
    typer.echo(f"{len(result.objects)} objects written, {result.anomalies} new anomalies", err=True)


def _call(url: str, parameters: Mapping[str, str]) -> str:
    """Calls the function at this URL and returns its response."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if not url.startswith(("http://", "https://")):
        raise BadInput(
            f"function: must be an http or https URL, got {url[:80]!r}", field="function"
        )
    headers = {"content-type": "application/json"}
    try:
        request = Request(url, json.dumps(dict(parameters)).encode(), headers)
        with urlopen(request, timeout=CALL_LIMIT_S) as answer:
            return str(answer.read().decode(errors="replace"))
    except HTTPError as error:
        reason = error.read().decode(errors="replace")[:400]
        raise Unavailable(f"the function returned {error.code}: {reason}") from error
    except (OSError, HTTPException, ValueError) as error:  # ValueError: the URL is invalid
        raise Unavailable(f"the function is unreachable: {error}") from error
