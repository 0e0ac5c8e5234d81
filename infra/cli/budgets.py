"""`penstock budgets restore`: recomputes spent amounts from the rows in BigQuery."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from infra.amounts import check_amount

MAX_GIB = 20.0
GIB = 1024**3

budgets = typer.Typer(help="Budgets of tenants and keys.", no_args_is_help=True)


@budgets.command("restore")
def restore(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only compare")] = False,
    lower: Annotated[
        bool,
        typer.Option(
            "--lower",
            help="also lower counters that exceed their rows; use only when no requests are "
            "coming in",
        ),
    ] = False,
    max_gib: Annotated[
        float,
        typer.Option(
            metavar="GIB", callback=check_amount, help="maximum GiB that the query may read"
        ),
    ] = MAX_GIB,
) -> None:
    """Restore the spent amounts from the rows in BigQuery after Redis has lost its counts.

    Run it once more when the rows from the last few minutes have arrived.
    """
    from api.limits.restore import describe, restore_deployment
    from shared.settings import ApiSettings, read_settings

    settings = read_settings(ApiSettings)
    changed = asyncio.run(
        restore_deployment(settings, lowers=lower, writes=not dry_run, max_bytes=int(max_gib * GIB))
    )
    for counter in changed:
        print(describe(counter, writes=not dry_run))
    if not changed:
        print("all budgets match their rows")
