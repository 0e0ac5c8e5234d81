"""`penstock run-daily`: the scheduled reports, by hand or by a timer of one's own."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated

import typer

from shared.errors import BadInput

Day = Annotated[str, typer.Option(metavar="DAY", help="such as 2026-10-31: only this day")]


def run_daily(
    day: Day = "",
    since: Annotated[str, typer.Option("--from", metavar="DAY", help="first day")] = "",
    until: Annotated[str, typer.Option("--to", metavar="DAY", help="last day, included")] = "",
    hours: Annotated[
        bool, typer.Option("--hours", help="only judge the hours of today that are over")
    ] = False,
) -> None:
    """Sum up days, make invoices and summaries, find anomalies. Says the last day's summary."""
    from shared.reports.days import days_asked
    from shared.reports.scheduled import opened_reports
    from shared.reports.summary import as_text
    from shared.settings import ReportSettings, read_settings

    if day and (since or until):
        raise BadInput("day: is not for a range; use --from and --to", field="day")
    if hours and (day or since or until):
        raise BadInput("hours: are those of today; give no day", field="hours")
    settings = read_settings(ReportSettings)
    given = {"from": day or since, "to": day or until}
    asked = {name: text for name, text in given.items() if text}
    days = days_asked(asked, settings.billing_tz, datetime.now(UTC))
    with opened_reports(settings) as reports:
        work = reports.judge_hours(settings.billing_tz) if hours else reports.run(days)
        result = asyncio.run(work)
    if result.summary is not None:
        typer.echo(as_text(result.summary), nl=False)
    typer.echo(f"{len(result.objects)} objects written, {result.anomalies} new anomalies", err=True)
