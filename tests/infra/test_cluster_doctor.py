"""`penstock doctor --cluster`, with the real kubectl, against a stand-in for the cluster's API
server.

The cluster contains the overlays' objects. Embedded servers replace Google's, and the pods use a
real Redis.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.cloud import bigquery
from typer.testing import CliRunner

from infra.bigquery import schema
from infra.cli.cluster_doctor import KEDA_CRDS, METRICS_API
from infra.cli.main import app
from infra.reports.tables import create_tables
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.transport import (
    BATCH_FILTER,
    SubscriptionSettings,
    batch_subscription_id,
    dead_letter_topic_id,
    jobs_topic_id,
    make_jobs,
    workers_subscription_id,
)
from shared.settings import Settings, read_settings
from shared.usage.bigquery import open_client
from tests.infra.deploy.manifests import IMAGE, render
from tests.infra.deploy.sites import RABBITMQ, rendered
from tests.infra.kubernetes_api import Cluster, Object, served
from tests.infra.release.programs import gcloud_without_account
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow(about_s=90)

MODELS = ("all-MiniLM-L6-v2", "stable-diffusion-tiny")
GCLOUD = f"""#!/usr/bin/env python3
import sys
words = sys.argv[1:]
if words[:4] != ["artifacts", "docker", "images", "describe"] or len(words) != 6:
    sys.exit("ERROR: (gcloud) unrecognized arguments")
if words[5] != "--format=value(image_summary.digest)":
    sys.exit("ERROR: (gcloud.artifacts.docker.images.describe) unrecognized arguments: " + words[5])
if words[4] != {IMAGE!r}:
    sys.exit("ERROR: (gcloud.artifacts.docker.images.describe) Image not found.")
print("sha256:" + "0" * 64)
"""


def condition(kind: str, status: str, message: str = "") -> Object:
    return {"type": kind, "status": status, "message": message, "reason": "Because"}


def node(name: str, gpus: str | None, *conditions: Object) -> Object:
    labels = {} if gpus is None else {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "status": {
            "allocatable": {"cpu": "7910m"} | ({} if gpus is None else {"nvidia.com/gpu": gpus}),
            "conditions": conditions or [condition("Ready", "True")],
        },
    }


def pod_of(deployment: Object) -> Object:
    metadata = deployment["spec"]["template"]["metadata"]
    name = deployment["metadata"]["name"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-7d9c5-x2x4z",
            "namespace": "penstock",
            "labels": metadata["labels"],
        },
        "spec": deployment["spec"]["template"]["spec"],
        "status": {
            "phase": "Running",
            "conditions": [condition("PodScheduled", "True"), condition("Ready", "True")],
            "containerStatuses": [
                {
                    "name": deployment["spec"]["template"]["spec"]["containers"][0]["name"],
                    "state": {"running": {}},
                }
            ],
        },
    }


def besides(objects: list[Object]) -> list[Object]:
    """Adds objects that are not ours to a cluster, and the cluster's status for ours."""
    for one in objects:
        if one["kind"] == "ScaledObject":
            one["status"] = {
                "conditions": [
                    condition("Ready", "True"),
                    condition("Fallback", "False"),
                    condition("Paused", "Unknown"),
                ]
            }
    definitions = [
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": name},
            "spec": {"group": "keda.sh"},
        }
        for name in KEDA_CRDS
    ]
    service = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": METRICS_API},
        "status": {"conditions": [condition("Available", "True")]},
    }
    plugin = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "nvidia-gpu-device-plugin-small-cos", "namespace": "kube-system"},
        "status": {"numberReady": 2, "desiredNumberScheduled": 2},
    }
    nodes = [node("gpu-a", "4"), node("gpu-b", "1"), node("plain", None)]
    pods = [pod_of(one) for one in objects if one["kind"] == "Deployment"]
    return [*definitions, service, plugin, *nodes, *pods]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """The overlay for a region on GKE."""
    return render(tmp_path_factory.mktemp("overlay") / "region")


@pytest.fixture(scope="module")
def project(pubsub_endpoint: str, bigquery_endpoint: str) -> str:
    """A project with this release's topics and tables, for tests that do not change it.

    Creating its views takes a second of CPU time.
    """
    return made_project(pubsub_endpoint, bigquery_endpoint)


@pytest.fixture
def own_project(cluster: Cluster, pubsub_endpoint: str, bigquery_endpoint: str) -> str:
    """A similar project that one test may change, and which the cluster uses from then on."""
    name = made_project(pubsub_endpoint, bigquery_endpoint)
    for one in cluster.of_kind("ConfigMap"):
        if "PENSTOCK_PROJECT" in one["data"]:
            one["data"]["PENSTOCK_PROJECT"] = name
    return name


def made_project(pubsub_endpoint: str, bigquery_endpoint: str) -> str:
    name = f"doctor-{uuid.uuid4().hex[:8]}"
    create_tables(read_settings(Settings, bigquery_endpoint=bigquery_endpoint, project=name))

    async def make(admin: PubSubAdmin) -> None:
        for model in MODELS:
            await make_jobs(admin, model)

    change(pubsub_endpoint, name, make)
    return name


def change(endpoint: str, project: str, act: Callable[[PubSubAdmin], Any]) -> None:
    async def run() -> None:
        async with PubSubAdmin(project, endpoint) as admin:
            await act(admin)

    asyncio.run(run())


@pytest.fixture
def cluster(
    manifests: list[Object],
    project: str,
    redis_url: str,
    pubsub_endpoint: str,
    bigquery_endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Cluster]:
    monkeypatch.setenv("PENSTOCK_PUBSUB_ENDPOINT", pubsub_endpoint)
    monkeypatch.setenv("PENSTOCK_BIGQUERY_ENDPOINT", bigquery_endpoint)
    objects = copy.deepcopy(manifests)
    for one in objects:
        if one["kind"] == "ConfigMap" and "PENSTOCK_PROJECT" in one["data"]:
            one["data"] |= {
                "PENSTOCK_PROJECT": project,
                "PENSTOCK_REDIS_URL": redis_url,
                "PENSTOCK_RECORDS_URL": redis_url,
            }
    with served(Cluster([*objects, *besides(objects)]), tmp_path) as made:
        programs(tmp_path, monkeypatch, made)
        yield made


def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Cluster) -> None:
    """kubectl configured for this cluster, and a gcloud that knows about one image."""
    kubectl = shutil.which("kubectl")
    assert kubectl is not None  # otherwise, the overlay would not have been rendered
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").symlink_to(os.path.realpath(kubectl))
    (folder / "gcloud").write_text(GCLOUD)
    (folder / "gcloud").chmod(0o755)
    (tmp_path / "kubeconfig").write_text(made.kubeconfig())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def doctor(*words: str, status: int = 1) -> list[dict[str, str]]:
    done = CliRunner().invoke(app, ["doctor", "--cluster", "--json", *words])
    assert done.exit_code == status, done.output
    findings: list[dict[str, str]] = json.loads(done.stdout)
    return [one for one in findings if one["fix"]]


def test_nothing_is_wrong(cluster: Cluster, project: str) -> None:
    done = CliRunner().invoke(app, ["doctor", "--cluster", "--context", "production"])
    assert done.exit_code == 0, done.output
    for line in (
        "ok    cluster      Kubernetes v1.35.2-gke.1, namespace penstock",
        "ok    autoscaler   KEDA is installed, and its metrics server responds",
        "ok    GPU nodes    2 of 3 nodes offer 5 nvidia.com/gpu",
        "ok    device plugin nvidia-gpu-device-plugin-small-cos: 2 of 2 pods are ready",
        "ok    pods         5 Running",
        "ok    configmaps   4 of the 4 that pods reference exist",
        f"ok    images       {IMAGE} is in its registry",
        "ok    Redis        responds to worker-all-minilm-l6-v2-7d9c5-x2x4z",
        f"ok    Pub/Sub      {project}: 6 of 6 job subscriptions are correct",
        f"ok    BigQuery     {project}.penstock: all tables have this release's columns",
    ):
        assert line in done.stdout
    assert done.stdout.endswith("\nnothing is missing\n")


def pending(cluster: Cluster) -> None:
    pod = cluster.named("Pod", "worker-stable")
    pod["status"] = {
        "phase": "Pending",
        "conditions": [
            condition(
                "PodScheduled", "False", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
            )
        ],
    }


def waiting(reason: str, message: str = "") -> Callable[[Cluster], None]:
    def act(cluster: Cluster) -> None:
        status = cluster.named("Pod", "worker-all")["status"]
        state = {"waiting": {"reason": reason, "message": message}}
        status["containerStatuses"][0]["state"] = state

    return act


def status_of(kind: str, name: str, *conditions: Object) -> Callable[[Cluster], None]:
    def act(cluster: Cluster) -> None:
        cluster.named(kind, name)["status"]["conditions"] = list(conditions)

    return act


def without(kind: str, name: str) -> Callable[[Cluster], None]:
    return lambda cluster: cluster.remove(kind, name)


def without_driver(cluster: Cluster) -> None:
    cluster.named("Node", "gpu-b")["status"]["allocatable"]["nvidia.com/gpu"] = "0"


def unready_plugin(cluster: Cluster) -> None:
    cluster.named("DaemonSet", "nvidia")["status"]["numberReady"] = 1


def without_redis(cluster: Cluster) -> None:
    for one in cluster.of_kind("ConfigMap"):
        if "PENSTOCK_REDIS_URL" in one["data"]:
            one["data"]["PENSTOCK_RECORDS_URL"] = "redis://127.0.0.1:9/0"


def without_image(cluster: Cluster) -> None:
    deployment = cluster.named("Deployment", "worker-all")
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = IMAGE.replace(
        "0" * 64, "1" * 64
    )


def without_rights(cluster: Cluster) -> None:
    cluster.denied.add("nodes")


def with_secret(cluster: Cluster) -> None:
    deployment = cluster.named("Deployment", "worker-all")
    source = {"secretRef": {"name": "penstock-hub"}}
    deployment["spec"]["template"]["spec"]["containers"][0]["envFrom"].append(source)


TROUBLES: dict[str, tuple[Callable[[Cluster], None], str, str, str]] = {
    "pending": (
        pending,
        "pods",
        "worker-stable-diffusion-tiny-7d9c5-x2x4z is pending: 0/3 nodes are available: "
        "3 Insufficient nvidia.com/gpu.",
        "kubectl -n penstock get events --sort-by=.lastTimestamp",
    ),
    "image": (
        waiting("ImagePullBackOff", "Back-off pulling image: 403 Forbidden"),
        "images",
        "worker-all-minilm-l6-v2-7d9c5-x2x4z: ImagePullBackOff: Back-off pulling image: 403",
        "describe pod worker-all-minilm-l6-v2-7d9c5-x2x4z",
    ),
    "crash": (
        waiting("CrashLoopBackOff"),
        "pods",
        "CrashLoopBackOff",
        "logs worker-all-minilm-l6-v2-7d9c5-x2x4z -c worker --previous",
    ),
    "driver": (
        without_driver,
        "GPU nodes",
        "gpu-b has a GPU according to its labels, but offers no nvidia.com/gpu",
        "--field-selector spec.nodeName=gpu-b",
    ),
    "node": (
        status_of("Node", "gpu-a", condition("Ready", "Unknown", "Kubelet stopped posting")),
        "GPU nodes",
        "gpu-a is not ready: Kubelet stopped posting",
        "kubectl describe node gpu-a",
    ),
    "plugin": (
        unready_plugin,
        "device plugin",
        "1 of 2 pods are ready",
        "kubectl -n kube-system describe daemonset nvidia-gpu-device-plugin-small-cos",
    ),
    "no plugin": (
        without("DaemonSet", "nvidia"),
        "device plugin",
        "none is running",
        "install NVIDIA's",
    ),
    "metrics server": (
        status_of("APIService", METRICS_API, condition("Available", "False", "no endpoints")),
        "autoscaler",
        "does not respond: no endpoints",
        "kubectl -n keda logs deployment/keda-operator-metrics-apiserver",
    ),
    "no metrics server": (
        without("APIService", METRICS_API),
        "autoscaler",
        "is not registered",
        "kubectl -n keda get pods",
    ),
    "metrics": (
        status_of("ScaledObject", "worker-all", condition("Fallback", "True")),
        "autoscaler",
        "worker-all-minilm-l6-v2: has no metrics",
        "describe scaledobject worker-all-minilm-l6-v2",
    ),
    "trigger": (
        status_of("ScaledObject", "worker-all", condition("Ready", "False", "no such trigger")),
        "autoscaler",
        "no such trigger",
        "describe scaledobject worker-all-minilm-l6-v2",
    ),
    "paused": (
        status_of("ScaledObject", "worker-all", condition("Paused", "True")),
        "autoscaler",
        "worker-all-minilm-l6-v2: paused",
        "annotate scaledobject worker-all-minilm-l6-v2 autoscaling.keda.sh/paused-replicas-",
    ),
    "config map": (
        without("ConfigMap", "models-all"),
        "configmaps",
        "models-all-minilm-l6-v2-",
        "apply the overlay",
    ),
    "secret": (
        with_secret,
        "secrets",
        "penstock-hub is missing",
        "create secret generic penstock-hub",
    ),
    "redis": (
        without_redis,
        "Redis",
        "unreachable from worker-all-minilm-l6-v2-7d9c5-x2x4z: PENSTOCK_RECORDS_URL: ",
        "kubectl -n penstock get networkpolicies",
    ),
    "gone image": (
        without_image,
        "images",
        "Image not found",
        "gcloud artifacts docker images describe europe-west4-docker.pkg.dev",
    ),
    "rights": (
        without_rights,
        "GPU nodes",
        'nodes is forbidden: User "operator"',
        "kubectl -n penstock auth can-i --list",
    ),
}
"""Each event and what it should report: the subject, part of the facts, and part of the fix."""


@pytest.mark.parametrize("trouble", TROUBLES)
def test_one_trouble_is_one_finding(cluster: Cluster, trouble: str) -> None:
    act, subject, facts, fix = TROUBLES[trouble]
    act(cluster)
    (finding,) = doctor()
    assert finding["what"] == subject
    assert facts in finding["facts"]
    assert fix in finding["fix"]


def test_without_keda_nothing_scales(cluster: Cluster) -> None:
    for name in KEDA_CRDS:
        cluster.remove("CustomResourceDefinition", name)
    (finding,) = doctor()
    assert (
        "KEDA is missing (scaledobjects.keda.sh, triggerauthentications.keda.sh)"
        in finding["facts"]
    )


def test_subscriptions_are_those_of_this_release(own_project: str, pubsub_endpoint: str) -> None:
    first, second = MODELS
    jobs = jobs_topic_id(first)

    async def spoil(admin: PubSubAdmin) -> None:
        for name in (
            workers_subscription_id(first),
            batch_subscription_id(first),
            workers_subscription_id(second),
        ):
            await admin.delete_subscription(name)
        # As created by an older release, or as changed by hand.
        old = SubscriptionSettings(jobs, dead_letter_topic_id=dead_letter_topic_id(first))
        await admin.ensure_subscription(workers_subscription_id(first), old)
        slow = SubscriptionSettings(
            jobs,
            BATCH_FILTER,
            ack_deadline_s=600,
            dead_letter_topic_id=dead_letter_topic_id(first),
        )
        await admin.ensure_subscription(batch_subscription_id(first), slow)

    change(pubsub_endpoint, own_project, spoil)
    facts = {one["facts"]: one["fix"] for one in doctor()}
    assert list(facts) == [
        "jobs.all-MiniLM-L6-v2.workers has the filter '', not 'NOT attributes.lane = \"batch\"'",
        "jobs.all-MiniLM-L6-v2.batch has an ack deadline of 600 s, not 10 s: a job waits that long "
        "after its worker dies",
        "jobs.stable-diffusion-tiny.workers is missing",
    ]
    assert [fix.split(":")[0] for fix in facts.values()] == [
        "keep its jobs in a snapshot first",
        "gcloud pubsub subscriptions update jobs.all-MiniLM-L6-v2.batch --ack-deadline=10",
        "terraform apply (docs/how-to/deploy.md#add-a-model)",
    ]
    wider = [one["facts"] for one in doctor("--ack-deadline-s", "600")]
    assert "jobs.stable-diffusion-tiny.batch has an ack deadline of 10 s, not 600 s" in wider[-1]


def test_tables_have_the_columns_of_this_release(own_project: str, bigquery_endpoint: str) -> None:
    settings = read_settings(Settings, bigquery_endpoint=bigquery_endpoint, project=own_project)
    client = open_client(own_project, settings.bigquery_endpoint)
    client.delete_table(f"{own_project}.penstock.rows")
    fields = [bigquery.SchemaField.from_api_repr(one) for one in schema()[:-2]]
    client.create_table(bigquery.Table(f"{own_project}.penstock.rows", fields))
    client.close()
    (finding,) = doctor()
    names = ", ".join(one["name"] for one in schema()[-2:])
    assert f"{own_project}.penstock: table rows is missing {names}" in finding["facts"]
    assert "terraform apply" in finding["fix"]


@pytest.mark.parametrize(
    ("words", "facts", "fix"),
    [
        (["--context", "elsewhere"], 'context "elsewhere" does not exist', "--context"),
        (["--namespace", "other"], 'namespaces "other" not found', "--namespace"),
    ],
)
def test_wrong_place_is_named(cluster: Cluster, words: list[str], facts: str, fix: str) -> None:
    (finding,) = doctor(*words)
    assert facts in finding["facts"]
    assert fix in finding["fix"]


def test_cluster_out_of_reach_leaves_the_rest(
    cluster: Cluster, project: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kubeconfig").write_text(cluster.kubeconfig(token="expired"))
    (finding,) = doctor()
    assert finding["what"] == "cluster"
    assert "gcloud auth login" in finding["fix"]
    config = re.sub(":[0-9]+$", ":9", cluster.kubeconfig(), flags=re.MULTILINE)
    (tmp_path / "kubeconfig").write_text(config)
    monkeypatch.setenv("PENSTOCK_PROJECT", project)
    done = CliRunner().invoke(app, ["doctor", "--cluster"])
    assert "gcloud container clusters get-credentials" in done.stdout
    assert f"ok    Pub/Sub      {project}: 6 of 6" in done.stdout
    assert done.stdout.endswith("\n1 to fix\n")
    (tmp_path / "bin/kubectl").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (finding,) = doctor()
    assert "gcloud components install kubectl" in finding["fix"]


def test_servers_in_the_cluster_are_reached_by_a_forwarded_port(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = rendered(tmp_path / "site", broker={"kind": "embedded"})
    for one in objects:
        if one["kind"] == "ConfigMap" and "PENSTOCK_PROJECT" in one["data"]:
            one["data"]["PENSTOCK_REDIS_URL"] = one["data"]["PENSTOCK_RECORDS_URL"] = redis_url
    secrets = [
        {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": name, "namespace": "penstock"}}
        for name in ("penstock-keys", "penstock-signing")
    ]
    monkeypatch.delenv("PENSTOCK_PUBSUB_ENDPOINT", raising=False)
    monkeypatch.delenv("PENSTOCK_BIGQUERY_ENDPOINT", raising=False)
    with served(Cluster([*objects, *besides(objects), *secrets]), tmp_path) as made:
        programs(tmp_path, monkeypatch, made)
        done = CliRunner().invoke(app, ["doctor", "--cluster"])
        assert done.exit_code == 0, done.output
        assert "ok    secrets      2 of the 2 that pods reference exist" in done.stdout
        assert (
            "kubectl -n penstock port-forward service/pubsub 8085, then set "
            "PENSTOCK_PUBSUB_ENDPOINT=127.0.0.1:8085" in done.stdout
        )
        assert (
            "kubectl -n penstock port-forward service/bigquery 9050, then set "
            "PENSTOCK_BIGQUERY_ENDPOINT=http://127.0.0.1:9050" in done.stdout
        )
        made.remove("Secret", "penstock-keys")
        (finding,) = doctor()
        assert finding["facts"] == "penstock-keys is missing"


def test_rabbitmq_is_left_to_the_other_doctor(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = rendered(tmp_path / "site", broker=RABBITMQ)
    monkeypatch.delenv("PENSTOCK_BIGQUERY_ENDPOINT", raising=False)
    with served(Cluster([*objects, *besides(objects)]), tmp_path) as made:
        programs(tmp_path, monkeypatch, made)
        done = CliRunner().invoke(app, ["doctor", "--cluster"])
    assert "use penstock doctor with PENSTOCK_BROKER" in done.stdout
    assert "MISS  secrets      penstock-broker is missing" in done.stdout


def test_gcloud_itself_knows_the_command(tmp_path: Path) -> None:
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    words = ["artifacts", "docker", "images", "describe", IMAGE]
    done = subprocess.run(
        ["gcloud", *words, "--format=value(image_summary.digest)"],
        env=os.environ | gcloud_without_account(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )
    assert done.returncode == 1  # 2 would mean unknown arguments
    assert "unrecognized arguments" not in done.stderr
