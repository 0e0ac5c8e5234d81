"""Permissions in the cloud: every binding in the plan is listed here."""

from __future__ import annotations

import re
from pathlib import Path

from shared.broker.transport import (
    WEBHOOKS_TOPIC_ID,
    batch_subscription_id,
    dead_letter_topic_id,
    workers_subscription_id,
)
from shared.models.catalog_file import read_catalog
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
    "google_storage_bucket_iam_member": {
        "roles/storage.objectCreator",
        "roles/storage.objectUser",
        "roles/storage.objectViewer",
    },
    "google_secret_manager_secret_iam_member": {"roles/secretmanager.secretAccessor"},
    "google_artifact_registry_repository_iam_member": {"roles/artifactregistry.reader"},
    "google_cloud_run_v2_service_iam_member": {"roles/run.invoker"},
    "google_service_account_iam_member": {"roles/iam.serviceAccountTokenCreator"},
}

OF_ANALYSTS = {"google_bigquery_dataset_iam_member"}
"""Only in plans with `analysts`."""
KINDS_OF_MEMBERS = {"principal", "principalSet", "serviceAccount"}
"""Neither allUsers nor allAuthenticatedUsers is among them."""


def bindings(plan: Plan) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for resource in plan.resources:
        if "_iam_" in resource["type"] and not resource["type"].endswith("custom_role"):
            found.setdefault(resource["type"], []).append(resource["values"])
    return found


def test_no_role_but_the_least(plan: Plan) -> None:
    assert ALLOWED.keys() - OF_ANALYSTS == bindings(plan).keys()
    for kind, members in bindings(plan).items():
        # The table's role is custom, so its id is known only after an apply.
        roles = {member["role"] for member in members if "role" in member}
        assert roles <= ALLOWED[kind], kind


OWN = "a role of ours"
INBOXES = {
    ("topic", "inbox.N", "pubsub.publisher"): "replies with results",
    ("topic", "inbox.N.direct", "pubsub.publisher"): "replies",
}
WRITES_ROWS = {
    ("table", "rows", OWN): "rows, of instances without the bucket of rows, and without it at all",
    ("bucket", "rows", "storage.objectCreator"): "rows",
}
ENDS_JOBS = {
    **INBOXES,
    **WRITES_ROWS,
    ("topic", "webhooks", "pubsub.publisher"): "events of predictions",
    ("bucket", "objects", "storage.objectUser"): "large inputs and results",
}
NODES = {
    ("repository", "penstock", "artifactregistry.reader"): "images",
    ("project", "", "container.defaultNodeServiceAccount"): "logs and metrics of nodes",
    ("project", "", "serviceusage.serviceUsageConsumer"): "image streaming",
}
QUERIES = ("project", "", "bigquery.jobUser")
USES: dict[str, dict[tuple[str, str, str], str]] = {
    "penstock-api": {
        **ENDS_JOBS,
        ("topic", "jobs.M", "pubsub.publisher"): "jobs",
        ("subscription", "inbox.N.direct", "pubsub.subscriber"): "replies to its own inbox",
        ("subscription", "inbox.N.slot.S", "pubsub.subscriber"): "the same with results",
        ("table", "rows", "bigquery.dataViewer"): "usage that callers ask for",
        QUERIES: "the same",
        ("project", "", "monitoring.metricWriter"): "metrics, by the sidecar",
        ("secret", "api-keys", "secretmanager.secretAccessor"): "who may call",
        ("secret", "links", "secretmanager.secretAccessor"): "signs links",
        ("secret", "models", "secretmanager.secretAccessor"): "the catalog",
        ("secret", "scraping", "secretmanager.secretAccessor"): "settings of the sidecar",
        ("secret", "webhooks", "secretmanager.secretAccessor"): "shows tenants their own",
    },
    "the workers": {
        **ENDS_JOBS,
        ("table", "worker_hours", OWN): "hours, as rows",
        ("table", "worker_starts", OWN): "its start, as a row",
        ("bucket", "weights", "storage.objectViewer"): "weights",
    },
    "the workers of a model": {
        ("subscription", "jobs.M.workers", "pubsub.subscriber"): "jobs of its model",
        ("subscription", "jobs.M.batch", "pubsub.subscriber"): "the same",
        ("topic", "jobs.M.dead", "pubsub.publisher"): "jobs that it gives up",
    },
    "penstock-dead-letters": {
        **ENDS_JOBS,
        ("secret", "models", "secretmanager.secretAccessor"): "the catalog",
    },
    "penstock-webhooks": {
        ("table", "webhook_deliveries", OWN): "deliveries, as rows",
        ("bucket", "rows", "storage.objectCreator"): "deliveries",
        ("secret", "links", "secretmanager.secretAccessor"): "signs links in events",
        ("secret", "webhooks", "secretmanager.secretAccessor"): "signs events",
    },
    "penstock-reports": {
        ("table", "anomalies", OWN): "what it writes",
        ("table", "daily_usage", OWN): "what it writes",
        ("table", "rows", "bigquery.dataViewer"): "what it reads",
        QUERIES: "the same",
        ("bucket", "reports", "storage.objectUser"): "invoices",
    },
    "penstock-row-archive": {
        ("table", "rows", OWN): "loads",
        ("table", "webhook_deliveries", OWN): "loads",
        ("table", "worker_hours", OWN): "loads",
        ("table", "worker_starts", OWN): "loads",
        QUERIES: "load jobs",
        ("bucket", "rows", "storage.objectUser"): "takes rows, and keeps files of them",
        ("project", "", "monitoring.metricWriter"): "metrics, by the sidecar",
        ("secret", "scraping", "secretmanager.secretAccessor"): "settings of the sidecar",
    },
    "penstock-nodes-euwe1": NODES,
    "penstock-nodes-euwe4": NODES,
    "keda-operator": {("project", "", "monitoring.viewer"): "metrics that workers are scaled by"},
    "Pub/Sub": {
        ("subscription", "jobs.M.workers", "pubsub.subscriber"): "takes a dead letter off",
        ("subscription", "jobs.M.batch", "pubsub.subscriber"): "the same",
        ("topic", "jobs.M.dead", "pubsub.publisher"): "puts it there",
        ("account", "", "iam.serviceAccountTokenCreator"): "signs pushes",
    },
    "Network Connectivity": {
        ("project", "", "networkconnectivity.serviceAgent"): "addresses of Redis",
    },
    **{
        f"penstock-{name}-push": {
            ("service", f"penstock-{name}", "run.invoker"): "calls the function"
        }
        for name in ("dead-letters", "reports", "webhooks")
    },
}
"""All of each account's permissions: the resource, the role, and the purpose."""
KINDS = {
    "pubsub_topic": ("topic", "topic"),
    "pubsub_subscription": ("subscription", "subscription"),
    "bigquery_table": ("table", "table_id"),
    "storage_bucket": ("bucket", "bucket"),
    "secret_manager_secret": ("secret", "secret_id"),
    "artifact_registry_repository": ("repository", "repository"),
    "cloud_run_v2_service": ("service", "name"),
    "service_account": ("account", "service_account_id"),
    "project": ("project", ""),
}


def holder(member: str | None) -> str:
    """A permission's holder, as named in USES.

    Network Connectivity's service agent isn't known until later.
    """
    if member is None:
        return "Network Connectivity"
    if member.startswith("principalSet:"):
        return "the workers"
    name = member.partition("@")[0].rpartition("/")[2].removeprefix("serviceAccount:")
    if name.startswith("worker-"):
        return "the workers of a model"
    return "Pub/Sub" if "@gcp-sa-pubsub." in member else name


def test_each_account_may_what_it_has_a_use_for(plan: Plan) -> None:
    may: dict[str, set[tuple[str, str, str]]] = {}
    for resource_type, members in bindings(plan).items():
        kind, field = KINDS[resource_type.removeprefix("google_").removesuffix("_iam_member")]
        for found in members:
            thing = (found.get(field) or "").removeprefix("example-project-penstock-")
            thing = thing.removeprefix("penstock-") if kind == "secret" else thing
            thing = re.sub(r"^inbox\.\d+", "inbox.N", re.sub(r"slot\.\d+$", "slot.S", thing))
            for model in MODELS:
                thing = re.sub(rf"^jobs\.{re.escape(model)}(?=\.|$)", "jobs.M", thing)
            role = found.get("role", OWN).removeprefix("roles/")
            may.setdefault(holder(found.get("member")), set()).add((kind, thing, role))
    assert may == {account: set(uses) for account, uses in USES.items()}


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
    # The role for the tables it writes is custom, so its id is known only after an apply.
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
