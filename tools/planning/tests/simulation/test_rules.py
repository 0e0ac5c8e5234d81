"""The rules match the deployed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.kubernetes.deployment import Deployment
from infra.kubernetes.overlay import write_overlay
from penstock_planning.simulation.rules import autoscaler_rules, read_rules, render_folder
from shared.errors import ConfigurationError
from shared.models.catalog_file import read_catalog
from shared.models.kubernetes_names import slug
from tests.infra.deploy.manifests import DEPLOYMENT, of_kind, render

MODELS = Path("models.yaml")


def test_rules_are_what_kustomize_renders(tmp_path: Path) -> None:
    there = render(tmp_path / "kustomize")
    write_overlay(tmp_path / "ours", read_catalog(MODELS), MODELS, DEPLOYMENT)
    for model in read_catalog(MODELS).models:
        ours = render_folder(tmp_path / "ours" / f"worker-{slug(model.name)}")
        for kind in ("ScaledObject", "Deployment"):
            (mine,) = (
                rendered_object["spec"]
                for rendered_object in ours
                if rendered_object["kind"] == kind
            )
            theirs = of_kind(there, kind)[f"worker-{slug(model.name)}"]["spec"]
            assert _read(mine) == _read(theirs)


def _read(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that rules are read from, without the names that Kustomize changes."""
    if "triggers" in spec:
        triggers = [trigger | {"authenticationRef": None} for trigger in spec["triggers"]]
        return spec | {"triggers": triggers, "scaleTargetRef": None}
    pod = spec["template"]["spec"]
    return {
        "strategy": spec["strategy"],
        "grace": pod["terminationGracePeriodSeconds"],
        "resources": pod["containers"][0]["resources"],
        "affinity": sorted(pod.get("affinity", {})),
        "nodes": pod.get("nodeSelector"),
    }


def test_rules_of_a_model() -> None:
    rules = read_rules(read_catalog(MODELS), MODELS, DEPLOYMENT)["all-MiniLM-L6-v2"]
    assert rules.slug == "all-minilm-l6-v2"
    assert rules.autoscaler.minReplicaCount == 1
    assert rules.autoscaler.maxReplicaCount == 20
    assert 'worker="all-minilm-l6-v2"' in rules.autoscaler.triggers[0].query
    assert rules.drain_s > 0


def test_a_deployment_has_only_its_models() -> None:
    variables = DEPLOYMENT.model_dump() | {"models": ["all-MiniLM-L6-v2"]}
    deployment = Deployment.model_validate(variables)
    assert set(read_rules(read_catalog(MODELS), MODELS, deployment)) == {"all-MiniLM-L6-v2"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"idleReplicaCount": 0}, "idleReplicaCount"),
        ({"advanced": {"scalingModifiers": {"formula": "a"}}}, "scalingModifiers"),
        ({"triggers": [{"type": "cron", "name": "noon", "metadata": {}}]}, "noon"),
        ({"triggers": [{"type": "prometheus", "metricType": "Value", "metadata": {}}]}, "Average"),
    ],
)
def test_what_is_not_simulated_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        autoscaler_rules({"spec": {"triggers": []} | changes})


def test_missing_behavior_is_kubernetes_own() -> None:
    rules = autoscaler_rules({"spec": {"triggers": []}})
    assert rules.behavior.scaleDown.stabilizationWindowSeconds == 300
    assert rules.behavior.scaleUp.policies[1].value == 4
