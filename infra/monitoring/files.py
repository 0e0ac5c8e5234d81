"""Writes alerts and dashboards into folders: those in the repository, and those for users.

One of the files configures a Prometheus that runs alongside the local stack.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from infra.local.ports import Ports
from infra.monitoring import google, grafana, grafana_usage
from infra.monitoring.alerts import RUNBOOK
from infra.monitoring.objectives import (
    DEFAULT_LEAST_BAD_EVENTS,
    DEFAULT_TARGETS,
    DEFAULT_WORKER_HOUR_USD,
    FAST,
    bounds_of,
)
from infra.monitoring.rules import rules
from shared.catalog import Catalog
from shared.errors import ConfigurationError
from shared.kubernetes_names import slug

INTERVAL = "10s"
"""Scrape interval, that of Managed Prometheus in the cloud."""


def prometheus_config(catalog: Catalog, ports: Ports, rules_file: str) -> dict[str, Any]:
    """The configuration of Prometheus for `penstock up`.

    Args:
        catalog: the models. Each has one worker, whose series get the `worker` label.
        ports: ports of the stack.
        rules_file: the path of the rules, from the configuration.
    """
    workers = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"worker": slug(model.name)}}
        for model, port in zip(catalog.models, ports.health, strict=False)
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


RENDERED = Path(__file__).parent / "rendered"
_HEAD = "# Made by infra/monitoring. Change that, not this.\n"
_PROMETHEUS_URL = "http://127.0.0.1:9090"


def rendered() -> dict[str, str]:
    """Returns the required contents of the `rendered` folder, by file name."""
    bounds = bounds_of(DEFAULT_TARGETS, DEFAULT_LEAST_BAD_EVENTS)
    return {
        "alerts.json.tftpl": google.alerts_template(),
        "dashboard.json.tftpl": google.dashboard_template(),
        "grafana-dashboard.json": _json(grafana.dashboard(DEFAULT_WORKER_HOUR_USD)),
        "grafana-usage-dashboard.json": _json(grafana_usage.usage_dashboard()),
        "log-alerts.json.tftpl": google.log_alerts_template(),
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
    """Writes rules, a configuration of Prometheus for the local stack, and files for Grafana.

    Args:
        out: the folder. Files of an earlier run are replaced.
        catalog: the models of the local stack.
        targets: the share of events that must be good, by objective.
        least_bad_events: the minimum number in a window before an alert fires.
        worker_hour_usd: price of one worker per hour.
        runbook_url: URL of docs/how-to/operations.md.

    Returns:
        The files.

    Raises:
        ConfigurationError: a target or number is out of bounds, or a file can't be written.
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
                f"{name}: {target:g} is not between 0.931, below which a total outage would not"
                " raise the alarm, and 1, which leaves no budget",
                field=name,
            )
    if least_bad_events < 1:
        raise ConfigurationError("least-bad-events: at least 1", field="least_bad_events")
    if not 0 <= worker_hour_usd < float("inf"):
        raise ConfigurationError("worker-hour-usd: not a price", field="worker_hour_usd")


def _yaml(value: object) -> str:
    return _HEAD + yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
