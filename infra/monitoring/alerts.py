"""All alerts that do not need Google's own metrics. docs/how-to/operations.md has a part for each.

Terraform adds those about each model's Pub/Sub subscriptions (platform/monitoring.tf).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from infra.monitoring.objectives import FAST, OBJECTIVES, SLOW, Bounds, burns

RUNBOOK = "docs/how-to/operations.md"


@dataclass(frozen=True)
class Alert:
    """A condition that is reported to somebody."""

    key: str
    title: str
    severity: Literal["CRITICAL", "WARNING"]
    """CRITICAL: somebody must act now. WARNING: within days."""
    query: str
    """PromQL. Each series that it returns is an incident."""
    for_s: int = 0
    """How long the query must return a series before the alert fires."""
    every_s: int = 60
    """How often the query is evaluated."""
    log_filter: str = ""
    """A filter of Cloud Logging, for what Google does not scrape, in which ${service} is the name
    of the function's service.
    """

    @property
    def anchor(self) -> str:
        """The part of RUNBOOK about it, as GitHub makes anchors of headings."""
        return re.sub(r"[^a-z0-9 -]", "", self.title.lower()).replace(" ", "-")

    @property
    def name(self) -> str:
        """Its name in Prometheus."""
        return "Penstock" + "".join(word.capitalize() for word in self.key.split("-"))


def alerts(bounds: Bounds) -> list[Alert]:
    """Every alert, by key. Queries have `bounds` in them."""
    of_objectives = [
        alert
        for objective in OBJECTIVES
        for alert in (
            Alert(
                f"{objective.name}-fast",
                f"{objective.title}: the error budget burns fast",
                "CRITICAL",
                burns(objective, FAST, bounds),
            ),
            Alert(
                f"{objective.name}-slow",
                f"{objective.title}: the error budget burns slowly",
                "WARNING",
                burns(objective, SLOW, bounds),
                every_s=300,
            ),
        )
    ]
    return sorted([*of_objectives, *_OTHERS], key=lambda alert: alert.key)


# What no objective shows, or shows too late: lost rows, unread keys, and reasons for slowness.
_OTHERS = (
    Alert(
        "cache-down",
        "Cache: Redis out of reach",
        "WARNING",
        "min(penstock_cache_redis_up) < 1",
        for_s=120,
    ),
    Alert(
        "canary-taken-back",
        "Canary: taken back",
        "WARNING",
        "max by (model) (penstock_canary_taken_back) > 0",
        every_s=300,
    ),
    Alert("keys-unread", "Keys: can't be read", "CRITICAL", "min(penstock_keys_up) < 1", for_s=120),
    Alert(
        # Objectives are silent without metrics, and an API that is gone has none.
        "metrics-missing",
        "Metrics: none arrive from the API",
        "CRITICAL",
        "absent(penstock_api_requests_open)",
        for_s=600,
    ),
    Alert(
        "model-process-deaths",
        "Worker: its model process keeps dying",
        "CRITICAL",
        "sum by (worker) (increase(penstock_worker_model_process_deaths_total[15m])) > 3",
    ),
    Alert(
        "objects-failing",
        "Objects: the store fails",
        "WARNING",
        "sum(rate(penstock_objects_errors_total[5m])) > 0",
        for_s=120,
    ),
    Alert(
        "records-down",
        "Records: Redis out of reach",
        "CRITICAL",
        "min(penstock_records_redis_up) < 1",
        for_s=60,
    ),
    Alert(
        "records-dropped",
        "Records: dropped before their time",
        "WARNING",
        "sum(increase(penstock_answers_dropped_total[15m]))"
        " + sum(increase(penstock_predictions_dropped_total[15m])) > 0",
    ),
    Alert(
        "rows-late",
        "Rows: BigQuery out of reach",
        "WARNING",
        "max(penstock_rows_oldest_seconds) > 300",
        for_s=300,
    ),
    Alert(
        "rows-lost", "Rows: lost", "CRITICAL", "sum(increase(penstock_rows_lost_total[15m])) > 0"
    ),
    Alert(
        "rows-rejected",
        "Rows: refused for good",
        "CRITICAL",
        "sum(increase(penstock_rows_rejected_total[15m])) > 0",
    ),
    Alert(
        "rows-unsafe",
        "Rows: the disk takes none",
        "WARNING",
        "min(penstock_rows_disk_up) < 1",
        for_s=300,
    ),
    Alert(
        "undecodable",
        "Jobs topic: messages that are not jobs",
        "WARNING",
        "sum(increase(penstock_worker_undecodable_messages_total[15m])) > 0",
    ),
)

OFF_GOOGLE = (
    Alert(
        "dead-letters",
        "Dead letters",
        "CRITICAL",
        "sum(increase(penstock_functions_dead_letters_total[15m])) > 0",
    ),
    Alert(
        "rows-not-archived",
        "Rows: not archived",
        "WARNING",
        "max(penstock_row_archive_oldest_seconds) > 900",
        for_s=300,
    ),
)
"""Alerts that replace those on Google's own metrics, and on what only runs there."""

OF_FUNCTIONS = (
    Alert(
        "reports-anomalies",
        "Reports: an hour outside its usual band",
        "WARNING",
        "sum by (measure) (increase(penstock_reports_anomalies_total[1h])) > 0",
        log_filter='resource.type="cloud_run_revision"'
        ' AND resource.labels.service_name="${service}" AND jsonPayload.message="anomaly"',
    ),
    Alert(
        "reports-failed",
        "Reports: a scheduled run fails",
        "WARNING",
        'sum by (run) (increase(penstock_reports_runs_total{outcome!="done"}[1h])) > 0',
        # Cloud Scheduler's own log also has runs that did not reach the function.
        log_filter='resource.type="cloud_scheduler_job"'
        ' AND resource.labels.job_id=~"^${service}-" AND severity>=ERROR',
    ),
)
"""Nothing scrapes functions on Google, so there their alerts read logs."""
