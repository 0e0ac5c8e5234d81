"""A plan rejects invalid values of Terraform variables, naming the variable and the reason.

A plan reports all invalid variables at once, so each plan here has one invalid value for many
variables. Variables that are checked against others have plans in which the others are valid.
"""

from __future__ import annotations

import json
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.infra.deploy.terraform import PROJECT, STAGES, refusals

pytestmark = pytest.mark.slow

RIGHT: dict[str, Any] = {
    "project_id": PROJECT,
    "registry_location": "europe",
    "api": {"max_instances": 1},
    "inboxes": {"per_region": 2, "slots": 2},
}
Wrong = dict[str, list[tuple[Any, str]]]

FIRST: Wrong = {
    "alert_tokens": [
        ({"slack": "two words"}, "must not contain spaces"),
        ({"slak": "a"}, "use only pagerduty and slack"),
    ],
    "alerts": [
        ({"emails": ["oncall"]}, "alerts.emails"),
        ({"emails": ["oncall@example"]}, "alerts.emails"),
        ({"runbook_url": "docs/how-to/troubleshoot.md"}, "alerts.runbook_url"),
        ({"oldest_job_s": 0}, "alerts.oldest_job_s"),
    ],
    "api": [
        ({"max_instances": 1, "memory": "64Mi"}, "at least 512Mi"),
        ({"max_instances": 1, "memory": "1G"}, "the form 1Gi"),
        ({"max_instances": 1, "memory": "16Gi"}, "4Gi per CPU"),
        ({"max_instances": 1, "cpu": 4, "memory": "1Gi"}, "2Gi with 4 CPUs"),
        ({"max_instances": 1, "cpu": 3}, "api.cpu"),
        ({"max_instances": 1, "concurrency": 1.5}, "whole numbers"),
        ({"max_instances": 1, "min_instances": 0}, "api.min_instances"),
        ({"max_instances": 1, "concurrency": 2000}, "api.concurrency"),
        ({"max_instances": 1, "max_in_flight": 0}, "api.max_in_flight"),
        ({"max_instances": 1, "timeout_s": 300}, "api.timeout_s"),
        ({"max_instances": 1, "timeout_s": 4000}, "api.timeout_s"),
        ({"max_instances": 1, "image": "an image"}, "api.image"),
        ({"max_instances": 1, "metrics_image": "an image"}, "api.metrics_image"),
        ({"max_instances": 1, "prediction_keep_s": 5}, "api.prediction_keep_s"),
    ],
    "armor": [
        ({"requests_per_min": 0}, "armor.requests_per_min"),
        ({"requests_per_min": 20000}, "armor.ban_above_per_min"),
        ({"requests_per_min": 0.5}, "whole numbers"),
    ],
    "budget": [
        ({"billing_account": "garbage", "units_per_month": 1}, "budget.billing_account"),
        (
            {"billing_account": "billingAccounts/012345-6789AB-CDEF01", "units_per_month": 1},
            "budget.billing_account",
        ),
        ({"billing_account": "012345-6789AB-CDEF01", "units_per_month": 0}, "units_per_month"),
        (
            {
                "billing_account": "012345-6789AB-CDEF01",
                "currency": "euro",
                "units_per_month": 1,
            },
            "budget.currency",
        ),
    ],
    "cache": [
        ({"engine_version": "REDIS_7"}, "cache.engine_version"),
        ({"node_type": "LARGE"}, "cache.node_type"),
        ({"replicas": 6}, "cache.replicas"),
        ({"replicas": 0.5}, "cache.replicas"),
        ({"backup_days": 400}, "cache.backup_days"),
        ({"maintenance": {"day": "Sunday"}}, "cache.maintenance"),
        ({"maintenance": {"hour_utc": 24}}, "cache.maintenance"),
        ({"from_backup": "b"}, "cache.from_backup"),
    ],
    "dataset": [("rows-of-penstock", "letters, digits and underscores")],
    "analysts": [
        ({"a' OR TRUE --": {"members": []}}, "letters, digits"),
        ({"a-b": {"members": []}, "a.b": {"members": []}}, "share a dataset"),
        ({"acme": {"members": ["allUsers"]}}, "Public members"),
        ({"acme": {"members": ["eve@example.com"]}}, "must start with user:"),
    ],
    "dataset_location": [("eu", "dataset_location"), ("europe-west99", "dataset_location")],
    "domain": [
        ("https://api.example.com", "such as api.example.com"),
        ("example", "such as api.example.com"),
        ("api.example.com/v1", "such as api.example.com"),
    ],
    "functions": [
        ({"webhooks": {"image": "no tag"}}, "digest or a tag"),
        ({"reports": {"image": "no tag"}}, "digest or a tag"),
        ({"reports": {"image": "a:1", "time_zone": "../UTC"}}, "functions.reports.time_zone"),
        ({"reports": {"image": "a:1", "schedule": "daily"}}, "functions.reports.schedule"),
    ],
    "gpu_hour_usd": [({"l4": -1}, "at least 0")],
    "invoices": [
        ({"tax_percent": -1}, "invoices.tax_percent"),
        ({"tax_percent": 101}, "invoices.tax_percent"),
    ],
    "labels": [({"Team": "a"}, "lowercase"), ({"goog-a": "b"}, "goog")],
    "namespace": [("Penstock", "lowercase"), ("kube-system", "reserved"), ("keda", "reserved")],
    "network_cidr": [
        ("10.64.0.0/16", "/10"),
        ("10.64.0.1/10", "first address"),
        ("8.0.0.0/8", "public addresses"),
        ("fd00::/8", "10.0.0.0/8"),
        ("everything", "/10"),
    ],
    "nodes": [
        ({"max_gpus": 0}, "nodes.max_gpus"),
        ({"max_gpus": 1.5}, "nodes.max_gpus"),
        ({"max_gpus": 5000}, "nodes.max_gpus"),
        ({"overflow": "h900"}, "overflow"),
        ({"general": {"max": 0}}, "nodes.general"),
        ({"general": {"max": 1, "min": 2}}, "nodes.general"),
        ({"general": {"machine_type": "large"}}, "nodes.general.machine_type"),
        ({"release_channel": "FAST"}, "nodes.release_channel"),
        ({"min_version": "1.35"}, "nodes.min_version"),
        ({"min_version": "1.34.9-gke.1"}, "nodes.min_version"),
    ],
    "prefix": [
        ("p", "2 to 11"),
        ("penstock-production", "2 to 11"),
        ("penstock-", "not end in a hyphen"),
        ("gcp-a", "Google reserves"),
    ],
    "project_id": [
        ("My Project", "not its number or name"),
        ("123456789012", "not its number or name"),
    ],
    "regions": [
        ({}, "at least one region"),
        ({"europe-west99": {}}, "not in platform/places.tf: europe-west99"),
        ({"europe-west4-a": {}}, "not in platform/places.tf: europe-west4-a"),
        ({"europe-west4": {"zones": ["europe-west1-b"]}}, "zone of that region"),
        ({"europe-west4": {"zones": []}}, "at least one zone"),
        ({"europe-west4": {"zones": ["europe-west4-a", "europe-west4-a"]}}, "without repeats"),
        ({"europe-west4": {"max_gpus": 0}}, "max_gpus"),
        ({"europe-west4": {"max_gpus": 1.5}}, "max_gpus"),
        ({"europe-west4": {"index": 16}}, "index"),
        ({"europe-west4": {"index": 0.5}}, "index"),
        ({"europe-west4": {"overflow": "h900"}}, "overflow"),
        ({"europe-west4": {"drained": True}}, "must not be drained"),
        ({"europe-west1": {}, "europe-west4": {}}, "different for each region"),
    ],
    "secrets_version": [(0, "at least 1"), (1.5, "whole number")],
    "slos": [
        ({"availability": 0.5}, "slos.availability"),
        ({"deadlines": 1}, "slos.deadlines"),
        ({"least_bad_events": 0.5}, "slos.least_bad_events"),
    ],
    "storage_location": [("EUROPE", "storage_location"), ("us-east99", "storage_location")],
    "traces": [
        ({"endpoint": "telemetry.googleapis.com"}, "URLs without a path"),
        ({"endpoint": "https://a.example.com", "ratio": 2}, "traces.ratio"),
        ({"endpoint": "https://a.example.com", "sampler": "always"}, "traces.sampler"),
        ({"workers_endpoint": "http://collector:4318"}, "requires traces.endpoint"),
    ],
}
CHECKED_AGAINST_FIRST: Wrong = {
    "batches": [
        ({"instances": 0.5}, "batches.instances"),
        ({"instances": -1}, "batches.instances"),
        ({"memory": "64Mi"}, "batches.memory"),
        ({"memory": "8Gi"}, "batches.memory"),
    ],
    "delivery": [
        ({"ack_deadline_s": 5}, "delivery.ack_deadline_s"),
        ({"ack_deadline_s": 10.5}, "whole numbers"),
        ({"max_delivery_attempts": 1}, "delivery.max_delivery_attempts"),
        ({"retention_s": 60}, "deadline.longest_s"),
        ({"retry_min_s": 20}, "delivery.retry_min_s"),
    ],
    "inboxes": [
        ({"per_region": 1}, "at least twice"),
        ({"per_region": 2.5}, "whole number"),
        ({"per_region": 2000}, "at most 1000"),
        ({"per_region": 2, "slots": 0}, "inboxes.slots"),
        ({"per_region": 200, "slots": 100}, "9000"),
        ({"per_region": 2, "slots": 2.5}, "inboxes.slots"),
        ({"kept_slots": 1, "per_region": 2, "slots": 2}, "inboxes.kept_slots"),
    ],
    "outside": [
        ({"dc": {"issuer": "http://oidc.example.com"}}, "https"),
        ({"DC": {"issuer": "https://oidc.example.com"}}, "3 to 20"),
        ({"elsewhere": {"issuer": "https://oidc.example.com", "models": ["none"]}}, "models.yaml"),
        ({"elsewhere": {"issuer": "https://a.example.com", "namespace": "A"}}, "namespace"),
        (
            {"elsewhere": {"issuer": "https://a.example.com", "redis_cidr": "10.0.0.0/24"}},
            "set both redis_url and redis_cidr",
        ),
    ],
    "records": [
        ({"engine_version": "REDIS_7"}, "records.engine_version"),
        ({"node_type": "M1"}, "records.node_type"),
        ({"replicas": -1}, "records.replicas"),
        ({"backup_days": -1}, "records.backup_days"),
        ({"maintenance": {"day": "DAILY"}}, "records.maintenance"),
        ({"from_backup": "b"}, "records.from_backup"),
    ],
    "rows": [
        ({"every_s": 30}, "rows.every_s"),
        ({"every_s": 120.5}, "rows.every_s"),
        ({"memory": "1Gi"}, "rows.memory"),
    ],
    "weights": [({"hub_token": True}, "weights.hub_token")],
}
CHECKED_AGAINST_THOSE: Wrong = {
    "objects_days": [
        ({"answers": 1}, "objects_days.answers"),
        ({"batches": 30}, "objects_days.batches"),
        ({"files": 0.5}, "whole number of days"),
        ({"inputs": 7}, "objects_days.inputs"),
        ({"results": 1}, "objects_days.results"),
    ],
}
CHECKED_AFTER_OPTIONS: Wrong = {
    "registry_location": [
        (None, 'registry_location = "europe"'),
        ("eu", "must be asia, europe, us or a region"),
        ("europe-west99", "must be asia, europe, us or a region"),
    ],
}
"""The reason names the home region, so Terraform checks it only if every option is valid."""
MISSPELLED: Wrong = {
    "alerts": [({"email": ["oncall@example.com"]}, "alerts.email")],
    "analysts": [({"acme": {"members": [], "roles": []}}, "analysts.acme.roles")],
    "api": [({"max_instance": 1}, "api.max_instance")],
    "armor": [({"requests_per_minute": 6000}, "armor.requests_per_minute")],
    "batches": [({"instance": 1}, "batches.instance")],
    "budget": [
        (
            {
                "billing_account": "012345-6789AB-CDEF01",
                "units": 20,
                "units_per_month": 1,
            },
            "budget.units",
        )
    ],
    "cache": [({"size": "STANDARD_SMALL"}, "cache.size")],
    "delivery": [({"retry_max": 20}, "delivery.retry_max")],
    "functions": [
        ({"webhook": {"image": "a:b"}}, "functions.webhook, functions.webhook.image"),
        ({"webhooks": {"image": "a:b", "memory": "1Gi"}}, "functions.webhooks.memory"),
    ],
    "inboxes": [({"per_region": 8, "slot": 2}, "inboxes.slot")],
    "invoices": [({"tax": 19}, "invoices.tax")],
    "nodes": [
        ({"max_gpu": 3}, "nodes.max_gpu"),
        ({"general": {"maximum": 3}}, "nodes.general.maximum"),
    ],
    "objects_days": [({"result": 9}, "objects_days.result")],
    "outside": [
        (
            {"elsewhere": {"issuer": "https://a.example.com", "model": ["none"]}},
            "outside.elsewhere.model",
        )
    ],
    "records": [({"separate": True}, "records.separate")],
    "rows": [({"every": 60}, "rows.every")],
    "regions": [({"europe-west4": {"zone": "europe-west4-a"}}, "regions.europe-west4.zone")],
    "slos": [({"available": 0.999}, "slos.available")],
    "traces": [({"url": "https://a.example.com"}, "traces.url")],
    "weights": [({"token": True}, "weights.token")],
}
"""Options that don't exist. The rest of the message lists the options that do."""
READ_BY_MANY: Wrong = {"models_file": [("nowhere.yaml", "the file does not exist")]}
TRIED = (
    FIRST,
    CHECKED_AGAINST_FIRST,
    CHECKED_AGAINST_THOSE,
    CHECKED_AFTER_OPTIONS,
    READ_BY_MANY,
)
ONLY_TRUE_OR_FALSE = {"deletion_protection", "keep_messages_in_regions"}


def plans_of(*groups: Wrong) -> list[Any]:
    """As many plans as the largest number of invalid values for any variable in the group."""
    found = []
    for group in groups:
        for place, values in enumerate(zip_longest(*group.values())):
            wrong = {
                name: value for name, value in zip(group, values, strict=True) if value is not None
            }
            found.append(pytest.param(wrong, id=f"{next(iter(group))}-{place}"))
    return found


def check(
    folder: Path, root: str, right: dict[str, Any], wrong: dict[str, tuple[Any, str]]
) -> None:
    given = right | {name: value for name, (value, _) in wrong.items()}
    reported = refusals(folder, root, given)
    missing = {
        name: (value, reported.get(name))
        for name, (value, reason) in wrong.items()
        if not any(reason in said for said in reported.get(name, []))
    }
    assert missing == {}
    assert set(reported) == set(wrong)


@pytest.mark.parametrize("wrong", plans_of(MISSPELLED))
def test_options_that_are_not_there(tmp_path: Path, wrong: dict[str, tuple[Any, str]]) -> None:
    named = {
        name: (value, f"no such option: {option}; use one of ")
        for name, (value, option) in wrong.items()
    }
    check(tmp_path, "platform", RIGHT, named)


def test_every_object_is_checked_for_options_that_are_not_there() -> None:
    text = (STAGES / "platform/variables.tf").read_text()
    untyped = re.findall(r'^variable "(\w+)" {\n  description = .*\n  type += any$', text, re.M)
    # Terraform hides any message that contains part of an ephemeral value.
    assert set(untyped) == set(MISSPELLED) | {"alert_tokens"}
    assert re.findall(r"^    (\w+) += var\.\1$", text, re.M) == sorted(MISSPELLED)
    assert "object(" not in text


@pytest.mark.parametrize(
    ("given", "wrong", "reason"),
    [
        (
            {"batches": {"instances": 1}},
            "inboxes",
            "at least twice the sum of api.max_instances and batches.instances",
        ),
        (
            {"api": {"max_instances": 1, "idempotency_keep_s": 172800}},
            "objects_days",
            "objects_days.answers",
        ),
        (
            {"api": {"max_instances": 1, "prediction_keep_s": 604800}},
            "objects_days",
            "objects_days.results",
        ),
        ({"models_file": "tests/long.models.yaml"}, "objects_days", "objects_days.results"),
        (
            {
                "models_file": "tests/workers.models.yaml",
                "outside": {
                    "abroad": {"issuer": "https://k8s.example.com", "models": ["others", "texts"]}
                },
            },
            "outside",
            "must run together",
        ),
        (
            {
                "records": {"apart": False},
                "regions": {"europe-west1": {"index": 1}, "europe-west4": {"index": 0}},
            },
            "records",
            "one Redis",
        ),
    ],
)
def test_variables_that_do_not_fit_together(
    tmp_path: Path, given: dict[str, Any], wrong: str, reason: str
) -> None:
    reported = refusals(tmp_path, "platform", RIGHT | given)
    assert set(reported) == {wrong}
    assert any(reason in said for said in reported[wrong])


def test_every_variable_is_tried() -> None:
    text = (STAGES / "platform/variables.tf").read_text()
    declared = set(re.findall(r'^variable "(\w+)"', text, re.MULTILINE))
    tried: Wrong = {}
    for group in TRIED:
        assert not tried.keys() & group.keys()
        tried |= group
    assert set(tried) == declared - ONLY_TRUE_OR_FALSE
    assert sum(len(values) for values in tried.values()) >= 60


@pytest.mark.parametrize("wrong", plans_of(*TRIED))
def test_refused_with_the_variable_and_the_reason(
    tmp_path: Path, wrong: dict[str, tuple[Any, str]]
) -> None:
    check(tmp_path, "platform", RIGHT, wrong)


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ("models: [{name: bge.large}, {name: bge-large}]", "the same name in Kubernetes"),
        (
            "models: [{name: bge, canary: {revision: b}}, {name: bge-canary}]",
            "the same name in Kubernetes",
        ),
        (
            "{models: [{name: bge}, {name: e5}], workers: [{name: both, models: [bge, e6]}]}",
            "only names from `models`, each at most once",
        ),
        (
            "{models: [{name: bge}, {name: e5}], workers: [{models: [bge, e5]}, {models: [e5]}]}",
            "only names from `models`, each at most once",
        ),
        ("models: {}", "a list `models`"),
        ("models: [{task: embedding}]", "a list `models`"),
        ("models: [", "a list `models`"),
    ],
)
def test_catalog_that_cannot_be_deployed(tmp_path: Path, models: str, reason: str) -> None:
    (tmp_path / "wrong.yaml").write_text(models)
    reported = refusals(tmp_path, "platform", RIGHT | {"models_file": str(tmp_path / "wrong.yaml")})
    assert set(reported) == {"models_file"}
    assert reason in reported["models_file"][0]


def test_catalog_that_is_too_large_for_cloud_run(tmp_path: Path) -> None:
    models = (STAGES / "platform/tests/classes.models.yaml").read_text()
    (tmp_path / "models.yaml").write_text(models)
    # Three entries totaling 30,000 bytes: together they are too large, but only when counted in
    # bytes.
    interface = {"inputs": {"properties": {"text": {"description": "\u00e9" * 15_000}}}}
    (tmp_path / "classes.interface.json").write_text(json.dumps(interface))
    given = RIGHT | {"models_file": str(tmp_path / "models.yaml")}
    (reason,) = refusals(tmp_path, "platform", given)[""]
    assert "must be at most 65,536 bytes" in reason


@pytest.mark.parametrize(
    ("example", "given", "wrong"),
    [
        (
            "minimal",
            {
                "project_id": "P",
                "region": "europe-west99",
                "registry_location": "europe",
                "api_image": "an image",
            },
            {"project_id", "regions", "api"},
        ),
        (
            "multi-region",
            {
                "project_id": PROJECT,
                "domain": "https://api.example.com",
                "registry_location": "europe",
            },
            {"domain"},
        ),
        (
            "production",
            {
                "project_id": PROJECT,
                "registry_location": "europe",
                "alert_emails": ["oncall"],
                "billing_account": "garbage",
                "domain": "example",
                "images": {"webhooks": "an image"},
            },
            {"alerts", "budget", "domain", "functions"},
        ),
    ],
)
def test_examples_refuse_them_too(
    tmp_path: Path, example: str, given: dict[str, Any], wrong: set[str]
) -> None:
    assert set(refusals(tmp_path, f"examples/{example}", given)) == wrong


@pytest.mark.parametrize(
    ("root", "given"),
    [
        (
            "platform",
            {
                "project_id": PROJECT,
                "api": {"image": "registry.example.com/api@sha256:0", "max_instances": 1},
                "inboxes": {"per_region": 2, "slots": 2},
                "regions": {"us-central1": {"index": 1}, "europe-west4": {"index": 2}},
            },
        ),
        ("examples/minimal", {"project_id": PROJECT, "region": "us-central1"}),
    ],
)
def test_variables_of_the_release_before_are_told_where_its_registry_is(
    tmp_path: Path, root: str, given: dict[str, Any]
) -> None:
    # Release 0.1.0 put it in the home region. Moving it would delete it along with its images.
    reported = refusals(tmp_path, root, given)
    assert set(reported) == {"registry_location"}
    (said,) = reported["registry_location"]
    assert (
        'before release 0.2 has its registry in its home region: registry_location = "us-central1"'
        in said
    )
    assert 'For a new deployment, use registry_location = "us".' in said
    assert "deletes the registry with its images" in said
    accepted = {**given, "registry_location": "us-central1"}
    assert refusals(tmp_path, root, accepted) == {}


WORKLOADS: Wrong = {
    "cluster": [("Penstock", "lowercase")],
    "keda": [
        ({"version": "2.11.2"}, "at least 2.20.2"),
        ({"version": "latest"}, "at least 2.20.2"),
        ({"replicas": 0}, "keda.replicas"),
        ({"replicas": 1.5}, "keda.replicas"),
    ],
    "models_file": [("nowhere.yaml", "the file does not exist")],
    "objects_file": [("nowhere.yaml", "the file does not exist")],
    "project_id": [("P", "6 to 30")],
    "region": [("europe-west4-a", "such as europe-west4")],
}


@pytest.mark.parametrize("wrong", plans_of(WORKLOADS))
def test_workloads_refuse_them_too(tmp_path: Path, wrong: dict[str, tuple[Any, str]]) -> None:
    tests = STAGES.resolve() / "workloads/tests"
    right = {
        "cluster": "penstock-europe-west4",
        "models_file": str(tests / "models.yaml"),
        "objects_file": str(tests / "objects.yaml"),
        "project_id": PROJECT,
        "region": "europe-west4",
    }
    check(tmp_path, "workloads", right, wrong)
