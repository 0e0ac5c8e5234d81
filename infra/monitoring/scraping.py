"""What a Prometheus beside the local stack reads: its configuration."""

from __future__ import annotations

from typing import Any

from infra.local.ports import Ports
from shared.catalog import Catalog
from shared.kubernetes_names import slug

INTERVAL = "10s"
"""As Managed Prometheus scrapes in the cloud."""


def prometheus_config(catalog: Catalog, ports: Ports, rules_file: str) -> dict[str, Any]:
    """The configuration of Prometheus for `penstock up`.

    Args:
        catalog: the models. Each has one worker, whose series get the label `worker`.
        ports: of the stack.
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
