"""The pod that drains nodes with broken GPUs has exactly the permissions it uses, if there are
GPUs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.infra.deploy.manifests import IMAGE, of_kind, pod, render

ENTRY = {"name": "texts", "task": "embedding", "source": "package:a/b", "dimensions": 4}
MONITOR = Path("infra/kubernetes/gpu-nodes/gpu-monitor.json")


def models_file(folder: Path, **entry: object) -> Path:
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump({"models": [ENTRY | {"batch": {"max_tokens": 8}} | entry]}))
    return file


def test_it_is_deployed_beside_gpus_only(tmp_path: Path) -> None:
    without = render(tmp_path / "none", models_file(tmp_path))
    assert "gpu-nodes" not in of_kind(without, "Deployment")
    file = models_file(tmp_path, gpu={"type": "l4", "share": 4})
    objects = render(tmp_path / "l4", file, namespace="other")
    deployment = of_kind(objects, "Deployment")["gpu-nodes"]
    assert deployment["metadata"]["namespace"] == "other"
    assert deployment["spec"]["replicas"] == 1
    assert pod(deployment)["containers"][0]["image"] == IMAGE
    account = of_kind(objects, "ServiceAccount")["gpu-nodes"]
    assert pod(deployment)["serviceAccountName"] == account["metadata"]["name"]
    subject = {"kind": "ServiceAccount", "name": "gpu-nodes", "namespace": "other"}
    for kind, role in (("ClusterRoleBinding", "ClusterRole"), ("RoleBinding", "Role")):
        bindings = of_kind(objects, kind).values()
        (binding,) = (one for one in bindings if "gpu-nodes" in one["metadata"]["name"])
        assert binding["subjects"] == [subject]
        assert binding["roleRef"]["name"] in of_kind(objects, role)
    policy = of_kind(objects, "NetworkPolicy")["gpu-nodes"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= (
        deployment["spec"]["template"]["metadata"]["labels"].items()
    )


def test_it_may_do_what_it_does_and_nothing_else() -> None:
    """The requests come from tests/workers/test_gpu_nodes.py, which sends each of them."""
    documents = yaml.safe_load_all(Path("infra/kubernetes/gpu-nodes/rights.yaml").read_text())
    rights = {
        (rule["resources"][0], verb)
        for document in documents
        for rule in document.get("rules", ())
        for verb in rule["verbs"]
    }
    assert rights == {
        ("nodes", "get"),
        ("nodes", "list"),
        ("nodes", "patch"),
        ("pods", "list"),
        ("pods/eviction", "create"),
    }


@pytest.mark.parametrize(
    ("line", "has_failed"),
    [
        ("NVRM: Xid (PCI:0000:00:05): 79, pid='<unknown>', name=<unknown>, GPU has fallen", True),
        ("NVRM: Xid (PCI:0000:00:05): 48, pid=1234, name=python, An uncorrectable double", True),
        ("NVRM: Xid (PCI:0000:00:05): 95, pid=1234, Uncontained ECC error", True),
        # Errors caused by a program: an illegal address, a stopped process, a contained error.
        ("NVRM: Xid (PCI:0000:00:05): 31, pid=1234, name=python, Ch 00000008, MMU Fault", False),
        ("NVRM: Xid (PCI:0000:00:05): 43, pid=1234, name=python, Ch 00000010", False),
        ("NVRM: Xid (PCI:0000:00:05): 45, pid=1234, name=python, Ch 00000010", False),
        ("NVRM: Xid (PCI:0000:00:05): 94, pid=1234, Contained: SM", False),
        ("usb 1-1: new high-speed device, Xid 79", False),
    ],
)
def test_node_problem_detector_knows_a_broken_gpu(line: str, has_failed: bool) -> None:
    monitor = json.loads(MONITOR.read_text())
    (condition,), (rule,) = monitor["conditions"], monitor["rules"]
    assert (rule["type"], rule["condition"]) == ("permanent", condition["type"])
    assert bool(re.search(rule["pattern"], line)) == has_failed
