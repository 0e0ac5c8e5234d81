"""Workers in a cluster outside Google: the same worker, authenticated by its cluster's token,
without any GKE features.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.kubernetes.overlay import credentials, write_overlay
from shared.errors import ConfigurationError
from shared.models.catalog_file import read_catalog
from tests.infra.deploy.manifests import (
    DEPLOYMENT,
    Objects,
    of_kind,
    pod,
    render,
    settings_of,
    workers,
)
from tests.infra.deploy.terraform import Plan, plan_platform

pytestmark = pytest.mark.slow

POOL = (
    "//iam.googleapis.com/projects/123456789012/locations/global"
    "/workloadIdentityPools/penstock-elsewhere"
)
AUDIENCE = f"{POOL}/providers/cluster"
CHANGES: dict[str, Any] = {
    "region": "elsewhere",
    "audience": AUDIENCE,
    "spot": False,
    "overflow": None,
    "redis_url": "redis://10.200.0.5:6379/0",
    "redis_cidrs": ("10.64.32.0/20", "10.200.0.0/24"),
}
OURS = {"elsewhere": {"issuer": "https://oidc.example.com/1"}}


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return render(tmp_path_factory.mktemp("outside"), **CHANGES)


@pytest.fixture(scope="module")
def plan_with_outside(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return plan_platform(tmp_path_factory.mktemp("plan"), outside=OURS)


def test_nothing_of_gke_is_asked_for(outside: Objects, objects: Objects) -> None:
    kinds = {found["kind"] for found in outside}
    assert kinds == {found["kind"] for found in objects} - {
        "ClusterPodMonitoring",
        "ClusterRole",
        "ClusterRoleBinding",
        "PodMonitoring",
        "Role",
        "RoleBinding",
        "ScaledObject",
        "TriggerAuthentication",
    }
    for said in ("cloud.google.com", "gke", "169.254.169.252", "penstock.dev/gpu"):
        assert said not in json.dumps(outside), said


def test_worker_shows_the_token_that_google_takes(
    outside: Objects, plan_with_outside: Plan
) -> None:
    (provider,) = plan_with_outside.of("google_iam_workload_identity_pool_provider")
    # Terraform's own test asserts that its output agrees.
    named = (provider["workload_identity_pool_id"], provider["workload_identity_pool_provider_id"])
    assert AUDIENCE.endswith("/workloadIdentityPools/{}/providers/{}".format(*named))
    assert provider["oidc"][0]["allowed_audiences"] is None
    for deployment in workers(outside).values():
        (container,), volumes = (
            pod(deployment)["containers"],
            {v["name"]: v for v in pod(deployment)["volumes"]},
        )
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        (source,) = volumes["token"]["projected"]["sources"]
        assert source["serviceAccountToken"]["audience"] == f"https:{AUDIENCE}"
        (file,) = of_kind(outside, "ConfigMap")[volumes["identity"]["configMap"]["name"]][
            "data"
        ].items()
        settings = settings_of(outside, deployment)
        assert settings["GOOGLE_APPLICATION_CREDENTIALS"] == f"{mounts['identity']}/{file[0]}"
        read = json.loads(file[1])["credential_source"]["file"]
        assert read == f"{mounts['token']}/{source['serviceAccountToken']['path']}"
        assert pod(deployment)["automountServiceAccountToken"] is False


def test_rights_are_given_to_the_accounts_outside(
    outside: Objects, plan_with_outside: Plan
) -> None:
    subjects = {
        f"system:serviceaccount:{found['metadata']['namespace']}:{name}"
        for name, found in of_kind(outside, "ServiceAccount").items()
    }
    pulling = {
        found["member"].rpartition("/subject/")[2]
        for found in plan_with_outside.of("google_pubsub_subscription_iam_member")
        if "penstock-elsewhere" in found["member"]
    }
    assert pulling == subjects
    (provider,) = plan_with_outside.of("google_iam_workload_identity_pool_provider")
    prefix = (
        provider["attribute_condition"]
        .removeprefix("assertion.sub.startsWith('")
        .removesuffix("')")
    )
    assert all(subject.startswith(prefix) for subject in subjects)


def test_workers_run_without_an_autoscaler(outside: Objects) -> None:
    counts = {name: found["spec"]["replicas"] for name, found in workers(outside).items()}
    assert set(counts.values()) == {1}


def test_gpu_is_asked_for_and_its_share_kept(outside: Objects) -> None:
    for deployment in workers(outside).values():
        (container,) = pod(deployment)["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod(
            deployment
        )["tolerations"]
        assert "nodeSelector" not in pod(deployment)


def test_records_are_those_of_all(outside: Objects) -> None:
    for deployment in workers(outside).values():
        settings = settings_of(outside, deployment)
        assert settings["PENSTOCK_RECORDS_URL"] == DEPLOYMENT.records_url
        assert settings["PENSTOCK_REDIS_URL"] == CHANGES["redis_url"]
    egress = of_kind(outside, "NetworkPolicy")["workers"]["spec"]["egress"]
    redis = [rule for rule in egress if rule["ports"][0]["port"] == 6379]
    assert [[to["ipBlock"]["cidr"] for to in rule["to"]] for rule in redis] == [
        list(CHANGES["redis_cidrs"])
    ]


def test_only_the_models_that_have_rights_there(tmp_path: Path) -> None:
    name = "all-MiniLM-L6-v2"
    rendered = render(tmp_path / "out", models=(name,), **CHANGES)
    assert {
        settings_of(rendered, found)["PENSTOCK_MODEL"] for found in workers(rendered).values()
    } == {name}


def test_model_that_is_not_in_the_catalog_is_refused(tmp_path: Path) -> None:
    models_file = Path("models.yaml")
    deployment = DEPLOYMENT.model_copy(update={**CHANGES, "models": ("none",)})
    with pytest.raises(ConfigurationError, match="not in the catalog: none"):
        write_overlay(tmp_path, read_catalog(models_file), models_file, deployment)


def test_credentials_are_what_google_auth_reads(tmp_path: Path) -> None:
    import google.auth
    from google.auth import identity_pool

    file = tmp_path / "credentials.json"
    file.write_text(credentials(AUDIENCE))
    read = identity_pool.Credentials.from_file(str(file))
    assert isinstance(read, google.auth.credentials.Scoped)
    assert read.info["audience"] == AUDIENCE
