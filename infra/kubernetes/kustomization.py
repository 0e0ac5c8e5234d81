"""Writes kustomization.yaml files and the patches that several of them share."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

TREE = Path(__file__).parent

_NUMBER = re.compile(r"[-+]?(0o[0-7]+|(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?)$")


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.2 (Kubernetes) reads as numbers but YAML 1.1 (PyYAML) does not."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def dump_yaml(content: object, *, width: int = 80) -> str:
    """Returns YAML that Go and Python read the same way, with lines folded at `width`."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=width)


def node_affinity(accelerators: tuple[str, ...]) -> dict[str, Any]:
    terms = [
        {"key": "cloud.google.com/gke-accelerator", "operator": "In", "values": list(accelerators)}
    ]
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": terms}]
        }
    }


def deployment_patch(name: str, pod: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Returns a patch for Deployment `name`: its pod template and the rest of its `spec`."""
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


def replace_value(path: str, value: object) -> dict[str, Any]:
    """Returns a JSON patch operation (RFC 6902)."""
    return {"op": "replace", "path": path, "value": value}


def add_value(path: str, value: object) -> dict[str, Any]:
    """Returns a JSON patch operation (RFC 6902). A path that ends with `/-` appends to a list."""
    return {"op": "add", "path": path, "value": value}


def json_patch(kind: str, operations: list[dict[str, Any]], name: str = "") -> dict[str, Any]:
    """Returns a patch for the object with this name.

    Without a name, it applies to all objects of this kind.
    """
    target = {"kind": kind} | ({"name": name} if name else {})
    return {"target": target, "patch": dump_yaml(operations)}


def label_of_pods(name: str, value: str) -> list[dict[str, Any]]:
    """Returns the `labels` that add a label to objects, their pods, and pod selectors."""
    return [{"pairs": {name: value}, "includeSelectors": True, "includeTemplates": True}]


def write_parts(
    folder: Path,
    *parts: str,
    patches: Sequence[dict[str, Any]] = (),
    components: Sequence[str] | None = None,
    **fields: Any,
) -> None:
    """Writes the kustomization.yaml for a folder that changes parts of the tree, in order."""
    folder.mkdir(exist_ok=True)
    if components is not None:
        fields = {
            "components": [_path_up_to(folder, component) for component in components]
        } | fields
    write_kustomization(
        folder, [_path_up_to(folder, part) for part in parts], patches=patches, **fields
    )


def write_kustomization(
    folder: Path, resources: list[str], *, patches: Sequence[dict[str, Any]], **fields: Any
) -> None:
    """Writes one kustomization.yaml. A patch without a target is a strategic merge."""
    written = [patch if "target" in patch else {"patch": dump_yaml(patch)} for patch in patches]
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    content = head | {"resources": resources} | fields | {"patches": written}
    (folder / "kustomization.yaml").write_text(dump_yaml(content), encoding="utf-8")


def _path_up_to(folder: Path, part: str) -> str:
    """Returns a relative path. Kustomize accepts no other paths."""
    return os.path.relpath(TREE / part, folder.resolve())
