"""Writes alerts and dashboards into folders, both for the repository and for users.

- A Prometheus that runs alongside the local stack gets a configuration, and its alerts as rules: a
  separate file, and objects of two operators. Ratios are recorded, so that a graph shows what an
  alert saw, and windows of days are read every two minutes only.
- Cloud Monitoring gets templates, which Terraform reads with `templatefile`, so that targets and
  prices take the place of `${…}`. Its alerts can't record, so they have the whole expression.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

import infra
from infra.local.ports import Ports
from penstock_monitoring import grafana, grafana_usage
from penstock_monitoring.alerts import (
    OF_FUNCTIONS,
    OFF_GOOGLE,
    ON_GOOGLE,
    RUNBOOK,
    Alert,
    alerts,
)
from penstock_monitoring.objectives import (
    DEFAULT_LEAST_BAD_EVENTS,
    DEFAULT_TARGETS,
    DEFAULT_WORKER_HOUR_USD,
    FAST,
    OBJECTIVES,
    SCOPES,
    SLOW,
    Bounds,
    BurnRate,
    Objective,
    bad_events,
    bounds_of,
    error_ratio,
)
from penstock_monitoring.panels import Panel, PanelQuery, Terms, Unit, sections
from shared.errors import ConfigurationError
from shared.models.catalog import Catalog
from shared.models.kubernetes_names import slug

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
"""Pub/Sub's own metric, which only exists on Google."""


def alerts_template() -> str:
    """Returns the alerts by key, as JSON."""
    return _google_json(
        {
            alert.key: {
                "anchor": f"{RUNBOOK}#{alert.anchor}",
                "duration": f"{alert.for_s}s",
                "evaluation_interval": f"{alert.every_s}s",
                "query": alert.query,
                "severity": alert.severity,
                "title": alert.title,
            }
            for alert in sorted([*alerts(BOUNDS), *ON_GOOGLE], key=lambda alert: alert.key)
        }
    )


def log_alerts_template() -> str:
    """Returns the alerts on logs by key, as JSON."""
    return _google_json(
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
    """Returns the dashboard without its name, as JSON."""
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
    return _google_json({"mosaicLayout": {"columns": COLUMNS, "tiles": tiles}})


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


def _google_json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


Form = Literal["file", "PrometheusRule", "Rules"]
NAME = "penstock"
RATIO, BAD = "penstock:slo_errors:ratio", "penstock:slo_bad:increase"
"""Recorded series, by `objective` and `scope`: per `model`, or `all`. The window is appended."""
_LEVELS = {"CRITICAL": "page", "WARNING": "ticket"}
_APIS = {
    "PrometheusRule": "monitoring.coreos.com/v1",
    "Rules": "monitoring.googleapis.com/v1",
}


def rules(bounds: Bounds, form: Form, runbook_url: str = RUNBOOK) -> dict[str, Any]:
    """Returns the rules.

    Args:
        form: a file for Prometheus' `rule_files`, an object for Prometheus Operator, or one for
            Google's Managed Prometheus.
        runbook_url: URL of docs/how-to/troubleshoot.md.
    """
    groups = {"groups": _groups(bounds, runbook_url)}
    if form == "file":
        return groups
    return {
        "apiVersion": _APIS[form],
        "kind": form,
        "metadata": {"name": NAME, "labels": {"app.kubernetes.io/name": NAME}},
        "spec": groups,
    }


def _groups(bounds: Bounds, runbook_url: str) -> list[dict[str, Any]]:
    of_objectives = [
        _burn_alert(objective, rates, alert, bounds)
        for objective in OBJECTIVES
        for key, rates in (("fast", FAST), ("slow", SLOW))
        for alert in alerts(bounds)
        if alert.key == f"{objective.name}-{key}"
    ]
    keys = {alert.key for alert in of_objectives}
    fast = [window for rate in FAST for window in (rate.long, rate.short)]
    slow = [window for rate in SLOW for window in (rate.long, rate.short) if window not in fast]
    others = [alert for alert in alerts(bounds) if alert.key not in keys]
    return [
        {"name": f"{NAME}-ratios-fast", "interval": "30s", "rules": _recorded(fast)},
        # Less than the five minutes after which a series counts as gone.
        {"name": f"{NAME}-ratios-slow", "interval": "2m", "rules": _recorded(slow)},
        {
            "name": f"{NAME}-objectives",
            "rules": [_rule(alert, runbook_url) for alert in of_objectives],
        },
        {
            "name": f"{NAME}-alerts",
            "rules": [_rule(alert, runbook_url) for alert in (*others, *OFF_GOOGLE, *OF_FUNCTIONS)],
        },
    ]


def _recorded(windows: list[str]) -> list[dict[str, Any]]:
    long = {rate.long for rate in (*FAST, *SLOW)}
    return [
        {
            "record": f"{name}{window}",
            "expr": expr,
            "labels": {"objective": objective.name, "scope": scope},
        }
        for objective in OBJECTIVES
        for window in windows
        for scope in SCOPES
        for name, expr in (
            (RATIO, error_ratio(objective, window, scope)),
            (BAD, bad_events(objective, window, scope)),
        )
        if name == RATIO or window in long
    ]


def _burn_alert(
    objective: Objective, rates: tuple[BurnRate, ...], alert: Alert, bounds: Bounds
) -> Alert:
    """Returns the alert on recorded series."""
    chosen = f'{{objective="{objective.name}"}}'

    def burns(rate: BurnRate) -> str:
        limit = f"{rate.rate:g} * {bounds.budgets[objective.name]}"
        return (
            f"({RATIO}{rate.long}{chosen} > {limit} and {RATIO}{rate.short}{chosen} > {limit}"
            f" and {BAD}{rate.long}{chosen} >= {bounds.least_bad_events})"
        )

    query = " or ".join(burns(rate) for rate in rates)
    return Alert(alert.key, alert.title, alert.severity, query, alert.for_s, alert.every_s)


def _rule(alert: Alert, runbook_url: str) -> Mapping[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.query,
        "for": f"{alert.for_s}s",
        "labels": {"severity": _LEVELS[alert.severity]},
        "annotations": {
            "summary": f"{alert.title}{{{{ with $labels.model }}}} ({{{{ . }}}}){{{{ end }}}}",
            "runbook_url": f"{runbook_url}#{alert.anchor}",
        },
    }


INTERVAL = "10s"
"""Scrape interval, the same as in Managed Prometheus on Google."""


def prometheus_config(catalog: Catalog, ports: Ports, rules_file: str) -> dict[str, Any]:
    """Returns the Prometheus configuration for `penstock up`.

    Args:
        catalog: the models. Series of their workers get a `worker` label.
        rules_file: path of the rules, relative to the configuration.
    """
    workers = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"worker": slug(group.name)}}
        for group, port in zip(catalog.worker_groups, ports.health, strict=False)
    ]
    return {
        "global": {"scrape_interval": INTERVAL, "evaluation_interval": "30s"},
        "rule_files": [rules_file],
        "scrape_configs": [
            _job("penstock-api", [{"targets": [f"127.0.0.1:{ports.metrics}"]}]),
            _job("penstock-workers", workers),
            _job("penstock-functions", [{"targets": [f"127.0.0.1:{ports.functions}"]}]),
        ],
    }


def _job(name: str, static_configs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"job_name": name, "static_configs": static_configs}


RENDERED = Path(infra.__file__).parent / "monitoring" / "rendered"
_HEAD = "# Generated by tools/monitoring. Do not edit.\n"
_PROMETHEUS_URL = "http://127.0.0.1:9090"


def rendered() -> dict[str, str]:
    """Returns the expected contents of the `rendered` folder, by file name."""
    bounds = bounds_of(DEFAULT_TARGETS, DEFAULT_LEAST_BAD_EVENTS)
    return {
        "alerts.json.tftpl": alerts_template(),
        "dashboard.json.tftpl": dashboard_template(),
        "grafana-dashboard.json": _json(grafana.dashboard(DEFAULT_WORKER_HOUR_USD)),
        "grafana-usage-dashboard.json": _json(grafana_usage.usage_dashboard()),
        "log-alerts.json.tftpl": log_alerts_template(),
        "prometheus-rules.yaml": _yaml(rules(bounds, "file")),
    }


def write_rendered() -> None:
    """Writes the `rendered` folder."""
    for name, text in rendered().items():
        (RENDERED / name).write_text(text, encoding="utf-8")


def write_for_prometheus(
    out: Path,
    catalog: Catalog,
    *,
    targets: Mapping[str, float] = DEFAULT_TARGETS,
    least_bad_events: int = DEFAULT_LEAST_BAD_EVENTS,
    worker_hour_usd: float = DEFAULT_WORKER_HOUR_USD,
    runbook_url: str = RUNBOOK,
) -> list[Path]:
    """Writes rules, a Prometheus configuration for the local stack, and files for Grafana.

    Args:
        out: output folder. Files from an earlier run are replaced.
        targets: share of events that must be good, by objective.
        least_bad_events: minimum number of bad events in a window before an alert fires.
        worker_hour_usd: price of one worker per hour.
        runbook_url: URL of docs/how-to/troubleshoot.md.

    Returns:
        The files written.

    Raises:
        ConfigurationError: a target or number is out of range, or a file can't be written.
    """
    _check(targets, least_bad_events, worker_hour_usd)
    bounds, dashboards = bounds_of(targets, least_bad_events), out.absolute() / "dashboards"
    files = {
        "prometheus.yaml": _yaml(prometheus_config(catalog, Ports(), "rules.yaml")),
        "rules.yaml": _yaml(rules(bounds, "file", runbook_url)),
        "prometheus-rule.yaml": _yaml(rules(bounds, "PrometheusRule", runbook_url)),
        "managed-rules.yaml": _yaml(rules(bounds, "Rules", runbook_url)),
        "dashboards/penstock.json": _json(grafana.dashboard(worker_hour_usd, targets)),
        "dashboards/penstock-usage.json": _json(grafana_usage.usage_dashboard()),
        "provisioning/datasources/penstock.yaml": _yaml(grafana.datasource(_PROMETHEUS_URL)),
        "provisioning/dashboards/penstock.yaml": _yaml(grafana.provider(str(dashboards))),
    }
    try:
        for name, text in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}", field="out") from error
    return [out / name for name in files]


def _check(targets: Mapping[str, float], least_bad_events: int, worker_hour_usd: float) -> None:
    for name, target in targets.items():
        if not (FAST[0].rate * (1 - target) < 1 and target < 1):
            raise ConfigurationError(
                f"{name}: {target:g} must be between 0.931, below which a total outage would not"
                " fire the alert, and 1, which leaves no budget",
                field=name,
            )
    if least_bad_events < 1:
        raise ConfigurationError("least-bad-events: at least 1", field="least_bad_events")
    if not 0 <= worker_hour_usd < float("inf"):
        raise ConfigurationError("worker-hour-usd must be a price", field="worker_hour_usd")


def _yaml(value: object) -> str:
    return _HEAD + yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
