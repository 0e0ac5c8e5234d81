"""Writes kustomization.yaml files, and patches that several of them need."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

TREE = Path(__file__).parent

_NUMBER = re.compile(r"[-+]?(0o[0-7]+|(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?)$")


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.2 (Kubernetes) reads as numbers and YAML 1.1 (PyYAML) does not."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def dump_yaml(content: object, *, width: int = 80) -> str:
    """Returns YAML that Go and Python read the same way, with lines folded at `width`."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=width)


def node_affinity(accelerators: tuple[str, ...]) -> dict[str, Any]:
    """Returns node affinity for nodes with one of these accelerators."""
    terms = [
        {"key": "cloud.google.com/gke-accelerator", "operator": "In", "values": list(accelerators)}
    ]
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": terms}]
        }
    }


def deployment_patch(name: str, pod: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Returns a patch of the pod template and the rest of the `spec` of the Deployment `name`."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {**spec, "template": {"spec": pod}},
    }


def image_override(name: str, image: str) -> dict[str, str]:
    """Returns the entry that replaces the image `name` with `image`, by digest or tag."""
    new_name, _, digest = image.partition("@")
    if digest:
        return {"name": name, "newName": new_name, "digest": digest}
    new_name, _, tag = image.rpartition(":")
    return {"name": name, "newName": new_name, "newTag": tag}


def write_kustomization(
    folder: Path, resources: list[str], *, patches: list[dict[str, Any]], **fields: Any
) -> None:
    """Writes one kustomization.yaml. A patch without a target is a strategic merge."""
    written = [patch if "target" in patch else {"patch": dump_yaml(patch)} for patch in patches]
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    content = head | {"resources": resources} | fields | {"patches": written}
    (folder / "kustomization.yaml").write_text(dump_yaml(content), encoding="utf-8")


def path_up_to(folder: Path, part: str) -> str:
    """Returns the relative path from `folder` to a part of the tree.

    Kustomize accepts no other paths.
    """
    return os.path.relpath(TREE / part, folder.resolve())
