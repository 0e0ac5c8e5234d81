"""A single Terraform variable sets the destination for spans from the API, functions and workers
alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from shared.tracing.setup import DEFAULT_RATIO, export_spans
from shared.tracing.spans import begin
from tests.infra.deploy.manifests import of_kind, render, settings_of, workers
from tests.infra.deploy.terraform import Plan, api_settings, function_settings, plan_platform

GOOGLE = "https://telemetry.googleapis.com"
IN_CLUSTER = "http://opentelemetry-collector.gke-managed-otel.svc.cluster.local:4318"
REGION = "europe-west4"
IMAGE = "registry.example.com/function@sha256:0"
WRITER = "roles/telemetry.tracesWriter"


def writers(plan: Plan) -> set[str]:
    """Accounts that may write spans, without the part of the name that contains the project."""
    members = [found for found in plan.of("google_project_iam_member") if found["role"] == WRITER]
    return {found["member"].partition("@")[0].rpartition(":")[2] for found in members}


def of_otel(settings: Mapping[str, str | None]) -> dict[str, str | None]:
    return {name: value for name, value in settings.items() if name.startswith("OTEL_")}


def traced_plan(folder: Path, **traces: object) -> Plan:
    functions = {"dead_letters": {"image": IMAGE}, "webhooks": {"image": IMAGE}}
    return plan_platform(folder, traces=traces, functions=functions)


def test_without_an_endpoint_nothing_is_set(plan: Plan) -> None:
    assert of_otel(api_settings(plan, REGION)) == {}
    assert writers(plan) == set()


@pytest.mark.slow
def test_google_takes_spans_of_all_who_may_write_them(tmp_path: Path) -> None:
    plan = traced_plan(tmp_path, endpoint=GOOGLE)
    given = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": GOOGLE,
        "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER": "gcp_http_credentials",
    }
    assert of_otel(api_settings(plan, REGION)) == given | {
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(DEFAULT_RATIO),
    }
    for function in ("penstock-dead-letters", "penstock-webhooks"):
        assert of_otel(function_settings(plan, function)) == given
    accounts = {"penstock-api", "penstock-dead-letters", "penstock-webhooks"}
    assert {member for member in writers(plan) if not member.startswith("//")} == accounts
    services = {found["service"] for found in plan.of("google_project_service")}
    assert {"telemetry.googleapis.com", "cloudtrace.googleapis.com"} <= services


@pytest.mark.slow
def test_process_accepts_what_terraform_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The credentials are the exception, because this machine does not have them."""
    plan = traced_plan(tmp_path, endpoint=GOOGLE, ratio=1)
    for name, value in of_otel(api_settings(plan, REGION)).items():
        if "CREDENTIAL" not in name:
            monkeypatch.setenv(name, value or "")
    with export_spans("penstock-api", project="p", region="r", broker="b", decides=True):
        is_recorded = begin("request", "server", time.time(), None).is_recorded
    assert is_recorded
    assert not begin("request", "server", time.time(), None).is_recorded


def test_workers_get_the_variables_and_reach_the_collector(tmp_path: Path) -> None:
    traces = {"OTEL_EXPORTER_OTLP_ENDPOINT": IN_CLUSTER}
    objects = render(tmp_path / "out", traces=traces)
    for deployment in workers(objects).values():
        assert of_otel(settings_of(objects, deployment)) == traces
    egress = of_kind(objects, "NetworkPolicy")["workers"]["spec"]["egress"]
    (rule,) = [rule for rule in egress if rule["ports"][0]["port"] == 4318]
    ((selector,),) = [list(to["namespaceSelector"]["matchLabels"].values()) for to in rule["to"]]
    assert selector in IN_CLUSTER
