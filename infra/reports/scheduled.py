"""`penstock run-daily`: the scheduled reports, run manually or by your own timer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

import typer

from shared.errors import BadInput, Unavailable

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
    options = {"from": day or since, "to": day or until}
    asked = {name: text for name, text in options.items() if text}
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
