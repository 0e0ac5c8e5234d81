"""The overlay's objects for models.yaml, as Kustomize renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError

from infra.kubernetes.__main__ import main
from infra.kubernetes.deployment import Deployment, Machine, read_gpu_types
from infra.kubernetes.overlay import write_overlay
from infra.kubernetes.placement import SHARED_MEMORY
from shared.errors import ConfigurationError
from shared.models.catalog import Revision
from shared.models.catalog_file import read_catalog
from shared.models.entry import GPU_COUNTS, MAX_SHARES, GpuTypeName
from shared.models.kubernetes_names import slug
from tests.infra.deploy.manifests import (
    DEPLOYMENT,
    Objects,
    objects_of,
    of_kind,
    pod,
    render,
    settings_of,
    workers,
)
from tests.infra.deploy.terraform import Plan

pytestmark = pytest.mark.slow(about_s=15)

CATALOG = read_catalog(Path("models.yaml"))
GOLDEN = Path("infra/terraform/workloads/tests")
TEXT: dict[str, Any] = {
    "name": "writer",
    "task": "text",
    "source": "hf:org/writer",
    "batch": {"max_tokens": 4096},
    "gpu": {"type": "none"},
}
SPLIT_MODEL = json.dumps(
    {
        "models": [
            TEXT | {"name": "tiny", "engine": "vllm", "gpu": {"type": "l4", "count": 4}},
        ]
    }
)
"""A catalog whose model is split between four GPUs."""
COMPLETE = json.dumps({"europe-west4": DEPLOYMENT.model_dump(exclude={"image"})})


def test_a_deployment_a_budget_and_an_autoscaler_per_model(objects: Objects) -> None:
    wanted = {f"worker-{slug(model.name)}" for model in CATALOG.models}
    assert set(workers(objects)) == wanted
    assert set(of_kind(objects, "PodDisruptionBudget")) == wanted
    assert {
        found["spec"]["scaleTargetRef"]["name"]
        for found in of_kind(objects, "ScaledObject").values()
    } == wanted


def test_a_model_without_a_gpu_has_its_cores_as_processes_and_a_text_model_as_threads(
    tmp_path: Path,
) -> None:
    models_file = tmp_path / "models.yaml"
    entry = CATALOG.models[0].model_dump(mode="json", exclude_defaults=True)
    entry |= {"gpu": {"type": "none"}, "precision": "auto"}
    models_file.write_text(yaml.safe_dump({"models": [entry, TEXT]}))
    objects = render(tmp_path / "out", models_file)
    for name, processes, threads in ((entry["name"], "2", "1"), (TEXT["name"], "1", "2")):
        settings = settings_of(objects, workers(objects)[f"worker-{slug(name)}"])
        assert settings["PENSTOCK_PROCESSES"] == processes
        assert settings["PENSTOCK_THREADS"] == threads


def test_canary_has_workers_and_an_autoscaler_of_its_own(tmp_path: Path) -> None:
    models_file = tmp_path / "models.yaml"
    entry = CATALOG.models[0].model_dump(mode="json", exclude_defaults=True)
    canary = {"revision": "next", "replicas": {"min": 2, "max": 5}}
    models_file.write_text(yaml.safe_dump({"models": [entry | {"canary": canary}]}))
    objects = render(tmp_path / "out", models_file)
    name = slug(entry["name"])
    assert set(workers(objects)) == {f"worker-{name}", f"worker-{name}-canary"}
    found = workers(objects)[f"worker-{name}-canary"]
    settings = settings_of(objects, found)
    assert settings["PENSTOCK_MODEL"] == f"{entry['name']}.canary"
    scaled = of_kind(objects, "ScaledObject")[f"worker-{name}-canary"]["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (2, 5)
    assert f'model=\\"{entry["name"]}.canary\\"' in json.dumps(scaled["triggers"])
    (read,) = [
        data["models.yaml"]
        for key, data in ((key, one["data"]) for key, one in of_kind(objects, "ConfigMap").items())
        if f"{name}-canary" in key and "models.yaml" in data
    ]
    (tmp_path / "own.yaml").write_text(read)
    own = read_catalog(tmp_path / "own.yaml")
    assert isinstance(own.find_deployed(settings["PENSTOCK_MODEL"]), Revision)


def test_replicas_are_the_autoscalers(objects: Objects) -> None:
    for model in CATALOG.models:
        name = f"worker-{slug(model.name)}"
        spec = of_kind(objects, "ScaledObject")[name]["spec"]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (
            model.replicas.min,
            model.replicas.max,
        )
        assert "replicas" not in workers(objects)[name]["spec"]


def test_scaling_asks_prometheus_and_never_pubsub_itself(objects: Objects) -> None:
    for scaled in of_kind(objects, "ScaledObject").values():
        assert {trigger["type"] for trigger in scaled["spec"]["triggers"]} == {"prometheus"}


def test_shares_of_a_gpu_fit_together(objects: Objects) -> None:
    for model in CATALOG.models:
        deployment = workers(objects)[f"worker-{slug(model.name)}"]
        fraction = float(settings_of(objects, deployment)["PENSTOCK_MEMORY_FRACTION"])
        assert fraction * model.gpu.share <= 1
        assert (model.gpu.share > 1) == (
            pod(deployment)["nodeSelector"].get("cloud.google.com/gke-gpu-sharing-strategy")
            == "time-sharing"
        )
        assert pod(deployment)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert "hostIPC" not in pod(deployment)


@pytest.mark.parametrize("compute_classes", [False, True])
def test_worker_that_shares_by_mps_gets_such_nodes_and_the_memory_of_their_server(
    tmp_path: Path, compute_classes: bool
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "models: [{name: tiny, task: embedding, source: 'local:a', dimensions: 4,"
        " batch: {max_tokens: 8}, gpu: {type: l4, share: 4, sharing: mps}}]"
    )
    objects = render(tmp_path / "out", file, compute_classes=compute_classes)
    worker = pod(workers(objects)["worker-tiny"])
    assert worker["hostIPC"] is True
    (namespace,) = of_kind(objects, "Namespace").values()
    labels = namespace["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "privileged"
    assert labels["pod-security.kubernetes.io/warn"] == "restricted"
    if compute_classes:
        assert worker["nodeSelector"] == {"cloud.google.com/compute-class": "workers-l4-x4-mps"}
        (found,) = of_kind(objects, "ComputeClass").values()
        for rule in found["spec"]["priorities"]:
            assert rule["gpu"]["gpuSharing"]["sharingStrategy"] == "MPS"
    else:
        assert worker["nodeSelector"] == {
            "penstock.dev/gpu": "l4-x4-mps",
            "cloud.google.com/gke-gpu-sharing-strategy": "mps",
            "cloud.google.com/gke-max-shared-clients-per-gpu": "4",
        }


@pytest.mark.parametrize("compute_classes", [False, True])
def test_worker_with_several_gpus_gets_a_machine_that_has_them(
    tmp_path: Path, compute_classes: bool
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(SPLIT_MODEL)
    objects = render(tmp_path / "out", file, overflow="a100", compute_classes=compute_classes)
    worker, machine = pod(workers(objects)["worker-tiny"]), read_gpu_types()["l4"].machine(4)
    (container,) = worker["containers"]
    resources = container["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == "4"
    assert resources["requests"]["nvidia.com/gpu"] == "4"
    assert resources["requests"]["memory"] == f"{machine.memory_gib * 1024}Mi"
    (shm,) = [volume for volume in worker["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}
    balloon = pod(of_kind(objects, "Deployment")["balloon-l4-x1-4gpus"])
    assert balloon["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"
    if compute_classes:
        (found,) = of_kind(objects, "ComputeClass").values()
        rules = found["spec"]["priorities"]
        assert {rule["machineType"] for rule in rules} == {"g2-standard-48"}
        assert {rule["gpu"]["count"] for rule in rules} == {4}
    else:
        assert worker["nodeSelector"] == {"penstock.dev/gpu": "l4-x1-4gpus"}
        assert "a100" not in json.dumps(worker["affinity"])


def test_kill_comes_after_the_drain(objects: Objects) -> None:
    for deployment in workers(objects).values():
        pause_s = pod(deployment)["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain_s = float(settings_of(objects, deployment)["PENSTOCK_DRAIN_S"])
        assert pause_s + drain_s < pod(deployment)["terminationGracePeriodSeconds"]


def test_worker_on_a_spot_node_is_done_before_the_node_goes(objects: Objects, plan: Plan) -> None:
    parts = [
        config
        for pool in plan.of("google_container_node_pool")
        if pool["node_config"][0]["spot"]
        for config in pool["node_config"][0]["kubelet_config"]
    ]
    for part in parts:
        # Time left after the system's pods have used theirs. If no number is given, GKE uses 15 s.
        ours_s = part["shutdown_grace_period_seconds"] - (
            part["shutdown_grace_period_critical_pods_seconds"] or 15
        )
        for deployment in workers(objects).values():
            assert pod(deployment)["terminationGracePeriodSeconds"] <= ours_s
    assert len(parts) == 4


@pytest.mark.parametrize("share", [1, 4, 8, 22])
def test_as_many_workers_fit_on_a_node_as_share_its_gpu(tmp_path: Path, share: int) -> None:
    models = tmp_path / "models.yaml"
    models.write_text(
        "models: [{name: tiny, task: embedding, source: 'hf:a/b', dimensions: 4,"
        f" batch: {{max_tokens: 8}}, gpu: {{type: l4, share: {share}}}}}]"
    )
    node = read_gpu_types()["l4"]
    (deployment,) = workers(render(tmp_path / "out", models)).values()
    asked = pod(deployment)["containers"][0]["resources"]["requests"]
    assert share * int(asked["ephemeral-storage"].removesuffix("Mi")) <= allocatable_mib(node)
    assert share * int(asked["memory"].removesuffix("Mi")) <= node.memory_gib * 1024
    assert share * int(asked["cpu"].removesuffix("m")) <= node.cpu * 1000


@pytest.mark.parametrize("type_", read_gpu_types())
def test_disk_is_no_larger_than_what_a_node_leaves(type_: str) -> None:
    node = read_gpu_types()[type_]
    for machine in (node, *node.larger.values()):
        assert machine.ephemeral_gib * 1024 <= allocatable_mib(machine)


def allocatable_mib(node: Machine) -> float:
    """Disk space that GKE leaves on a boot disk:
    docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes.

    The page's 100 GB example has a capacity of 98,831,908 KiB, of which 47,060,071,478 bytes are
    allocatable.
    """
    capacity_gib = node.disk_gb * 98_831_908 / 2**20 / 100
    reserved_gib = min(node.disk_gb / 2, 6 + 0.35 * node.disk_gb, 100)
    return (capacity_gib * 0.9 - reserved_gib) * 1024


def test_gkes_example_of_a_disk() -> None:
    assert allocatable_mib(read_gpu_types()["l4"]) == pytest.approx(
        47_060_071_478 / 2**20, rel=0.001
    )


def test_catalog_and_nodes_know_the_same_gpus() -> None:
    types = read_gpu_types()
    assert set(types) == set(get_args(GpuTypeName))
    for name, node in types.items():
        most = MAX_SHARES.get(name, 48)
        assert most == min(48, int(SHARED_MEMORY * node.gpu_memory_gib)), name
        assert (1, *node.larger) == GPU_COUNTS.get(name, (1, 2, 4, 8)), name


@pytest.mark.parametrize("type_", read_gpu_types())
def test_every_gpu_type_is_placed(tmp_path: Path, type_: str) -> None:
    models = tmp_path / "models.yaml"
    models.write_text(
        "models: [{name: tiny, task: embedding, source: 'hf:a/b', dimensions: 4,"
        f" batch: {{max_tokens: 8}}, gpu: {{type: {type_}, share: 2}}}}]"
    )
    node = read_gpu_types()[type_]
    (deployment,) = workers(render(tmp_path / "pools", models, overflow=None)).values()
    (term,) = pod(deployment)["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == [node.accelerator]
    rendered = render(tmp_path / "classes", models, overflow=None, compute_classes=True)
    rules = of_kind(rendered, "ComputeClass")[f"workers-{type_}-x2"]["spec"]["priorities"]
    assert [rule["spot"] for rule in rules] == ([True, False] if node.on_demand else [True])
    assert {rule["machineType"] for rule in rules} == {node.machine_type}


def test_places_are_held_by_what_gives_way(objects: Objects) -> None:
    priorities = {name: found["value"] for name, found in of_kind(objects, "PriorityClass").items()}
    assert priorities == {"penstock-high": 1000000, "penstock-default": 0, "penstock-low": -10}
    assert of_kind(objects, "PriorityClass")["penstock-low"]["preemptionPolicy"] == "Never"
    held = {
        name: pod(found)
        for name, found in of_kind(objects, "Deployment").items()
        if name.startswith("balloon-")
    }
    assert set(held) == {"balloon-l4-x1", "balloon-l4-x4"}
    assert {spec["priorityClassName"] for spec in held.values()} == {"penstock-low"}
    assert {pod(found)["priorityClassName"] for found in workers(objects).values()} == {
        "penstock-high"
    }


def test_containers_run_as_nobody_on_a_file_system_they_cannot_write(objects: Objects) -> None:
    for name, deployment in of_kind(objects, "Deployment").items():
        spec = pod(deployment)
        assert spec["securityContext"]["runAsNonRoot"] is True
        # Only the program that drains nodes calls the API server.
        assert spec["automountServiceAccountToken"] is (name == "gpu-nodes")
        for container in spec["containers"]:
            security = container["securityContext"]
            assert (security["readOnlyRootFilesystem"], security["capabilities"]) == (
                True,
                {"drop": ["ALL"]},
            )


def test_folders_a_worker_writes_to_are_mounted(objects: Objects) -> None:
    for deployment in workers(objects).values():
        mounted = [
            m["mountPath"]
            for m in pod(deployment)["containers"][0]["volumeMounts"]
            if not m.get("readOnly")
        ]
        settings = settings_of(objects, deployment)
        folders = [settings[f"PENSTOCK_{name}_DIR"] for name in ("ARTIFACTS", "MODELS", "SPOOL")]
        for folder in [*folders, settings["HF_HOME"], settings["HOME"]]:
            assert any(Path(folder).is_relative_to(mount) for mount in mounted), folder


def test_workers_reach_redis_and_nothing_else_that_is_private(tmp_path: Path) -> None:
    objects = render(tmp_path, redis_cidrs=("10.96.32.0/20", "10.64.32.0/20"))
    egress = of_kind(objects, "NetworkPolicy")["workers"]["spec"]["egress"]
    blocks = [
        (to["ipBlock"]["cidr"], rule["ports"][0]["port"])
        for rule in egress
        for to in rule["to"]
        if "ipBlock" in to
    ]
    private = [block for block in blocks if block[0].startswith("10.")]
    assert private == [("10.96.32.0/20", 6379), ("10.64.32.0/20", 6379)]


def test_no_addresses_for_redis_are_refused() -> None:
    # An egress rule without addresses would let workers connect anywhere.
    with pytest.raises(ValidationError, match="redis_cidrs"):
        Deployment.model_validate(DEPLOYMENT.model_dump() | {"redis_cidrs": []})


def test_each_worker_reads_its_own_entry(objects: Objects) -> None:
    read = {
        name.rpartition("-")[0]: [
            entry["name"] for entry in yaml.safe_load(found["data"]["models.yaml"])["models"]
        ]
        for name, found in of_kind(objects, "ConfigMap").items()
        if "models.yaml" in found["data"]
    }
    assert read == {f"models-{slug(model.name)}": [model.name] for model in CATALOG.models}


def test_compute_classes_are_the_nodes_of_workers(tmp_path: Path) -> None:
    objects = render(tmp_path, compute_classes=True, buffer=2)
    classes = of_kind(objects, "ComputeClass")
    assert set(classes) == {"workers-l4-x1", "workers-l4-x4"}
    assert all("namespace" not in found["metadata"] for found in classes.values())
    order = [
        (rule["machineType"], rule["spot"])
        for rule in classes["workers-l4-x4"]["spec"]["priorities"]
    ]
    assert order == [("g2-standard-8", True), ("g2-standard-8", False), ("a2-highgpu-1g", False)]
    first, *_, last = classes["workers-l4-x4"]["spec"]["priorities"]
    assert first["gpu"] == {
        "type": "nvidia-l4",
        "count": 1,
        # PyTorch's wheels require the newest driver, which is not the default.
        "driverVersion": "latest",
        "gpuSharing": {"sharingStrategy": "TIME_SHARING", "maxSharedClientsPerGPU": 4},
    }
    assert last["location"] == {"zones": ["europe-west4-a", "europe-west4-b"]}
    kubelet = first["nodeSystemConfig"]["kubeletConfig"]
    ours_s = (
        kubelet["shutdownGracePeriodSeconds"] - kubelet["shutdownGracePeriodCriticalPodsSeconds"]
    )
    for deployment in workers(objects).values():
        (selector,) = pod(deployment)["nodeSelector"]
        assert selector == "cloud.google.com/compute-class"
        assert pod(deployment)["terminationGracePeriodSeconds"] <= ours_s
    balloons = of_kind(objects, "Deployment").keys() - {*workers(objects), "gpu-nodes"}
    assert balloons == {"balloon-l4-x1", "balloon-l4-x4"}
    for name in balloons:
        balloon = of_kind(objects, "Deployment")[name]
        assert balloon["spec"]["replicas"] == 2
        (selector,) = pod(balloon)["nodeSelector"]
        assert selector == "cloud.google.com/compute-class"


def test_what_is_reserved_goes_first(tmp_path: Path) -> None:
    reserved = {"l4": {"name": "serving", "zone": "europe-west4-c", "project": "shared-project"}}
    rendered = render(tmp_path / "classes", compute_classes=True, reservations=reserved)
    first, *others = of_kind(rendered, "ComputeClass")["workers-l4-x1"]["spec"]["priorities"]
    assert first["reservations"] == {
        "affinity": "Specific",
        "specific": [{"name": "serving", "project": "shared-project"}],
    }
    assert first["location"] == {"zones": ["europe-west4-c"]}
    assert [rule["spot"] for rule in others] == [True, False, False]
    on_pools = render(tmp_path / "pools", reservations=reserved)
    for deployment in workers(on_pools).values():
        preferred = pod(deployment)["affinity"]["nodeAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        keys = {one["preference"]["matchExpressions"][0]["key"]: one["weight"] for one in preferred}
        assert keys["penstock.dev/reserved"] > keys["cloud.google.com/gke-spot"]


def test_who_waits_for_capacity_has_nodes_of_flex_start_alone(tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text(
        "models: [{name: tiny, task: embedding, source: 'hf:a/b', dimensions: 4,"
        " batch: {max_tokens: 8}, gpu: {type: h100, share: 1, provisioning: flex-start}}]"
    )
    rendered = render(tmp_path / "classes", models, compute_classes=True)
    (rule,) = of_kind(rendered, "ComputeClass")["workers-h100-x1-flex"]["spec"]["priorities"]
    assert (rule["flexStart"], "spot" in rule) == ({"enabled": True}, False)
    on_pools = render(tmp_path / "pools", models)
    (deployment,) = workers(on_pools).values()
    assert pod(deployment)["nodeSelector"]["penstock.dev/gpu"] == "h100-x1-flex"
    assert "nvidia-tesla-a100" not in json.dumps(pod(deployment)["affinity"])
    # This is not a spot node, so there is enough time to finish.
    assert settings_of(on_pools, deployment)["PENSTOCK_DRAIN_S"] == "60"


def test_kinds_of_gke_have_only_documented_fields(objects: Objects, tmp_path: Path) -> None:
    # No schemas for these kinds are available offline; the fields come from GKE's reference pages.
    documented = {
        "ComputeClass": {
            "priorities",
            "nodePoolAutoCreation",
            "nodePoolConfig",
            "whenUnsatisfiable",
            "activeMigration",
            "autoscalingPolicy",
        },
        "PodMonitoring": {"selector", "endpoints", "targetLabels", "limits"},
    }
    reserved = {"l4": {"name": "serving", "zone": "europe-west4-c"}}
    classes = render(tmp_path, compute_classes=True, reservations=reserved)
    rendered = [*objects, *classes]
    for kind, fields in documented.items():
        found = of_kind(rendered, kind)
        assert found, kind
        assert {field for one in found.values() for field in one["spec"]} <= fields, kind
    rules = [
        rule
        for one in of_kind(rendered, "ComputeClass").values()
        for rule in one["spec"]["priorities"]
    ]
    assert {field for rule in rules for field in rule} == {
        *("machineType", "spot", "gpu", "location", "storage", "nodeSystemConfig", "reservations")
    }
    gpus = [rule["gpu"] for rule in rules]
    assert {field for gpu in gpus for field in gpu} == {
        *("type", "count", "driverVersion", "gpuSharing")
    }
    assert {gpu["driverVersion"] for gpu in gpus} <= {"default", "latest"}
    shared = [gpu["gpuSharing"]["sharingStrategy"] for gpu in gpus if "gpuSharing" in gpu]
    assert set(shared) <= {"TIME_SHARING", "MPS"}


def test_model_without_a_gpu_runs_anywhere(tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text(
        "models: [{name: tiny, task: embedding, source: 'hf:a/b', dimensions: 4,"
        " batch: {max_tokens: 8}}]"
    )
    (deployment,) = workers(render(tmp_path / "out", models)).values()
    assert "nodeSelector" not in pod(deployment)
    assert "nvidia.com/gpu" not in pod(deployment)["containers"][0]["resources"]["limits"]


def test_terraform_names_workers_alike() -> None:
    # Terraform's own test of the same file is platform/tests/names.tftest.hcl.
    accounts = json.loads(Path("infra/terraform/platform/tests/names.json").read_text())
    assert accounts == {name: f"worker-{slug(name)}" for name in accounts}


def test_objects_of_the_terraform_tests_are_rendered_from_this_tree(tmp_path: Path) -> None:
    # To fix it: run python -m infra.kubernetes with DEPLOYMENT's values, then kubectl kustomize OUT
    # > objects.yaml.
    rendered = render(tmp_path, GOLDEN / "models.yaml")
    assert rendered == objects_of((GOLDEN / "objects.yaml").read_text())


def test_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="something other"):
        write_overlay(tmp_path, CATALOG, Path("models.yaml"), DEPLOYMENT)
    assert (tmp_path / "letters.txt").read_text() == "mine"
    with pytest.raises(ConfigurationError, match=r"letters.txt is not a folder"):
        write_overlay(tmp_path / "letters.txt", CATALOG, Path("models.yaml"), DEPLOYMENT)
    assert (tmp_path / "letters.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting property name"),
        ("{}", "no region 'europe-west4'"),
        ('{"europe-west4": null}', "europe-west4: must be an object"),
        ('{"europe-west4": {}}', "project: Field required"),
        (COMPLETE, "image: String should match"),
    ],
)
def test_wrong_input_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, reason: str
) -> None:
    (tmp_path / "deployments.json").write_text(content)
    words = ["--out", str(tmp_path / "out"), "--deployments", str(tmp_path / "deployments.json")]
    assert main([*words, "--region", "europe-west4", "--image", "no tag, no digest"]) == 2
    assert reason in capsys.readouterr().err
