"""Every metric, label and label value used in an alert, a dashboard or the autoscaler is exported
by one of the product's processes.
"""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from api.http.middleware import UNTRACED
from infra.kubernetes.autoscaling import TriggerQueries
from infra.kubernetes.deployment import OwnPrometheus
from shared.models.catalog_file import read_catalog
from shared.money.charge import SHARED
from shared.money.slo import ENDS
from tests.limits import START_LIMIT_S
from tools.monitoring.tests.promql import asked_by, grafana_queries, queries

MODULES = (
    "api.__main__",
    "api.batch_runner.runner",
    "workers.__main__",
    "workers.functions.main",
    "workers.functions.__main__",
    "infra.row_archive.__main__",
)
"""Modules that the product's processes import at startup, which registers their metrics."""
_DUMP = """
import importlib, json, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
from prometheus_client import REGISTRY
print(json.dumps({c._name: [c._type, list(c._labelnames)] for c in REGISTRY._collector_to_names
                  if hasattr(c, "_labelnames")}))
"""
_SAMPLES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
FROM_THE_COLLECTOR = "worker"
"""Label on the workers' series, set in infra/kubernetes/cluster/pod-monitoring.yaml and
penstock_monitoring/files.py.
"""
OF_GOOGLE = {
    "pubsub_googleapis_com:subscription_oldest_unacked_message_age",
    "pubsub_googleapis_com:subscription_num_undelivered_messages",
}
_HPA_LABELS = {"location", "horizontalpodautoscaler"}
_OF_DCGM = {"Hostname", "gpu"}
OF_OTHERS = {
    "DCGM_FI_DEV_XID_ERRORS": _OF_DCGM,
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": _OF_DCGM,
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": _OF_DCGM,
    "keda_scaler_detail_errors_total": {"scaledObject"},
    "kube_horizontalpodautoscaler_spec_max_replicas": _HPA_LABELS,
    "kube_horizontalpodautoscaler_spec_min_replicas": _HPA_LABELS,
    "kube_horizontalpodautoscaler_status_current_replicas": _HPA_LABELS,
    "kube_pod_status_phase": {"location", "phase", "pod"},
    "memorystore_googleapis_com:instance_memory_maximum_utilization": {
        "instance_id",
        "monitored_resource",
    },
    "monitoring_googleapis_com:uptime_check_check_passed": {"check_id", "monitored_resource"},
    "probe_success": {"instance", "job"},
    "pubsub_googleapis_com:topic_send_request_count": {
        "monitored_resource",
        "response_code",
        "topic_id",
    },
    "redis_errors_total": {"instance", "err"},
    "serviceruntime_googleapis_com:quota_exceeded": {
        "monitored_resource",
        "quota_metric",
        "service",
    },
}
"""Metrics exported by other programs, along with the labels we use:

DCGM's exporter (etc/default-counters.csv), kube-state-metrics, KEDA (Integrate with Prometheus),
Google's list of metrics, blackbox_exporter and redis_exporter.
"""
RECORDED = re.compile(r"penstock:slo_(errors:ratio|bad:increase)\d+[mhd]")


@cache
def exported() -> dict[str, set[str]]:
    """Returns the labels of each of our series, by name."""
    metrics: dict[str, set[str]] = {}
    done = subprocess.run(
        [sys.executable, "-c", _DUMP, *MODULES],
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=True,
    )
    for name, (kind, labels) in json.loads(done.stdout).items():
        for suffix in _SAMPLES[kind]:
            extra = {"le"} if suffix == "_bucket" else set()
            metrics[name + suffix] = {*labels, *extra}
    return metrics


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_metrics_and_labels_are_exported(where: str, query: str) -> None:
    parsed = asked_by(query)
    known: set[str] = set()
    for name, matchers in parsed.metrics.items():
        if name in OF_GOOGLE:
            known |= {"subscription_id", "monitored_resource"}
        elif RECORDED.fullmatch(name):
            known |= {"objective", "scope", "model"}
        elif name in OF_OTHERS:
            assert {label for label, _ in matchers} <= OF_OTHERS[name], where
            known |= OF_OTHERS[name]
        else:
            assert name in exported(), where
            assert {label for label, _ in matchers} <= exported()[name], where
            known |= exported()[name]
            known |= {FROM_THE_COLLECTOR} if name.startswith("penstock_worker_") else set()
    assert parsed.labels <= known


@pytest.mark.parametrize(
    ("prometheus", "added"),
    [
        (None, {"location"}),
        (OwnPrometheus(url="", labels={"namespace": "ours"}, has_rabbitmq=True), {"namespace"}),
    ],
    ids=["managed", "own"],
)
def test_autoscaler_asks_for_what_is_exported(
    prometheus: OwnPrometheus | None, added: set[str]
) -> None:
    for model in read_catalog(Path("models.yaml")).deployed:
        queries = TriggerQueries([model], "worker", "here", 2, prometheus)
        for query in (queries.arrivals(), queries.work(), queries.messages()):
            assert query is not None
            for name, matchers in asked_by(query).metrics.items():
                labels = {label for label, _ in matchers}
                if name in OF_GOOGLE:
                    assert labels == {"subscription_id", "monitored_resource"}
                    continue
                of_workers = name.startswith("penstock_worker_")
                known = exported()[name] | added | ({FROM_THE_COLLECTOR} if of_workers else set())
                assert labels <= known, name


def test_values_of_labels_exist() -> None:
    values = {
        (label, value)
        for _, query in queries()
        for name, matchers in asked_by(query).metrics.items()
        if name not in OF_OTHERS
        for label, text in matchers
        for value in text.split("|")
    }
    assert {value for label, value in values if label == "end"} <= set(ENDS)
    assert {value for label, value in values if label == "cache"} == SHARED
    assert {value for label, value in values if label == "route"} == UNTRACED


def test_legends_name_labels_of_their_queries() -> None:
    legends: set[str] = set()
    for title, query, legend in grafana_queries():
        named = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert named <= asked_by(query).labels, title
        legends |= named
    assert "model" in legends
