"""Prerequisites in an empty project, in order: APIs, service agents, pools, and roles.

The order comes from Terraform's own graph, so a resource in a new file is checked too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.infra.deploy.terraform import Plan, plan_platform, waits_for

SERVICES = "google_project_service.default"
AGENTS = "google_project_service_identity.default"
CLUSTERS = "module.cluster.google_container_cluster.default"
NEEDS = {
    "google_artifact_registry_": ("artifactregistry", "artifactregistry.admin"),
    "google_bigquery_": ("bigquery", "bigquery.admin"),
    "google_binary_authorization_attestor": (
        "binaryauthorization",
        "binaryauthorization.attestorsAdmin",
    ),
    "google_binary_authorization_policy": (
        "binaryauthorization",
        "binaryauthorization.policyEditor",
    ),
    # The role is on the billing account, where setup.sh has no permissions.
    "google_billing_": ("billingbudgets", None),
    "google_cloud_run_v2_": ("run", "run.admin"),
    "google_cloud_scheduler_": ("cloudscheduler", "cloudscheduler.admin"),
    "google_compute_": ("compute", "compute.admin"),
    "google_container_": ("container", "container.admin"),
    "google_container_analysis_note": ("containeranalysis", "containeranalysis.notes.editor"),
    "google_iam_workload_identity_pool": ("iam", "iam.workloadIdentityPoolAdmin"),
    "google_kms_": ("cloudkms", "cloudkms.admin"),
    "google_memorystore_": ("memorystore", "memorystore.admin"),
    "google_monitoring_": ("monitoring", "monitoring.admin"),
    "google_network_connectivity_": (
        "networkconnectivity",
        "networkconnectivity.consumerNetworkAdmin",
    ),
    "google_project_iam_custom_role": ("iam", "iam.roleAdmin"),
    "google_project_iam_member": ("cloudresourcemanager", "resourcemanager.projectIamAdmin"),
    "google_project_service": ("serviceusage", "serviceusage.serviceUsageAdmin"),
    "google_pubsub_": ("pubsub", "pubsub.admin"),
    "google_secret_manager_": ("secretmanager", "secretmanager.admin"),
    "google_service_account": ("iam", "iam.serviceAccountAdmin"),
    "google_storage_": ("storage", "storage.admin"),
}
"""The API that creates each kind of resource, and the role that may create that kind."""
OTHERS_NEED = {
    "containerfilesystem": "image streaming of GKE",
    "dns": "Cloud DNS as GKE's own",
    "iamcredentials": "identities of Kubernetes accounts",
    "serviceconsumermanagement": "the agent that gives Redis its addresses",
    "sts": "tokens of clusters outside Google",
    "telemetry": "spans",
}
"""APIs that don't create resources, and the callers that need them."""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A plan that includes all of the stage's resources."""
    image = {"image": "registry.example.com/functions@sha256:0"}
    folder = tmp_path_factory.mktemp("everything")
    # Its models come from the Hub, so it needs a token, and its class needs a secret.
    tests = Path("infra/terraform/platform/tests")
    catalog = yaml.safe_load((tests / "hub.models.yaml").read_text())
    catalog["models"][0]["canary"] = {"revision": "next"}
    classes = yaml.safe_load((tests / "classes.models.yaml").read_text())
    catalog["models"] += [entry for entry in classes["models"] if entry["name"] == "caller"]
    interface = "classes.interface.json"
    (folder / interface).write_text((tests / interface).read_text())
    (folder / "models.yaml").write_text(yaml.safe_dump(catalog))
    return plan_platform(
        folder,
        models_file=str(folder / "models.yaml"),
        api={
            "image": "registry.example.com/api@sha256:0",
            "keys_in_redis": True,
            "max_instances": 1,
        },
        alerts={
            "emails": ["oncall@example.com"],
            "slack": ["#oncall"],
            "pagerduty": ["inference"],
        },
        alert_tokens={"slack": "a", "pagerduty": {"inference": "b"}},
        analysts={"acme": {"members": ["group:analysts@example.com"]}},
        batches={"instances": 1},
        budget={"billing_account": "012345-6789AB-CDEF01", "units_per_month": 100},
        domain="api.example.com",
        functions={"dead_letters": image, "reports": image, "webhooks": image},
        inboxes={"per_region": 4, "slots": 2},
        nodes={"binary_authorization": True},
        outside={"elsewhere": {"issuer": "https://oidc.example.com/1"}},
        regions={"asia-south1": {"index": 0}, "asia-southeast1": {"index": 1}},
        traces={"endpoint": "https://telemetry.googleapis.com"},
        weights={"hub_token": True, "prefetched": True},
    )


@pytest.fixture(scope="module")
def before() -> dict[str, set[str]]:
    return waits_for()


def address(resource: dict[str, str]) -> str:
    """An address as the graph writes it, without for_each keys."""
    return re.sub(r"\[[^]]*\]", "", resource["address"])


def needs(kind: str) -> tuple[str, str | None]:
    found = [need for prefix, need in NEEDS.items() if kind.startswith(prefix)]
    assert found, f"{kind}: say in NEEDS which API and which role it takes"
    # The longest prefix comes last: google_project_service before google_project_iam_.
    return found[-1]


def test_everything_is_everything(everything: Plan, before: dict[str, set[str]]) -> None:
    planned = {address(resource) for resource in everything.resources}
    known = {name for name in before if not re.search(r"(^|[.])(data|ephemeral)[.]", name)}
    # A region's records are in its own Redis, and ComputeClasses are the other way to get nodes.
    assert known - planned == set()


def test_apis_are_enabled_before_their_resources(
    everything: Plan, before: dict[str, set[str]]
) -> None:
    enabled = {found["service"] for found in everything.of("google_project_service")}
    for resource in everything.resources:
        api, _ = needs(resource["type"])
        assert f"{api}.googleapis.com" in enabled, resource["address"]
        if resource["type"] != "google_project_service":
            assert SERVICES in before[address(resource)], resource["address"]


def test_apis_that_others_call_are_enabled(everything: Plan) -> None:
    enabled = {found["service"] for found in everything.of("google_project_service")}
    assert {f"{api}.googleapis.com" for api in OTHERS_NEED} <= enabled


def test_rights_of_workers_wait_for_a_cluster(
    everything: Plan, before: dict[str, set[str]]
) -> None:
    members = [
        resource
        for resource in everything.resources
        if resource["type"] != "google_container_cluster"
        and "example-project.svc.id.goog" in json.dumps(resource["values"])
    ]
    assert {resource["type"] for resource in members} >= {
        "google_bigquery_table_iam_member",
        "google_project_iam_member",
        "google_pubsub_subscription_iam_member",
        "google_pubsub_topic_iam_member",
        "google_storage_bucket_iam_member",
    }
    waiting = {resource["address"]: CLUSTERS in before[address(resource)] for resource in members}
    assert [name for name, waits in waiting.items() if not waits] == []


def test_api_waits_for_its_inboxes_and_for_no_cluster(before: dict[str, set[str]]) -> None:
    api = before["module.region.google_cloud_run_v2_service.api"]
    assert "module.inbox.google_pubsub_subscription_iam_member.api_pulls" in api
    assert "module.inbox.google_pubsub_topic_iam_member.repliers" in api
    assert CLUSTERS not in api


def test_rights_of_agents_wait_for_the_agents(
    everything: Plan, before: dict[str, set[str]]
) -> None:
    of_agents = [
        resource
        for resource in everything.resources
        if "@gcp-sa-pubsub." in str(resource["values"].get("member"))
    ]
    assert len(of_agents) > 2
    for resource in of_agents:
        assert AGENTS in before[address(resource)], resource["address"]


def test_redis_waits_for_the_agent_that_gives_it_an_address(
    everything: Plan, before: dict[str, set[str]]
) -> None:
    asked = {found["service"] for found in everything.of("google_project_service_identity")}
    assert asked == {"networkconnectivity.googleapis.com", "pubsub.googleapis.com"}
    policy = "google_network_connectivity_service_connection_policy.default"
    assert "google_project_iam_member.network_agent" in before[policy]
    assert policy in before["module.redis.google_memorystore_instance.default"]


def test_nodes_may_stream_images(everything: Plan, before: dict[str, set[str]]) -> None:
    given = {
        found["role"]
        for found in everything.of("google_project_iam_member")
        if "penstock-nodes-" in (found.get("member") or "")
    }
    assert given == {
        "roles/container.defaultNodeServiceAccount",
        "roles/serviceusage.serviceUsageConsumer",
    }
    for pool in ("general", "gpu"):
        waited = before[f"module.cluster.google_container_node_pool.{pool}"]
        assert "module.cluster.google_project_iam_member.nodes" in waited
        assert "module.cluster.google_artifact_registry_repository_iam_member.nodes" in waited


def test_default_pool_does_without_the_default_account(everything: Plan) -> None:
    for cluster in everything.of("google_container_cluster"):
        (pool,) = cluster["node_config"]
        assert pool["service_account"].startswith("penstock-nodes-")
        assert pool["shielded_instance_config"][0]["enable_secure_boot"]
        # Three of them share a region whose quota may be 500 GB.
        assert pool["disk_size_gb"] <= 20


def test_accounts_of_two_regions_are_two(everything: Plan) -> None:
    names = [found["account_id"] for found in everything.of("google_service_account")]
    assert sorted(set(names)) == sorted(names)


def test_deploy_account_may_make_everything(everything: Plan) -> None:
    setup = Path("infra/cloudbuild/setup.sh").read_text()
    grant = re.search(r'^grant "\$deploy" (.*?)[^\\]$', setup, re.MULTILINE | re.DOTALL)
    assert grant is not None
    for resource in everything.resources:
        _, role = needs(resource["type"])
        assert role is None or role in grant[0].split(), resource["address"]


def test_project_is_named_in_the_first_steps() -> None:
    # Terraform reads the project before it can enable the API that this requires.
    for text in ("docs/how-to/deploy.md", "infra/cloudbuild/setup.sh"):
        assert "cloudresourcemanager.googleapis.com" in Path(text).read_text(), text


def test_budget_is_asked_for_in_the_name_of_the_project() -> None:
    example = Path("infra/terraform/examples/production")
    text = "".join(path.read_text() for path in example.glob("*.tf"))
    assert "budget" in text
    for provider in ("google", "google-beta"):
        block = re.search(rf'^provider "{provider}" {{\n(.*?)^}}', text, re.MULTILINE | re.DOTALL)
        assert block is not None
        assert re.search(r"user_project_override += true", block[1])
        assert re.search(r"billing_project += var.project_id", block[1])
