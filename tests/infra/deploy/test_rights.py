"""Who may do what in the cloud: every binding of the plan is one that is known here."""

from __future__ import annotations

from pathlib import Path

from shared.catalog import read_catalog
from shared.topics import (
    WEBHOOKS_TOPIC_ID,
    batch_subscription_id,
    dead_letter_topic_id,
    workers_subscription_id,
)
from tests.infra.deploy.terraform import Plan

MODELS = [model.name for model in read_catalog(Path("models.yaml")).models]
API = "serviceAccount:penstock-api@example-project.iam.gserviceaccount.com"
ON_THE_PROJECT = {
    "roles/monitoring.metricWriter",
    "roles/monitoring.viewer",
    "roles/bigquery.jobUser",
    "roles/container.defaultNodeServiceAccount",
    "roles/networkconnectivity.serviceAgent",
    "roles/serviceusage.serviceUsageConsumer",
}
ALLOWED = {
    "google_project_iam_member": ON_THE_PROJECT,
    "google_bigquery_dataset_iam_member": {"roles/bigquery.dataViewer"},
    "google_bigquery_table_iam_member": {"roles/bigquery.dataViewer"},
    "google_pubsub_topic_iam_member": {"roles/pubsub.publisher"},
    "google_pubsub_subscription_iam_member": {"roles/pubsub.subscriber"},
    "google_storage_bucket_iam_member": {"roles/storage.objectUser", "roles/storage.objectViewer"},
    "google_secret_manager_secret_iam_member": {"roles/secretmanager.secretAccessor"},
    "google_artifact_registry_repository_iam_member": {"roles/artifactregistry.reader"},
    "google_cloud_run_v2_service_iam_member": {"roles/run.invoker"},
    "google_service_account_iam_member": {"roles/iam.serviceAccountTokenCreator"},
}

OF_ANALYSTS = {"google_bigquery_dataset_iam_member"}
"""In plans with `analysts`."""
KINDS_OF_MEMBERS = {"principal", "principalSet", "serviceAccount"}
"""Neither allUsers nor allAuthenticatedUsers is one of them."""


def bindings(plan: Plan) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for resource in plan.resources:
        if "_iam_" in resource["type"] and not resource["type"].endswith("custom_role"):
            found.setdefault(resource["type"], []).append(resource["values"])
    return found


def test_no_role_but_the_least(plan: Plan) -> None:
    assert ALLOWED.keys() - OF_ANALYSTS == bindings(plan).keys()
    for kind, members in bindings(plan).items():
        # The table's role is our own, so its id is known only after an apply.
        roles = {member["role"] for member in members if "role" in member}
        assert roles <= ALLOWED[kind], kind


def test_nobody_is_everybody(plan: Plan) -> None:
    members = [
        found["member"]
        for values in bindings(plan).values()
        for found in values
        if "member" in found
    ]
    kinds = {member.partition(":")[0] for member in members}
    assert kinds <= KINDS_OF_MEMBERS
    assert "serviceAccount" in kinds


def test_api_cannot_make_subscriptions(plan: Plan) -> None:
    roles = {
        (kind, found["role"])
        for kind, values in bindings(plan).items()
        for found in values
        if found.get("member") == API and "pubsub" in kind
    }
    assert roles == {
        ("google_pubsub_topic_iam_member", "roles/pubsub.publisher"),
        ("google_pubsub_subscription_iam_member", "roles/pubsub.subscriber"),
    }


def test_worker_publishes_what_it_answers_and_gives_up(plan: Plan) -> None:
    topics = {topic["name"] for topic in plan.of("google_pubsub_topic")}
    may: dict[str, set[str]] = {}
    for found in plan.of("google_pubsub_topic_iam_member"):
        if found["member"].startswith("principal"):
            may.setdefault(found["member"].partition("/subject/")[2], set()).add(found["topic"])
    assert may.pop("") == {topic for topic in topics if topic.startswith("inbox.")} | {
        WEBHOOKS_TOPIC_ID
    }
    assert sorted(may.values()) == sorted({dead_letter_topic_id(name)} for name in MODELS)


def test_worker_pulls_only_the_jobs_of_its_model(plan: Plan) -> None:
    pulls: dict[str, set[str]] = {}
    for found in plan.of("google_pubsub_subscription_iam_member"):
        if found["member"].startswith("principal://"):
            pulls.setdefault(found["member"], set()).add(found["subscription"])
    jobs = {
        frozenset({workers_subscription_id(name), batch_subscription_id(name)}) for name in MODELS
    }
    assert {frozenset(subscriptions) for subscriptions in pulls.values()} == jobs


def test_two_regions_have_two_of_everything_regional(plan: Plan) -> None:
    for kind in ("google_container_cluster", "google_compute_router_nat"):
        assert len(plan.of(kind)) == 2, kind
    names = {found["instance_id"] for found in plan.of("google_memorystore_instance")}
    assert names == {"penstock-europe-west1", "penstock-europe-west4", "penstock-records"}
    assert (
        len([s for s in plan.of("google_cloud_run_v2_service") if s["name"] == "penstock-api"]) == 2
    )


REPORTS = "serviceAccount:penstock-reports@example-project.iam.gserviceaccount.com"


def test_reports_read_rows_and_write_only_what_is_theirs(plan: Plan) -> None:
    of_reports = {
        (kind, found.get("table_id") or found.get("bucket") or "", found.get("role"))
        for kind, values in bindings(plan).items()
        for found in values
        if found.get("member") == REPORTS
    }
    # The role of the tables that it writes is our own, so its id is known only after an apply.
    assert of_reports == {
        ("google_project_iam_member", "", "roles/bigquery.jobUser"),
        ("google_bigquery_table_iam_member", "rows", "roles/bigquery.dataViewer"),
        ("google_bigquery_table_iam_member", "anomalies", None),
        ("google_bigquery_table_iam_member", "daily_usage", None),
        (
            "google_storage_bucket_iam_member",
            "example-project-penstock-reports",
            "roles/storage.objectUser",
        ),
    }


def test_nobody_else_writes_into_the_bucket_of_reports(plan: Plan) -> None:
    members = {
        found["member"]
        for found in plan.of("google_storage_bucket_iam_member")
        if found["bucket"].endswith("-reports")
    }
    assert members == {REPORTS}


def test_buckets_cannot_be_public(plan: Plan) -> None:
    assert {bucket["public_access_prevention"] for bucket in plan.of("google_storage_bucket")} == {
        "enforced"
    }
