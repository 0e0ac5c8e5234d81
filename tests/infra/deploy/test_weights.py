"""Weights and the hub's token on their way to workers: mounted where the worker looks, readable
only by the right accounts, with the rest of the pod unchanged.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from infra.kubernetes.deployment import read_gpu_types
from shared.models.kubernetes_names import slug
from tests.infra.deploy.manifests import Objects, of_kind, pod, render, settings_of, workers
from tests.infra.deploy.terraform import plan_platform
from tests.workers.models.custom.classes import write_class
from workers.models.custom.checking import inspect_folder, write_interface
from workers.models.source import folder_of, list_of

pytestmark = pytest.mark.slow(about_s=13)

BUCKET, SECRET = "example-project-penstock-weights", "penstock-hub-token"
FUNCTION = "predict: predict.py:predict"
ENTRY = {"task": "embedding", "dimensions": 4, "batch": {"max_tokens": 8}}


def models_file(folder: Path, **gpu: object) -> Path:
    """One model from the hub and one from the image."""
    models = [
        ENTRY | {"name": "of-the-hub", "source": "hf:org/name", "gpu": gpu or {"type": "none"}},
        ENTRY | {"name": "of-the-image", "source": "package:some/model"},
    ]
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump({"models": models}))
    return file


def worker(objects: Objects, name: str) -> dict[str, Any]:
    return workers(objects)[f"worker-{name}"]


def mounts(deployment: dict[str, Any]) -> dict[str, str]:
    """The paths where volumes are mounted, keyed by volume name."""
    found = pod(deployment)["containers"][0]["volumeMounts"]
    return {mount["name"]: mount["mountPath"] for mount in found}


def volumes(deployment: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {volume["name"]: volume for volume in pod(deployment)["volumes"]}


def test_a_copy_is_mounted_where_the_worker_looks_for_it(tmp_path: Path) -> None:
    objects = render(tmp_path / "out", models_file(tmp_path), weights_bucket=BUCKET)
    deployment = worker(objects, "of-the-hub")
    looked_in = PurePosixPath(settings_of(objects, deployment)["PENSTOCK_WEIGHTS_DIR"])
    csi = volumes(deployment)["weights"]["csi"]
    options = dict(
        option.partition("=")[::2] for option in csi["volumeAttributes"]["mountOptions"].split(",")
    )
    assert (csi["driver"], csi["readOnly"]) == ("gcsfuse.csi.storage.gke.io", True)
    assert csi["volumeAttributes"]["bucketName"] == BUCKET
    for path in (folder_of("org/name", "refs/pr/1"), list_of("org/name", "main")):
        below = (looked_in / path).relative_to(mounts(deployment)["weights"])
        assert PurePosixPath(options["only-dir"]) / below == path
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["gke-gcsfuse/volumes"] == "true"
    # Annotations that existed before are still present.
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert {"models", "cache", "spool", "tmp", "shm", "pod-info"} <= set(mounts(deployment))


def test_adapters_of_other_repositories_are_mounted_too(tmp_path: Path) -> None:
    adapters = {"ink": {"source": "hf:org/loras/ink.safetensors", "revision": "1"}}
    entry = ENTRY | {
        "name": "of-the-hub",
        "source": "hf:org/name",
        "task": "image",
        "batch": {"max_pixel_steps": 10**6},
        "image": {"adapters": adapters},
    }
    del entry["dimensions"]
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump({"models": [entry]}))
    objects = render(tmp_path / "out", file, weights_bucket=BUCKET)
    deployment = worker(objects, "of-the-hub")
    looked_in = PurePosixPath(settings_of(objects, deployment)["PENSTOCK_WEIGHTS_DIR"])
    for name, repository in (("weights", "org/name"), ("weights-1", "org/loras")):
        options = volumes(deployment)[name]["csi"]["volumeAttributes"]["mountOptions"]
        assert f"only-dir=hub/{repository}" in options.split(",")
        path = looked_in / folder_of(repository, "1")
        assert path.is_relative_to(mounts(deployment)[name])


def test_the_repositories_of_gguf_files_and_text_adapters_are_mounted(tmp_path: Path) -> None:
    adapters = {"law": {"source": "hf:org/law/law.gguf", "revision": "1"}}
    entry = {
        "name": "writer",
        "task": "text",
        "engine": "llama.cpp",
        "source": "hf:org/name/model.Q4_0.gguf",
        "batch": {"max_tokens": 4096},
        "generation": {"adapters": adapters},
    }
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump({"models": [entry]}))
    deployment = worker(render(tmp_path / "out", file, weights_bucket=BUCKET), "writer")
    found = {name: path for name, path in mounts(deployment).items() if "weights" in name}
    root = "/var/cache/penstock-weights/hub"
    assert found == {"weights": f"{root}/org/name", "weights-1": f"{root}/org/law"}


def test_copies_of_controls_and_ip_adapters_are_mounted_beside_that_of_their_model(
    tmp_path: Path,
) -> None:
    control = {"source": "hf:org/control"}
    entry = {
        "name": "drawer",
        "task": "image",
        "source": "hf:org/name",
        "batch": {"max_pixel_steps": 8},
        "image": {
            "controls": {"edges": control, "also": control},
            "ip_adapters": {"edges": {"source": "hf:org/ip", "weight_name": "a.safetensors"}},
            "compile": "never",
        },
    }
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump({"models": [entry]}))
    deployment = worker(render(tmp_path / "out", file, weights_bucket=BUCKET), "drawer")
    found = {name: path for name, path in mounts(deployment).items() if "weights" in name}
    root = "/var/cache/penstock-weights/hub"
    beside = {"weights-1": f"{root}/org/control", "weights-2": f"{root}/org/ip"}
    assert found == {"weights": f"{root}/org/name", **beside}
    for name, path in found.items():
        options = volumes(deployment)[name]["csi"]["volumeAttributes"]["mountOptions"]
        assert f"only-dir=hub/{path.removeprefix(root)[1:]}," in options


@pytest.mark.parametrize("share", [1, 4, 22])
def test_worker_and_sidecar_together_take_one_part_of_a_node(tmp_path: Path, share: int) -> None:
    file = models_file(tmp_path, type="l4", share=share)
    deployment = worker(render(tmp_path / "out", file, weights_bucket=BUCKET), "of-the-hub")
    asked = pod(deployment)["containers"][0]["resources"]["requests"]
    sidecar = deployment["spec"]["template"]["metadata"]["annotations"]
    node = read_gpu_types()["l4"]
    cpu_m = int(asked["cpu"][:-1]) + int(sidecar["gke-gcsfuse/cpu-request"][:-1])
    memory_mib = int(asked["memory"][:-2]) + int(sidecar["gke-gcsfuse/memory-request"][:-2])
    assert cpu_m * share <= node.cpu * 1000
    assert memory_mib * share <= node.memory_gib * 1024
    cache = volumes(deployment)["gke-gcsfuse-cache"]["emptyDir"]["sizeLimit"]
    assert cache == asked["ephemeral-storage"]


@pytest.mark.parametrize("bucket", [None, BUCKET])
@pytest.mark.parametrize("type_", read_gpu_types())
def test_weights_that_fit_into_the_gpu_fit_on_the_disk(
    tmp_path: Path, type_: str, bucket: str | None
) -> None:
    file = models_file(tmp_path, type=type_, share=1)
    deployment = worker(render(tmp_path / "out", file, weights_bucket=bucket), "of-the-hub")
    limits = pod(deployment)["containers"][0]["resources"]["limits"]
    found = volumes(deployment)
    room = found["gke-gcsfuse-cache" if bucket else "cache"]["emptyDir"]["sizeLimit"]
    size_gib = int(room[:-2]) / (1024 if room.endswith("Mi") else 1)
    # Half the memory is enough for a model's computation.
    assert read_gpu_types()[type_].gpu_memory_gib / 2 <= size_gib
    # The pod is evicted if it exceeds its limit.
    assert size_gib <= int(limits["ephemeral-storage"].removesuffix("Gi"))


def test_a_class_has_the_disk_that_its_processes_may_write(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    write_class(tmp_path / "class", "def predict(a: int) -> int: return a", FUNCTION)
    write_interface(tmp_path / "class", inspect_folder(tmp_path / "class").interface)
    entry = {"name": "own", "task": "custom", "source": f"local:{tmp_path}/class"}
    file = tmp_path / "models.yaml"
    models = [
        entry | {"resources": {"disk_bytes": 3 * 2**30}},
        ENTRY | {"name": "of-the-image", "source": "package:some/model"},
    ]
    file.write_text(yaml.safe_dump({"models": models}))
    objects = render(tmp_path / "out", file)
    deployment = worker(objects, "own")
    processes = int(settings_of(objects, deployment)["PENSTOCK_PROCESSES"])
    room_gib = int(volumes(deployment)["tmp"]["emptyDir"]["sizeLimit"].removesuffix("Mi")) / 1024
    others_gib = volumes(worker(objects, "of-the-image"))["tmp"]["emptyDir"]["sizeLimit"]
    assert (processes, room_gib, others_gib) == (2, 8.0, "2Gi")


def test_only_models_of_the_hub_have_weights_mounted(tmp_path: Path) -> None:
    objects = render(tmp_path / "out", models_file(tmp_path), weights_bucket=BUCKET)
    deployment = worker(objects, "of-the-image")
    assert "weights" not in volumes(deployment)
    assert "PENSTOCK_WEIGHTS_DIR" not in settings_of(objects, deployment)


IMAGES = {
    "name": "painter",
    "task": "image",
    "source": "hf:org/painter",
    "batch": {"max_pixel_steps": 10_000_000},
    "gpu": {"type": "l4", "share": 1},
}


@pytest.mark.parametrize(
    ("change", "bucket", "is_kept"),
    [
        ({}, BUCKET, True),
        ({}, None, False),
        ({"gpu": {"type": "none"}}, BUCKET, False),
        ({"image": {"compile": "never"}}, BUCKET, False),
    ],
    ids=["compiled", "no bucket", "no GPU", "never compiled"],
)
def test_compiled_kernels_are_kept_in_the_bucket_of_the_weights(
    tmp_path: Path, change: dict[str, Any], bucket: str | None, is_kept: bool
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump({"models": [IMAGES | change]}))
    objects = render(tmp_path / "out", file, weights_bucket=bucket)
    deployment = worker(objects, "painter")
    settings, found = settings_of(objects, deployment), volumes(deployment)
    assert ("PENSTOCK_KERNELS_DIR" in settings) == ("kernels" in found) == is_kept
    if not is_kept:
        return
    assert settings["PENSTOCK_KERNELS_DIR"] == mounts(deployment)["kernels"]
    csi = found["kernels"]["csi"]
    assert csi["volumeAttributes"]["bucketName"] == BUCKET
    options = csi["volumeAttributes"]["mountOptions"].split(",")
    user = pod(deployment)["securityContext"]["runAsUser"]
    assert {"only-dir=kernels", f"uid={user}", f"gid={user}"} <= set(options)
    assert "readOnly" not in csi
    assert found["weights"]["csi"]["readOnly"]


def test_workers_write_the_kernels_of_their_own_model_only(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    other = IMAGES | {"name": "Other.Painter", "gpu": {"type": "none"}}
    file.write_text(yaml.safe_dump({"models": [IMAGES, other]}))
    made = plan_platform(tmp_path, models_file=str(file), weights={"prefetched": True})
    (right,) = (
        one
        for one in made.of("google_storage_bucket_iam_member")
        if one["bucket"] == BUCKET and one["role"] == "roles/storage.objectUser"
    )
    assert right["member"].endswith("/subject/ns/penstock/sa/worker-painter")
    (condition,) = right["condition"]
    where = f"projects/_/buckets/{BUCKET}/objects/kernels/painter/"
    assert condition["expression"] == f'resource.name.startsWith("{where}")'


def test_the_token_is_a_file_and_not_in_the_environment(tmp_path: Path) -> None:
    objects = render(tmp_path / "out", models_file(tmp_path), hub_token=SECRET)
    deployment = worker(objects, "of-the-hub")
    csi = volumes(deployment)["hub-token"]["csi"]
    (named,) = of_kind(objects, "SecretProviderClass").values()
    assert csi["driver"] == "secrets-store-gke.csi.k8s.io"
    assert csi["volumeAttributes"] == {"secretProviderClass": named["metadata"]["name"]}
    assert named["metadata"]["namespace"] == deployment["metadata"]["namespace"]
    (secret,) = yaml.safe_load(named["spec"]["parameters"]["secrets"])
    assert secret["resourceName"] == f"projects/example-project/secrets/{SECRET}/versions/latest"
    settings = settings_of(objects, deployment)
    path = f"{mounts(deployment)['hub-token']}/{secret['path']}"
    assert {name: value for name, value in settings.items() if "TOKEN" in name} == {
        "HF_TOKEN_PATH": path
    }
    assert "hub-token" not in volumes(worker(objects, "of-the-image"))


def test_who_has_a_copy_needs_no_token(tmp_path: Path) -> None:
    file = models_file(tmp_path)
    objects = render(tmp_path / "out", file, weights_bucket=BUCKET, hub_token=SECRET)
    assert "hub-token" not in volumes(worker(objects, "of-the-hub"))


def test_without_either_nothing_is_there(objects: Objects) -> None:
    assert of_kind(objects, "SecretProviderClass") == {}
    assert "gcsfuse" not in json.dumps(objects)


def test_terraform_gives_the_token_to_workers_of_hub_models_alone(tmp_path: Path) -> None:
    given = {"hub_token": True, "prefetched": True}
    made = plan_platform(tmp_path, models_file=str(models_file(tmp_path)), weights=given)
    (secret,) = (
        one
        for one in made.of("google_secret_manager_secret")
        if one["secret_id"].endswith("hub-token")
    )
    readers = [
        one["member"]
        for one in made.of("google_secret_manager_secret_iam_member")
        if one["secret_id"] == secret["secret_id"]
    ]
    assert [member.partition("/subject/")[2] for member in readers if member] == [
        f"ns/penstock/sa/worker-{slug('of-the-hub')}"
    ]
    assert len(readers) == 1
    # The value is added by hand, because Terraform manages no version.
    assert secret["secret_id"] not in json.dumps(made.of("google_secret_manager_secret_version"))
