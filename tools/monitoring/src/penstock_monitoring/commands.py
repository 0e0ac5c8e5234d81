"""`penstock monitoring`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infra.amounts import check_amount
from penstock_monitoring.alerts import RUNBOOK
from penstock_monitoring.objectives import (
    DEFAULT_LEAST_BAD_EVENTS,
    DEFAULT_TARGETS,
    DEFAULT_WORKER_HOUR_USD,
)


def add_monitoring(app: typer.Typer) -> None:
    """Adds `monitoring` to the commands of `app`."""
    app.command()(monitoring)


def monitoring(
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder to write to")],
    models_file: Annotated[
        Path, typer.Option(metavar="FILE", help="catalog of the local stack")
    ] = Path("models.yaml"),
    availability: Annotated[
        float, typer.Option(callback=check_amount, help="share of requests that must not fail")
    ] = DEFAULT_TARGETS["availability"],
    deadlines: Annotated[
        float, typer.Option(callback=check_amount, help="share of items that must be on time")
    ] = DEFAULT_TARGETS["deadlines"],
    least_bad_events: Annotated[
        int, typer.Option(help="bad events in a window before an alert fires")
    ] = DEFAULT_LEAST_BAD_EVENTS,
    worker_hour_usd: Annotated[
        float, typer.Option(callback=check_amount, help="price of one worker per hour")
    ] = DEFAULT_WORKER_HOUR_USD,
    runbook_url: Annotated[
        str, typer.Option(metavar="URL", help="URL of docs/how-to/troubleshoot.md for your team")
    ] = RUNBOOK,
) -> None:
    """Write alerts for Prometheus and dashboards for Grafana."""
    from penstock_monitoring.files import write_for_prometheus
    from shared.models.catalog_file import read_catalog

    files = write_for_prometheus(
        out,
        read_catalog(models_file),
        targets={"availability": availability, "deadlines": deadlines},
        least_bad_events=least_bad_events,
        worker_hour_usd=worker_hour_usd,
        runbook_url=runbook_url,
    )
    for file in files:
        typer.echo(file)
