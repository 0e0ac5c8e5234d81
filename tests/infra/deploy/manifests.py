"""The workers' manifests, rendered by Kustomize itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.kubernetes.deployment import Deployment
from infra.kubernetes.overlay import write_overlay
from shared.models.catalog_file import read_catalog
from tests.limits import WAIT_LIMIT_S

IMAGE = f"europe-west4-docker.pkg.dev/example-project/penstock/worker@sha256:{'0' * 64}"
DEPLOYMENT = Deployment(
    project="example-project",
    region="europe-west4",
    namespace="penstock",
    dataset="penstock",
    objects_url="gs://example-project-penstock-objects",
    rows_url="gs://example-project-penstock-rows",
    redis_url="redis://10.64.32.2:6379/0",
    records_url="redis://10.64.32.2:6379/0",
    redis_cidrs=("10.64.32.0/20",),
    spot=True,
    overflow="a100",
    compute_classes=False,
    image=IMAGE,
)

Objects = list[dict[str, Any]]


def render(out: Path, models_file: Path = Path("models.yaml"), **changes: object) -> Objects:
    """The cluster's objects after these changes to DEPLOYMENT; skips the test if Kustomize is
    missing.
    """
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has Kustomize built in, is not installed")
    deployment = Deployment.model_validate(DEPLOYMENT.model_dump() | changes)
    write_overlay(out, read_catalog(models_file), models_file, deployment)
    command = ["kubectl", "kustomize", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return objects_of(done.stdout)


def objects_of(text: str) -> Objects:
    """The objects in a YAML file. Python's own loader takes ten times as long as libyaml's."""
    return [one for one in yaml.load_all(text, yaml.CSafeLoader) if one]


def of_kind(objects: Objects, kind: str) -> dict[str, dict[str, Any]]:
    """The objects of one kind, keyed by name."""
    return {found["metadata"]["name"]: found for found in objects if found["kind"] == kind}


def workers(objects: Objects) -> dict[str, dict[str, Any]]:
    return {
        name: found
        for name, found in of_kind(objects, "Deployment").items()
        if name.startswith("worker-")
    }


def pod(deployment: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def settings_of(objects: Objects, deployment: dict[str, Any]) -> dict[str, str]:
    """The environment variables set in a worker's container."""
    (source,) = pod(deployment)["containers"][0]["envFrom"]
    data: dict[str, str] = of_kind(objects, "ConfigMap")[source["configMapRef"]["name"]]["data"]
    return data
