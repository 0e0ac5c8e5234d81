"""The dashboard of usage for Grafana's BigQuery data source, as JSON to import or provision."""

from __future__ import annotations

from typing import Any

from infra.monitoring.grafana import COLUMNS, HEIGHT, SCHEMA_VERSION, WIDTH, row, textbox
from infra.monitoring.usage_panels import SECTIONS, UsagePanel, UsageUnit

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
"""Of the data source: series over time, or a table."""


def usage_dashboard(dataset: str = "penstock") -> dict[str, Any]:
    """The dashboard.

    Args:
        dataset: what the variable for the data set is until a reader types something else. With
            the project before it and a dot, it may be in another one than the data source's.
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
        # Hours of the views are those of UTC, and so are steps of days.
        "timezone": "utc",
        "editable": True,
        "schemaVersion": SCHEMA_VERSION,
        # Each refresh is billed. Rows arrive within seconds, but these are hours.
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
    drawn = {"bars": {"drawStyle": "bars", "fillOpacity": 80, "stacking": {"mode": "normal"}}}
    custom = drawn.get(panel.shape, {})
    # The data source makes a label of the column metric.
    series = {"unit": _UNITS[panel.unit], "displayName": "${__field.labels.metric}"}
    return {
        "type": "table" if panel.shape == "table" else "timeseries",
        "id": panel_id,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        # The views have hours: a finer step would draw gaps.
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
