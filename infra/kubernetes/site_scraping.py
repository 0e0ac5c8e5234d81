"""What the Prometheus of a site reads, so that the autoscaler's queries find it there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from infra.kubernetes.site import RabbitBroker, SelfHostedSite
from infra.kubernetes.site_settings import series_labels

SCRAPE_FILE = "scrape.yaml"
INTERVAL = "10s"
"""As Managed Prometheus scrapes. The queries look at a minute of samples."""
_LABEL = "__meta_kubernetes_pod_label_"
_PORT = "__meta_kubernetes_pod_container_port_name"


def write_scraping(folder: Path, site: SelfHostedSite) -> None:
    """Writes the configuration into the folder of an overlay, which does not apply it."""
    text = yaml.safe_dump({"scrape_configs": [_job(site)]}, sort_keys=False)
    (folder / SCRAPE_FILE).write_text(text, encoding="utf-8")


def _job(site: SelfHostedSite) -> dict[str, Any]:
    chosen = ["penstock-(api|batches|row-archive);metrics", "penstock-worker;health"]
    if isinstance(site.broker, RabbitBroker):
        chosen.append("penstock-functions;http")
    by_name = {"source_labels": [f"{_LABEL}app_kubernetes_io_name", _PORT]}
    return {
        "job_name": site.namespace,
        "scrape_interval": INTERVAL,
        "kubernetes_sd_configs": [{"role": "pod", "namespaces": {"names": [site.namespace]}}],
        "relabel_configs": [
            by_name | {"regex": "|".join(chosen), "action": "keep"},
            {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
            {"source_labels": [f"{_LABEL}penstock_dev_model"], "target_label": "worker"},
            *(
                {"target_label": name, "replacement": value}
                for name, value in series_labels(site).items()
            ),
        ],
    }
