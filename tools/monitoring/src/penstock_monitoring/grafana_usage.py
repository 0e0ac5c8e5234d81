"""The usage dashboard for Grafana's BigQuery data source, as JSON to import or provision.

Its panels contain GoogleSQL queries on the views in infra/bigquery. In a query, Grafana replaces
$__timeFilter, $__timeGroup, and ${...} with the page's time range, the chart's step, and the
variables. The filter on `day` prunes the views' partitions.
https://grafana.com/docs/plugins/grafana-bigquery-datasource/latest/query-editor/
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock_monitoring.grafana import COLUMNS, HEIGHT, SCHEMA_VERSION, WIDTH, row, textbox

UsageUnit = Literal["count", "percent", "milliseconds", "hours", "usd"]
Shape = Literal["lines", "bars", "table"]
_DAYS = "day BETWEEN DATE(TIMESTAMP_MILLIS($__from)) AND DATE(TIMESTAMP_MILLIS($__to))"
_HOURS = f"$__timeFilter(hour) AND {_DAYS}"
_MODEL = '(${model:doublequote} = "" OR model = ${model:doublequote})'
_TENANT = '(${tenant:doublequote} = "" OR tenant = ${tenant:doublequote})'
_STEP = "$__timeGroup(hour, $__interval)"

_WHO = "COALESCE(tenant, '(no key)')"

UID = "penstock-usage"
_SOURCE = {"type": "grafana-bigquery-datasource", "uid": "${datasource}"}
_CHOICE = {
    "type": "datasource",
    "name": "datasource",
    "label": "BigQuery",
    "query": _SOURCE["type"],
}
_UNITS: dict[UsageUnit, str] = {
    "count": "short",
    "percent": "percentunit",
    "milliseconds": "ms",
    "hours": "h",
    "usd": "currencyUSD",
}
_FORMATS = {"bars": 0, "lines": 0, "table": 1}
"""Data source formats: time series, or a table."""


@dataclass(frozen=True)
class UsagePanel:
    """A chart, or a table."""

    title: str
    shape: Shape
    unit: UsageUnit
    """percent: the value is a fraction of 1."""
    sql: str
    about: str = ""
    """A description, if the title is not sufficient."""


@dataclass(frozen=True)
class UsageSection:
    """A row of panels."""

    title: str
    panels: tuple[UsagePanel, ...]


def _by_step(value: str, name: str, view: str, filters: str) -> str:
    """Returns a query for time, metric, and value."""
    return (
        f"SELECT {_STEP} AS time, {name} AS metric, {value} AS value\n"
        f"FROM `${{dataset}}.{view}`\nWHERE {filters}\nGROUP BY time, metric\nORDER BY time, metric"
    )


def _usage(value: str, name: str) -> str:
    return _by_step(value, name, "usage_hourly", f"{_HOURS}\n  AND {_TENANT}\n  AND {_MODEL}")


def _latency(column: str) -> str:
    return (
        f"SELECT hour AS time, model AS metric, {column} AS value\n"
        f"FROM `${{dataset}}.latency_hourly`\nWHERE {_HOURS}\n  AND {_MODEL}\n"
        "  AND priority = 'interactive'\nORDER BY time, metric"
    )


def _workers(value: str, name: str) -> str:
    return _by_step(value, name, "worker_hours_hourly", _HOURS)


_MONEY = UsageSection(
    "Money",
    (
        UsagePanel("Charged, by tenant", "bars", "usd", _usage("SUM(cost_usd)", _WHO)),
        UsagePanel("Charged, by model", "bars", "usd", _usage("SUM(cost_usd)", "model")),
        UsagePanel(
            "GPUs' cost, by deployment",
            "bars",
            "usd",
            _workers("SUM(cost_usd)", "deployment"),
            "Total worker time at the list price of the nodes. Not by tenant.",
        ),
        UsagePanel(
            "Tenants",
            "table",
            "usd",
            f"SELECT {_WHO} AS tenant, SUM(cost_usd) AS cost_usd, SUM(list_price_usd) AS"
            " list_price_usd, SUM(requests) AS requests, SUM(items) AS items, SUM(device_s) AS"
            f" device_s\nFROM `${{dataset}}.usage_hourly`\nWHERE {_HOURS}\n  AND {_MODEL}\n"
            "GROUP BY tenant\nORDER BY cost_usd DESC\nLIMIT 100",
        ),
        UsagePanel(
            "Days as invoices count them, by model",
            "bars",
            "usd",
            "SELECT TIMESTAMP(day) AS time, model AS metric, SUM(cost_usd) AS value\n"
            f"FROM `${{dataset}}.costs_daily`\nWHERE {_DAYS}\n  AND {_TENANT}\n  AND {_MODEL}\n"
            "GROUP BY time, metric\nORDER BY time, metric",
            "Days in the billing time zone, summed up by the scheduled reports.",
        ),
        UsagePanel(
            "Unusual hours",
            "table",
            "count",
            "SELECT hour, COALESCE(tenant, '(all)') AS tenant, measure, direction, value, low,"
            f" high, score\nFROM `${{dataset}}.anomalies`\nWHERE {_DAYS}\n  AND {_TENANT}\n"
            "ORDER BY hour DESC\nLIMIT 100",
        ),
    ),
)
_TRAFFIC = UsageSection(
    "Traffic",
    (
        UsagePanel("Requests, by tenant", "bars", "count", _usage("SUM(requests)", _WHO)),
        UsagePanel("Items, by model", "bars", "count", _usage("SUM(items)", "model")),
        UsagePanel(
            "Failed or late items, by model",
            "lines",
            "percent",
            _usage("SAFE_DIVIDE(SUM(failed + expired), SUM(items))", "model"),
        ),
        UsagePanel(
            "Refused requests, by tenant",
            "lines",
            "percent",
            _usage("SAFE_DIVIDE(SUM(refused), SUM(requests))", _WHO),
        ),
        UsagePanel(
            "Items from the cache, by model",
            "lines",
            "percent",
            _usage("SAFE_DIVIDE(SUM(cached), SUM(succeeded))", "model"),
            "Share of delivered items, including items that joined an equal item in flight.",
        ),
        UsagePanel("Device seconds, by model", "bars", "count", _usage("SUM(device_s)", "model")),
    ),
)
_LATENCY = UsageSection(
    "Latency of interactive requests",
    (
        UsagePanel("Total, 50th percentile", "lines", "milliseconds", _latency("total_p50_ms")),
        UsagePanel("Total, 95th percentile", "lines", "milliseconds", _latency("total_p95_ms")),
        UsagePanel("Total, 99th percentile", "lines", "milliseconds", _latency("total_p99_ms")),
        UsagePanel(
            "At the broker, 95th percentile", "lines", "milliseconds", _latency("queue_p95_ms")
        ),
        UsagePanel(
            "Waiting for a batch, 95th percentile",
            "lines",
            "milliseconds",
            _latency("batch_wait_p95_ms"),
        ),
        UsagePanel(
            "In the model, 95th percentile", "lines", "milliseconds", _latency("inference_p95_ms")
        ),
    ),
)
_GPUS = UsageSection(
    "GPUs",
    (
        UsagePanel(
            "Busy hours of devices", "bars", "hours", _workers("SUM(busy_hours)", "deployment")
        ),
        UsagePanel(
            "Idle hours of devices", "bars", "hours", _workers("SUM(idle_hours)", "deployment")
        ),
        UsagePanel(
            "Loading hours of devices",
            "bars",
            "hours",
            _workers("SUM(loading_hours)", "deployment"),
        ),
    ),
)
SECTIONS = (_MONEY, _TRAFFIC, _LATENCY, _GPUS)


def usage_dashboard(dataset: str = "penstock") -> dict[str, Any]:
    """Returns the dashboard.

    Args:
        dataset: initial value of the dataset variable. It may name a dataset in another project, as
            PROJECT.DATASET.
    """
    panels: list[dict[str, Any]] = []
    bottom = 0
    for section in SECTIONS:
        panels.append(row(section.title, bottom, len(panels) + 1))
        for place, panel in enumerate(section.panels):
            panels.append(_panel(panel, place, bottom + 1, len(panels) + 1))
        bottom += 1 + HEIGHT * -(-len(section.panels) // COLUMNS)
    return {
        "uid": UID,
        "title": "Penstock usage",
        "tags": ["penstock"],
        # The views use UTC hours, so daily steps are in UTC as well.
        "timezone": "utc",
        "editable": True,
        "schemaVersion": SCHEMA_VERSION,
        # Each refresh is billed. Rows arrive within seconds, but the views have hourly values.
        "refresh": "",
        "time": {"from": "now-7d", "to": "now"},
        "templating": {
            "list": [
                _CHOICE,
                textbox("dataset", "Data set", dataset),
                textbox("tenant", "Tenant (empty: all)", ""),
                textbox("model", "Model (empty: all)", ""),
            ]
        },
        "panels": panels,
    }


def _panel(panel: UsagePanel, place: int, top: int, panel_id: int) -> dict[str, Any]:
    styles = {"bars": {"drawStyle": "bars", "fillOpacity": 80, "stacking": {"mode": "normal"}}}
    custom = styles.get(panel.shape, {})
    # The data source turns the metric column into a label.
    series = {"unit": _UNITS[panel.unit], "displayName": "${__field.labels.metric}"}
    return {
        "type": "table" if panel.shape == "table" else "timeseries",
        "id": panel_id,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        # The views are hourly, so a finer step would leave gaps in the plot.
        "interval": "1h",
        "gridPos": {
            "x": WIDTH * (place % COLUMNS),
            "y": top + HEIGHT * (place // COLUMNS),
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {
            "defaults": {"custom": custom} | ({} if panel.shape == "table" else series),
            "overrides": [],
        },
        "targets": [
            {
                "refId": "A",
                "datasource": _SOURCE,
                "editorMode": "code",
                "format": _FORMATS[panel.shape],
                "rawQuery": True,
                "rawSql": panel.sql,
            }
        ],
    }
