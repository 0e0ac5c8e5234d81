"""Templates from which Terraform makes alerts and dashboard of Cloud Monitoring.

Terraform reads them with `templatefile`, which puts targets and prices in the place of `${…}`.
"""

from __future__ import annotations

import json
from typing import Any

from infra.monitoring.alerts import OF_FUNCTIONS, RUNBOOK, alerts
from infra.monitoring.objectives import DEFAULT_TARGETS, Bounds
from infra.monitoring.panels import Panel, PanelQuery, Terms, Unit, sections

WIDTH, HEIGHT, COLUMNS = 16, 16, 48
BOUNDS = Bounds({name: f"${{{name}_budget}}" for name in DEFAULT_TARGETS}, "${least_bad_events}")
TERMS = Terms(BOUNDS, " * on (worker) group_left () (${worker_hour_usd})")
_UNITS: dict[Unit, str] = {
    "count": "1",
    "per_second": "1/s",
    "percent": "10^2.%",
    "seconds": "s",
    "usd": "USD",
}
_JOBS = 'monitored_resource="pubsub_subscription",subscription_id=~"jobs[.].*[.]workers"'
OLDEST_JOB = Panel(
    "Oldest job",
    "seconds",
    (
        PanelQuery(
            "max by (subscription_id)"
            f" (pubsub_googleapis_com:subscription_oldest_unacked_message_age{{{_JOBS}}})",
            "{{subscription_id}}",
        ),
    ),
)
"""Pub/Sub's own metric, which only Google has."""


def alerts_template() -> str:
    """The alerts by key, as JSON."""
    return _json(
        {
            alert.key: {
                "anchor": f"{RUNBOOK}#{alert.anchor}",
                "duration": f"{alert.for_s}s",
                "evaluation_interval": f"{alert.every_s}s",
                "query": alert.query,
                "severity": alert.severity,
                "title": alert.title,
            }
            for alert in alerts(BOUNDS)
        }
    )


def log_alerts_template() -> str:
    """The alerts on logs by key, as JSON."""
    return _json(
        {
            alert.key: {
                "anchor": f"{RUNBOOK}#{alert.anchor}",
                "filter": alert.log_filter,
                "severity": alert.severity,
                "title": alert.title,
            }
            for alert in OF_FUNCTIONS
        }
    )


def dashboard_template() -> str:
    """The dashboard without its name, as JSON."""
    shown = [panel for section in sections(TERMS) for panel in section.panels] + [OLDEST_JOB]
    in_a_row = COLUMNS // WIDTH
    tiles = [
        {
            "height": HEIGHT,
            "width": WIDTH,
            "xPos": WIDTH * (place % in_a_row),
            "yPos": HEIGHT * (place // in_a_row),
            "widget": _widget(panel),
        }
        for place, panel in enumerate(shown)
    ]
    return _json({"mosaicLayout": {"columns": COLUMNS, "tiles": tiles}})


def _widget(panel: Panel) -> dict[str, Any]:
    data_sets = [
        {
            "plotType": "LINE",
            "legendTemplate": query.legend.replace("{{", "$${").replace("}}", "}"),
            "timeSeriesQuery": {
                "prometheusQuery": query.promql,
                "unitOverride": _UNITS[panel.unit],
            },
        }
        for query in panel.queries
    ]
    return {"title": panel.title, "xyChart": {"dataSets": data_sets}}


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
