"""All alerts. docs/how-to/troubleshoot.md has a section for each.

Terraform adds alerts on each model's Pub/Sub subscriptions (platform/monitoring.tf). Metrics that
our processes don't export come from DCGM (GPUs), kube-state-metrics (pods, autoscalers), KEDA, and
either Google's own metrics or, elsewhere, the Redis and probe exporters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from penstock_monitoring.objectives import FAST, OBJECTIVES, SLOW, Bounds, burns

RUNBOOK = "docs/how-to/troubleshoot.md"

HARDWARE_XIDS = (48, 62, 64, 74, 79, 92, 95, 109, 119, 120, 136, 140, 143, 155, 156, 158)
"""Driver errors that indicate a failed GPU rather than a program error
(docs.nvidia.com/deploy/xid-errors, and EKS's node monitoring agent).
infra/kubernetes/gpu-nodes/gpu-monitor.json has the same list.
"""
_XIDS = " or ".join(f"DCGM_FI_DEV_XID_ERRORS == {xid}" for xid in HARDWARE_XIDS)
_HPA = "max by (location, horizontalpodautoscaler) (kube_horizontalpodautoscaler_"
_OF_WORKERS = '{horizontalpodautoscaler=~"(keda-hpa-)?worker-.+"})'

_SHORT_OF_MEMORY = ("redis-memory", "Redis: short of memory")
_OUTSIDE = ("outside-down", "Outside: the API does not answer")


@dataclass(frozen=True)
class Alert:
    """A condition that triggers a notification."""

    key: str
    title: str
    severity: Literal["CRITICAL", "WARNING"]
    """CRITICAL: someone must act now. WARNING: within days."""
    query: str
    """PromQL. Each series that the query returns is an incident."""
    for_s: int = 0
    """How long the query must return a series before the alert fires."""
    every_s: int = 60
    """How often the query is evaluated."""
    log_filter: str = ""
    """A Cloud Logging filter, for sources that Google does not scrape. In it, ${service} is the
    name of the function's service.
    """

    @property
    def anchor(self) -> str:
        """The anchor of the alert's section in RUNBOOK, in GitHub's format."""
        return re.sub(r"[^a-z0-9 -]", "", self.title.lower()).replace(" ", "-")

    @property
    def name(self) -> str:
        return "Penstock" + "".join(word.capitalize() for word in self.key.split("-"))


def alerts(bounds: Bounds) -> list[Alert]:
    """Returns the alerts of all platforms, sorted by key. Their queries contain `bounds`."""
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
    return sorted([*of_objectives, *_OTHERS, *_CLUSTER], key=lambda alert: alert.key)


# Conditions that the objectives miss or show too late: lost rows, unread keys, causes of slowness.
_OTHERS = (
    Alert(
        "cache-down",
        "Cache: Redis unreachable",
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
        # Without metrics, objectives stay silent, and an API that is down exports none.
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
        "Records: Redis unreachable",
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
        "Rows: BigQuery unreachable",
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


_CLUSTER = (
    Alert(
        "autoscaler-blind",
        "Autoscaler: it can't read its metrics",
        "CRITICAL",
        # After six failed reads, one every 5 s, KEDA falls back to the current number of replicas.
        "sum by (scaledObject) (increase(keda_scaler_detail_errors_total[5m])) > 6",
        for_s=120,
    ),
    Alert(
        "gpu-failed",
        "GPU: it has failed",
        "CRITICAL",
        f"max by (Hostname, gpu) ({_XIDS})"
        " or max by (Hostname, gpu) (increase(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL[1h]) > 0)"
        " or max by (Hostname, gpu) (DCGM_FI_DEV_ROW_REMAP_FAILURE > 0)"
        " or sum by (worker) (increase(penstock_worker_lost_gpus_total[15m])) > 1",
    ),
    Alert(
        "pods-pending",
        "Workers: pods wait for a place",
        "WARNING",
        'sum by (location) (kube_pod_status_phase{phase="Pending",pod=~"worker-.+"}) > 0',
        # A node takes several minutes to start, and longer if a different type is used instead.
        for_s=1200,
    ),
    Alert(
        "replicas-at-bound",
        "Workers: as many as they may be",
        "WARNING",
        f"{_HPA}status_current_replicas{_OF_WORKERS} >= {_HPA}spec_max_replicas{_OF_WORKERS}"
        f" and {_HPA}spec_max_replicas{_OF_WORKERS} > {_HPA}spec_min_replicas{_OF_WORKERS}",
        for_s=900,
    ),
)
"""Alerts on GPUs, pods, and autoscalers, no matter where the cluster runs."""


ON_GOOGLE = (
    Alert(
        *_OUTSIDE,
        "CRITICAL",
        # From at least two locations, because a single location might itself be cut off.
        "count by (check_id) (monitoring_googleapis_com:uptime_check_check_passed"
        '{monitored_resource="uptime_url"} == 0) > 1',
        for_s=120,
    ),
    Alert(
        "pubsub-quota",
        "Pub/Sub: a quota is used up",
        "CRITICAL",
        "sum by (quota_metric) (increase(serviceruntime_googleapis_com:quota_exceeded"
        '{monitored_resource="consumer_quota",service="pubsub.googleapis.com"}[5m])) > 0'
        " or sum by (topic_id) (increase(pubsub_googleapis_com:topic_send_request_count"
        '{monitored_resource="pubsub_topic",response_code="resource_exhausted"}[5m])) > 0',
    ),
    Alert(
        *_SHORT_OF_MEMORY,
        "WARNING",
        # Old results are evicted first, when a node is 80% full. Memory used beyond that can't be
        # evicted.
        "max by (instance_id) (memorystore_googleapis_com:instance_memory_maximum_utilization"
        '{monitored_resource="memorystore.googleapis.com/Instance"}) > 0.9',
        for_s=600,
    ),
)
"""Alerts on Google's own metrics."""

OFF_GOOGLE = (
    Alert(
        *_OUTSIDE,
        "CRITICAL",
        # Exported by prometheus-community's blackbox_exporter.
        'max by (instance) (probe_success{job="penstock-outside"}) < 1',
        for_s=120,
    ),
    Alert(
        *_SHORT_OF_MEMORY,
        "WARNING",
        # Exported by oliver006's redis_exporter: writes rejected because nothing could be evicted.
        'sum by (instance) (increase(redis_errors_total{err="OOM"}[15m])) > 0',
    ),
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
"""Alerts that replace the ones on Google's own metrics and services."""

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
        # Cloud Scheduler's own log also includes runs that never reached the function.
        log_filter='resource.type="cloud_scheduler_job"'
        ' AND resource.labels.job_id=~"^${service}-" AND severity>=ERROR',
    ),
)
"""Alerts on functions. On Google Cloud, nothing scrapes functions, so their alerts read logs."""
