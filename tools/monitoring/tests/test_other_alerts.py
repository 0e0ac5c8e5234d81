"""Each alert that isn't about an objective fires when it must, stays silent when it must, and links
to a section of the runbook.

Our own evaluator runs Cloud Monitoring's queries. If promtool is installed, it runs Prometheus'
queries, including each alert's hold time.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock_monitoring.alerts import OF_FUNCTIONS, OFF_GOOGLE, ON_GOOGLE, RUNBOOK, Alert, alerts
from penstock_monitoring.files import rules
from penstock_monitoring.objectives import (
    DEFAULT_LEAST_BAD_EVENTS,
    DEFAULT_TARGETS,
    OBJECTIVES,
    bounds_of,
)
from penstock_planning.simulation.promql import PromQuery
from penstock_planning.simulation.timeseries import TimeSeries
from tests.limits import START_LIMIT_S

BOUNDS = bounds_of(DEFAULT_TARGETS, DEFAULT_LEAST_BAD_EVENTS)
OF_OBJECTIVES = {f"{objective.name}-{key}" for objective in OBJECTIVES for key in ("fast", "slow")}
IN_PROMETHEUS = (*alerts(BOUNDS), *OFF_GOOGLE, *OF_FUNCTIONS)
HOUR = 60
XID = "DCGM_FI_DEV_XID_ERRORS"
L4 = {"Hostname": "gke-l4-1", "gpu": "0"}
HPA = {"horizontalpodautoscaler": "keda-hpa-worker-sd", "namespace": "penstock"}
QUOTA = {"monitored_resource": "consumer_quota", "service": "pubsub.googleapis.com"}
PUBLISH = {"monitored_resource": "pubsub_topic", "topic_id": "jobs.sd"}
MEMORY = "memorystore_googleapis_com:instance_memory_maximum_utilization"
STORE = {"monitored_resource": "memorystore.googleapis.com/Instance", "instance_id": "records"}
UPTIME = "monitoring_googleapis_com:uptime_check_check_passed"


@dataclass(frozen=True)
class Series:
    """A gauge that keeps its value for an hour, or a counter that grows by `per_min` from 0."""

    name: str
    labels: Mapping[str, str]
    value: float = 0.0
    per_min: float = 0.0

    def at(self, minute: int) -> float:
        return self.value + self.per_min * minute


def hpa(name: str, value: float, **labels: str) -> Series:
    return Series(f"kube_horizontalpodautoscaler_{name}", HPA | labels, value)


def bound(current: float, most: float, least: float, **labels: str) -> list[Series]:
    counts = {
        "status_current_replicas": current,
        "spec_max_replicas": most,
        "spec_min_replicas": least,
    }
    return [hpa(name, value, **labels) for name, value in counts.items()]


def pending(value: float, **labels: str) -> Series:
    base_labels = {"phase": "Pending", "pod": "worker-sd-7f-x", "namespace": "penstock"}
    return Series("kube_pod_status_phase", base_labels | labels, value)


def uptime(value: float, place: str) -> Series:
    labels = {"monitored_resource": "uptime_url", "check_id": "a", "checker_location": place}
    return Series(UPTIME, labels, value)


def keda(per_min: float) -> Series:
    return Series("keda_scaler_detail_errors_total", {"scaledObject": "worker-sd"}, 0, per_min)


FIRES: list[tuple[str, list[Series]]] = [
    ("autoscaler-blind", [keda(12)]),
    ("cache-down", [Series("penstock_cache_redis_up", {}, 0)]),
    ("canary-taken-back", [Series("penstock_canary_taken_back", {"model": "m"}, 1)]),
    ("gpu-failed", [Series(XID, L4, 79)]),
    ("gpu-failed", [Series(XID, L4, 48)]),
    ("gpu-failed", [Series("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", L4, 0, 1)]),
    ("gpu-failed", [Series("DCGM_FI_DEV_ROW_REMAP_FAILURE", L4, 1)]),
    ("gpu-failed", [Series("penstock_worker_lost_gpus_total", {"worker": "sd"}, 0, 1)]),
    ("keys-unread", [Series("penstock_keys_up", {}, 0)]),
    ("metrics-missing", [Series("penstock_worker_items_waiting", {}, 0)]),
    (
        "model-process-deaths",
        [Series("penstock_worker_model_process_deaths_total", {"worker": "sd"}, 0, 1)],
    ),
    ("objects-failing", [Series("penstock_objects_errors_total", {}, 0, 1)]),
    ("outside-down", [uptime(0, "usa"), uptime(0, "eur"), uptime(1, "apac")]),
    ("outside-down", [Series("probe_success", {"job": "penstock-outside", "instance": "a"}, 0)]),
    ("pods-pending", [pending(1)]),
    ("pubsub-quota", [Series("serviceruntime_googleapis_com:quota_exceeded", QUOTA, 0, 1)]),
    (
        "pubsub-quota",
        [
            Series(
                "pubsub_googleapis_com:topic_send_request_count",
                PUBLISH | {"response_code": "resource_exhausted"},
                0,
                1,
            )
        ],
    ),
    ("records-down", [Series("penstock_records_redis_up", {}, 0)]),
    (
        "records-dropped",
        [
            Series("penstock_answers_dropped_total", {}, 0, 1),
            Series("penstock_predictions_dropped_total", {}, 0, 0),
        ],
    ),
    ("redis-memory", [Series(MEMORY, STORE, 0.95)]),
    ("redis-memory", [Series("redis_errors_total", {"err": "OOM", "instance": "a"}, 0, 1)]),
    ("replicas-at-bound", bound(20, 20, 1)),
    ("reports-anomalies", [Series("penstock_reports_anomalies_total", {"measure": "m"}, 0, 1)]),
    (
        "reports-failed",
        [Series("penstock_reports_runs_total", {"run": "daily", "outcome": "failed"}, 0, 1)],
    ),
    ("dead-letters", [Series("penstock_functions_dead_letters_total", {}, 0, 1)]),
    ("rows-late", [Series("penstock_rows_oldest_seconds", {}, 400)]),
    ("rows-lost", [Series("penstock_rows_lost_total", {}, 0, 1)]),
    ("rows-not-archived", [Series("penstock_row_archive_oldest_seconds", {}, 1000)]),
    ("rows-rejected", [Series("penstock_rows_rejected_total", {}, 0, 1)]),
    ("rows-unsafe", [Series("penstock_rows_disk_up", {}, 0)]),
    ("undecodable", [Series("penstock_worker_undecodable_messages_total", {}, 0, 1)]),
]
UP = Series("penstock_api_requests_open", {}, 0)
"""Without this series, no metrics arrive from the API."""
SILENT: list[tuple[str, list[Series]]] = [
    ("a program's own error", [Series(XID, L4, 31), Series(XID, L4 | {"gpu": "1"}, 43)]),
    ("no error", [Series(XID, L4, 0), Series("DCGM_FI_DEV_ROW_REMAP_FAILURE", L4, 0)]),
    ("old ECC errors", [Series("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", L4, 5)]),
    ("below the bound", bound(19, 20, 1)),
    ("a model of a fixed size", bound(2, 2, 2)),
    ("another autoscaler", bound(5, 5, 1, horizontalpodautoscaler="web")),
    ("one at its bound, by name", [*bound(3, 20, 1), *bound(1, 1, 1, namespace="b")]),
    ("pods that run", [pending(0), pending(1, phase="Running"), pending(1, pod="other-1")]),
    ("one place is cut off", [uptime(0, "usa"), uptime(1, "eur"), uptime(1, "apac")]),
    ("a few failed reads", [keda(0.5)]),
    ("room in Redis", [Series(MEMORY, STORE, 0.8)]),
    (
        "publishes",
        [
            Series(
                "pubsub_googleapis_com:topic_send_request_count",
                PUBLISH | {"response_code": "success"},
                0,
                9,
            )
        ],
    ),
    (
        "another service's quota",
        [
            Series(
                "serviceruntime_googleapis_com:quota_exceeded",
                QUOTA | {"service": "compute.googleapis.com"},
                0,
                1,
            )
        ],
    ),
    ("one lost GPU", [Series("penstock_worker_lost_gpus_total", {"worker": "sd"}, 1)]),
]


def firing(given: Iterable[Alert], series: Iterable[Series]) -> set[str]:
    """Returns the alerts whose queries return a series after an hour."""
    stored = TimeSeries()
    for stream in series:
        for minute in range(HOUR + 1):
            labels = tuple(sorted(stream.labels.items()))
            stored.append(stream.name, labels, minute * 60.0, stream.at(minute))
    return {
        alert.key
        for alert in given
        if alert.key not in OF_OBJECTIVES and PromQuery(alert.query).value(stored, HOUR * 60.0)
    }


ALL = (*IN_PROMETHEUS, *ON_GOOGLE)


@pytest.mark.parametrize(("key", "series"), FIRES)
def test_alert_fires_alone(key: str, series: list[Series]) -> None:
    stored = series if key == "metrics-missing" else [*series, UP]
    assert firing(ALL, stored) == {key}


@pytest.mark.parametrize(("about", "series"), SILENT, ids=[about for about, _ in SILENT])
def test_what_is_usual_is_silent(about: str, series: list[Series]) -> None:
    assert firing(ALL, [*series, UP]) == set()


def test_each_alert_has_a_case() -> None:
    assert {key for key, _ in FIRES} == {alert.key for alert in ALL} - OF_OBJECTIVES


def test_each_alert_leads_to_a_section_that_says_what_to_do() -> None:
    text = Path(RUNBOOK).read_text(encoding="utf-8")
    sections = {}
    for heading, body in re.findall(r"^#{2,3} (.+)\n((?:(?!#).*\n)*)", text, re.MULTILINE):
        anchor = re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
        sections[anchor] = body.split()
    for alert in ALL:
        assert len(sections[alert.anchor]) >= 12, alert.title


@pytest.mark.slow
def test_alerts_of_prometheus_fire_there(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    # Excludes the objective alerts, which look back several days.
    groups = [
        group for group in rules(BOUNDS, "file")["groups"] if group["name"] == "penstock-alerts"
    ]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": groups}), encoding="utf-8")
    named = {alert.key: alert for alert in IN_PROMETHEUS}
    cases = [
        (key, series) for key, series in FIRES if key in named and firing([named[key]], series)
    ]
    tests = {
        "rule_files": ["rules.yaml"],
        "tests": [as_promtool(named[key], key, series) for key, series in cases],
    }
    (tmp_path / "tests.yaml").write_text(json.dumps(tests), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {key for key, _ in cases} == named.keys() - OF_OBJECTIVES


def as_promtool(alert: Alert, key: str, series: list[Series]) -> dict[str, object]:
    firing = f'count(ALERTS{{alertname="{alert.name}",alertstate="firing"}})'
    stored = series if key == "metrics-missing" else [*series, UP]
    return {
        "name": key,
        "interval": "1m",
        "input_series": [as_input(stream) for stream in stored],
        "promql_expr_test": [
            {"expr": firing, "eval_time": "59m", "exp_samples": [{"labels": "{}", "value": 1}]}
        ],
    }


def as_input(one: Series) -> dict[str, str]:
    labels = ",".join(f"{name}={json.dumps(value)}" for name, value in one.labels.items())
    values = " ".join(f"{one.at(minute):g}" for minute in range(HOUR + 1))
    return {"series": f"{one.name}{{{labels}}}", "values": values}
