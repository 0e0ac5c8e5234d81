"""Alerts that only Terraform defines: for each subscription, each scheduled job, and the row
archive.

Each alert fires for its own problem, according to the plan's queries and filters.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock_monitoring.alerts import OFF_GOOGLE, Alert
from shared.logs import JsonFormatter
from shared.models.catalog_file import read_catalog
from shared.models.kubernetes_names import slug
from tests.infra.deploy.terraform import PROJECT, Plan, plan_platform
from tools.monitoring.tests.test_other_alerts import ALL, OF_OBJECTIVES, UP, Series, firing

SLUGS = [slug(model.name) for model in read_catalog(Path("models.yaml")).models]
ARCHIVED = Series("penstock_row_archive_oldest_seconds", {}, 0)
SUBSCRIPTION = "pubsub_googleapis_com:subscription_"
SEVERITIES = ("DEFAULT", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR", "CRITICAL", "ALERT")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    image = {"image": "registry.example.com/api@sha256:0"}
    return plan_platform(
        tmp_path_factory.mktemp("plan"),
        api=image | {"keys_in_redis": True, "max_instances": 1},
        functions={"reports": image},
    )


def conditions(plan: Plan, kind: str) -> dict[str, dict[str, Any]]:
    """The conditions of one kind, keyed by alert key."""
    return {
        policy["user_labels"]["alert"]: policy["conditions"][0][kind][0]
        for policy in plan.of("google_monitoring_alert_policy")
        if policy["conditions"][0][kind]
    }


@pytest.fixture(scope="module")
def on_metrics(everything: Plan) -> list[Alert]:
    asked = conditions(everything, "condition_prometheus_query_language")
    return [Alert(key, key, "WARNING", one["query"]) for key, one in asked.items()]


def test_no_other_alert_is_on_metrics(everything: Plan, on_metrics: list[Alert]) -> None:
    of_code = {alert.key for alert in ALL} | OF_OBJECTIVES
    of_models = {f"{kind}-{name}" for kind in ("backlog", "dead-letters") for name in SLUGS}
    made = {alert.key: alert for alert in on_metrics}
    assert made.keys() - of_code == of_models | {"row-archive-missing"}
    (archive,) = [alert for alert in OFF_GOOGLE if alert.key == "rows-not-archived"]
    asked = conditions(everything, "condition_prometheus_query_language")["rows-not-archived"]
    assert (asked["query"], asked["duration"]) == (archive.query, f"{archive.for_s}s")


def test_each_subscription_has_the_alert_of_its_jobs(
    everything: Plan, on_metrics: list[Alert]
) -> None:
    names = [one["name"] for one in everything.of("google_pubsub_subscription")]
    fired: dict[str, set[str]] = {}
    for name in names:
        labels = {"monitored_resource": "pubsub_subscription", "subscription_id": name}
        one_waits = Series(f"{SUBSCRIPTION}num_undelivered_messages", labels, 1)
        an_hour = Series(f"{SUBSCRIPTION}oldest_unacked_message_age", labels, 3600)
        fired[name] = firing(on_metrics, [one_waits, an_hour, ARCHIVED, UP])
        young = Series(an_hour.name, labels, 1)
        assert firing(on_metrics, [Series(one_waits.name, labels), young, ARCHIVED, UP]) == set()
    models = read_catalog(Path("models.yaml")).models
    assert {name: alerts for name, alerts in fired.items() if alerts} == {
        f"jobs.{model.name}.workers": {f"backlog-{slug(model.name)}"} for model in models
    } | {f"jobs.{model.name}.dead.keep": {f"dead-letters-{slug(model.name)}"} for model in models}


@pytest.mark.parametrize(
    ("series", "fires"),
    [
        ([], {"row-archive-missing"}),
        ([Series(ARCHIVED.name, {}, 1000)], {"rows-not-archived"}),
        ([ARCHIVED], set()),
    ],
    ids=["gone", "late", "well"],
)
def test_archive_that_is_late_or_gone_is_told(
    on_metrics: list[Alert], series: list[Series], fires: set[str]
) -> None:
    assert firing(on_metrics, [*series, UP]) == fires


def told(plan: Plan, entry: Mapping[str, Any]) -> set[str]:
    """The log alerts triggered by an entry."""
    asked = conditions(plan, "condition_matched_log")
    return {key for key, one in asked.items() if matches(one["filter"], entry)}


def matches(given: str, entry: Mapping[str, Any]) -> bool:
    """True if an entry matches a filter of the form `a AND b` or `(a AND b) OR (c)`.

    https://cloud.google.com/logging/docs/view/logging-query-language
    """
    parts = (
        given.removeprefix("(").removesuffix(")").split(") OR (") if given[0] == "(" else [given]
    )
    return any(all(_holds(one, entry) for one in part.split(" AND ")) for part in parts)


def _holds(comparison: str, entry: Mapping[str, Any]) -> bool:
    parsed = re.fullmatch(r'([\w.]+)(=|=~|>=)(?:"([^"]*)"|([A-Z]+))', comparison)
    assert parsed is not None, comparison
    value: Any = entry
    for name in parsed[1].split("."):
        value = value.get(name, {})
    wanted = parsed[3] if parsed[3] is not None else parsed[4]
    if parsed[2] == ">=":
        return SEVERITIES.index(value) >= SEVERITIES.index(wanted)
    if parsed[2] == "=~":
        return isinstance(value, str) and re.search(wanted, value) is not None
    return bool(value == wanted)


def entry_of(kind: str, labels: Mapping[str, str], severity: str = "ERROR") -> dict[str, Any]:
    return {"resource": {"type": kind, "labels": dict(labels)}, "severity": severity}


def test_each_scheduled_run_that_fails_is_told(everything: Plan) -> None:
    names = [one["name"] for one in everything.of("google_cloud_scheduler_job")]
    assert len(names) > 1
    for name in names:
        fires = "keys-export-failed" if name == "penstock-keys-export" else "reports-failed"
        failed = entry_of("cloud_scheduler_job", {"job_id": name})
        assert told(everything, failed) == {fires}
        assert told(everything, failed | {"severity": "INFO"}) == set()
    assert told(everything, entry_of("cloud_scheduler_job", {"job_id": "backups"})) == set()


def test_export_of_keys_that_fails_is_told(everything: Plan) -> None:
    (job,) = everything.of("google_cloud_run_v2_job")
    failed = entry_of("cloud_run_job", {"job_name": job["name"]})
    assert told(everything, failed) == {"keys-export-failed"}
    assert told(everything, failed | {"severity": "INFO"}) == set()
    assert told(everything, entry_of("cloud_run_job", {"job_name": "another"})) == set()


def test_anomaly_in_the_log_of_reports_is_told(everything: Plan) -> None:
    record = logging.makeLogRecord({"msg": "anomaly", "levelname": "WARNING", "measure": "usd"})
    said = json.loads(JsonFormatter(PROJECT).format(record))
    entry = entry_of("cloud_run_revision", {"service_name": "penstock-reports"}, said["severity"])
    assert told(everything, entry | {"jsonPayload": said}) == {"reports-anomalies"}
    assert told(everything, entry | {"jsonPayload": said | {"message": "sent"}}) == set()
