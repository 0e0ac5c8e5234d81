"""The Grafana dashboard, as JSON to import or provision.

https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock_monitoring.objectives import DEFAULT_TARGETS, Bounds
from penstock_monitoring.panels import Panel, PanelQuery, Section, Terms, Unit, sections

UID = "penstock"
SCHEMA_VERSION = 39
"""Schema version of Grafana 11. Later releases migrate it on load."""
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_UNITS: dict[Unit, str] = {
    "count": "short",
    "per_second": "cps",
    "percent": "percentunit",
    "seconds": "s",
    "usd": "currencyUSD",
}
TERMS = Terms(
    Bounds({name: f"(1 - ${name})" for name in DEFAULT_TARGETS}, ""), " * $worker_hour_usd"
)
"""Its variables hold targets and prices, so that readers can change them on the page."""


def dashboard(
    worker_hour_usd: float, targets: Mapping[str, float] = DEFAULT_TARGETS
) -> dict[str, Any]:
    """Returns the dashboard, with initial values for its variables.

    Args:
        worker_hour_usd: price of one worker per hour.
        targets: share of events that must be good, keyed by objective.
    """
    panels: list[dict[str, Any]] = []
    bottom = 0
    for section in sections(TERMS):
        panels += _section(section, bottom, first_id=len(panels) + 1)
        bottom += 1 + HEIGHT * -(-len(section.panels) // COLUMNS)
    return {
        "uid": UID,
        "title": "Penstock",
        "tags": ["penstock"],
        "timezone": "browser",
        "editable": True,
        "schemaVersion": SCHEMA_VERSION,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {
                    "type": "datasource",
                    "name": "datasource",
                    "label": "Prometheus",
                    "query": "prometheus",
                },
                *(
                    textbox(name, f"{name.capitalize()}, target", f"{target:g}")
                    for name, target in targets.items()
                ),
                textbox("worker_hour_usd", "Dollars per worker and hour", f"{worker_hour_usd:g}"),
            ]
        },
        "panels": panels,
    }


def datasource(url: str) -> dict[str, Any]:
    """Returns the provisioning file for a Prometheus data source."""
    source = {
        "name": "Prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": url,
        "isDefault": True,
    }
    return {"apiVersion": 1, "datasources": [source]}


def provider(folder: str) -> dict[str, Any]:
    """Returns the provisioning file for a folder of dashboards, which Grafana reloads."""
    read = {"name": "penstock", "type": "file", "options": {"path": folder}}
    return {"apiVersion": 1, "providers": [read]}


def textbox(name: str, label: str, value: str) -> dict[str, Any]:
    """Returns a variable that readers can edit, with its initial value."""
    return {
        "type": "textbox",
        "name": name,
        "label": label,
        "query": value,
        "current": {"selected": True, "text": value, "value": value},
    }


def row(title: str, top: int, row_id: int) -> dict[str, Any]:
    """Returns the header for a section of panels."""
    return {
        "type": "row",
        "id": row_id,
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": top, "w": WIDTH * COLUMNS, "h": 1},
        "panels": [],
    }


def _section(section: Section, top: int, first_id: int) -> list[dict[str, Any]]:
    return [
        row(section.title, top, first_id),
        *(
            _panel(panel, place, top + 1, first_id + 1 + place)
            for place, panel in enumerate(section.panels)
        ),
    ]


def _panel(panel: Panel, place: int, top: int, panel_id: int) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "id": panel_id,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {
            "x": WIDTH * (place % COLUMNS),
            "y": top + HEIGHT * (place // COLUMNS),
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": _UNITS[panel.unit]}, "overrides": []},
        "targets": [_target(query, number) for number, query in enumerate(panel.queries)],
    }


def _target(query: PanelQuery, number: int) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + number),
        "datasource": _SOURCE,
        "expr": query.promql,
        "legendFormat": query.legend,
        "range": True,
    }
