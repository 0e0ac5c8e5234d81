"""Runs reports with this process's settings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shared.reports.budgets import read_budgets
from shared.reports.definitions import ask, find_report
from shared.reports.runner import MAX_BYTES, ReportRunner, open_runner
from shared.settings import ApiSettings, Settings, read_settings


@contextmanager
def open_configured_runner(most_bytes: int = MAX_BYTES) -> Iterator[ReportRunner]:
    """Creates a runner for the BigQuery service and key directory set by PENSTOCK_* variables.

    Raises:
        ConfigurationError: a setting is invalid. Unavailable: BigQuery or the key directory is
        unreachable.
    """
    settings = read_settings(ApiSettings)
    budgets_usd = asyncio.run(read_budgets(settings.keys_url))
    with open_runner(
        settings.project, settings.dataset, settings.bigquery_endpoint, most_bytes, budgets_usd
    ) as runner:
        yield runner


def run_report(settings: Settings, name: str, days: int) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Returns a report's columns and rows for requests from the last `days` days.

    Raises:
        BadInput: the report does not exist.
        Unavailable: BigQuery is unreachable or rejected the query.
    """
    report = find_report(name)
    with open_runner(settings.project, settings.dataset, settings.bigquery_endpoint) as runner:
        result = runner.run(report, ask("", "", days=days))
    return result.heads, list(result.rows)
