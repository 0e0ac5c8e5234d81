"""Whole deployments outside Google, as Kustomize renders them, and helpers that examine them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.kubernetes.self_hosted import write_self_hosted
from infra.kubernetes.site import SelfHostedSite
from shared.models.catalog_file import read_catalog
from tests.infra.deploy.manifests import Objects, objects_of, of_kind, pod
from tests.limits import WAIT_LIMIT_S

EXAMPLE = Path("infra/kubernetes/site.example.yaml")
MODELS = Path("models.yaml")
GIVEN: dict[str, Any] = {
    "broker": {"kind": "google", "inbox_pool": 4, "inbox_first": 2000, "inbox_slots": 2},
    "rows": {"kind": "google"},
    "redis": {"kind": "given", "url": "rediss://redis.corp:6380/1", "networks": ["10.1.0.0/16"]},
    "objects": {
        "kind": "bucket",
        "url": "s3://penstock/objects",
        "secret": "penstock-s3",
        "networks": ["10.2.0.9/32"],
        "port": 9000,
    },
    "google": {"project": "example-project", "credentials_secret": "penstock-google"},
    "ingress": None,
}
"""Everything is external."""
RABBITMQ: dict[str, Any] = {
    "kind": "rabbitmq",
    "secret": "penstock-broker",
    "networks": ["10.3.0.0/16"],
}
"""The broker is external."""


def example(**changes: object) -> dict[str, Any]:
    """The example's fields, with these changes."""
    found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    return found | changes


def rendered(out: Path, **changes: object) -> Objects:
    """The cluster's objects after these changes to the example; skips the test if Kustomize is
    missing.
    """
    return kustomized(out, MODELS, example(**changes))


def kustomized(out: Path, models_file: Path, site: dict[str, Any]) -> Objects:
    """A site's objects in a cluster with this catalog; skips the test when `rendered` does."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has Kustomize built in, is not installed")
    found = SelfHostedSite.model_validate(site)
    write_self_hosted(out, found, read_catalog(models_file), models_file)
    done = subprocess.run(
        ["kubectl", "kustomize", str(out)],
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return objects_of(done.stdout)


def pods_of(objects: Objects) -> dict[str, dict[str, Any]]:
    """All pods, keyed by the name of the object that creates them."""
    found = of_kind(objects, "Deployment") | of_kind(objects, "StatefulSet")
    return {name: pod(one) for name, one in found.items()}


def environment(objects: Objects, name: str) -> dict[str, str]:
    """The environment variables that a Deployment's container gets from ConfigMaps."""
    maps = of_kind(objects, "ConfigMap")
    given: dict[str, str] = {}
    for source in pods_of(objects)[name]["containers"][0]["envFrom"]:
        if "configMapRef" in source:
            given |= maps[source["configMapRef"]["name"]]["data"]
    return given


def fits(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """True if a selector matches pods with these labels."""
    wanted = selector.get("matchLabels", {})
    among = selector.get("matchExpressions", [])
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        labels.get(one["key"]) in one["values"] for one in among
    )


def allows(objects: Objects, source: str, target: str, port: int) -> bool:
    """True if the policies let a pod of `source` connect to a pod of `target` in the namespace."""
    labels = {
        name: made["spec"]["template"]["metadata"]["labels"]
        for name, made in (of_kind(objects, "Deployment") | of_kind(objects, "StatefulSet")).items()
    }
    (container,) = pods_of(objects)[target]["containers"]
    names = {one["name"]: one["containerPort"] for one in container["ports"]}

    def one_way(kind: str, peer: str, of: str, other: str) -> bool:
        for policy in of_kind(objects, "NetworkPolicy").values():
            if not fits(policy["spec"]["podSelector"], labels[of]):
                continue
            for rule in policy["spec"].get(kind, []):
                ports = {names.get(one["port"], one["port"]) for one in rule["ports"]}
                peers = [one["podSelector"] for one in rule[peer] if "podSelector" in one]
                if port in ports and any(fits(one, labels[other]) for one in peers):
                    return True
        return False

    return one_way("egress", "to", source, target) and one_way("ingress", "from", target, source)
