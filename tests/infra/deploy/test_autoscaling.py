"""The autoscaler's triggers, as Kustomize renders them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.models.catalog_file import read_catalog
from shared.models.kubernetes_names import slug
from tests.infra.deploy.manifests import Objects, of_kind, pod, render, workers

MODELS = read_catalog(Path("models.yaml")).models
UP_TO = 200
"""Workers per model, for rules that depend on the number of workers."""


def test_lost_metrics_are_an_error_and_keep_what_runs(objects: Objects) -> None:
    for model in MODELS:
        spec = _scaled(objects, model.name)
        assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
        # With 0, KEDA would scale to zero on an error.
        assert spec["fallback"]["replicas"] == max(1, model.replicas.min)
        for trigger in spec["triggers"]:
            assert trigger["metadata"]["ignoreNullValues"] == "false"
            ours = re.sub(r"sum\(pubsub[^)]*\) or vector\(0\)", "", trigger["metadata"]["query"])
            # Without this metric, items count for more.
            spare = r"sum\(rate\(penstock_worker_spare_seconds_total[^)]*\)\) or vector\(0\)"
            ours = re.sub(spare, "", ours)
            guess = f"or vector({model.definition.first_guesses.item_s:g})"
            for part in re.findall(r"or vector\(.*?\)", ours):
                # Missing data from our own metrics counts as no load, except for the bound on
                # arrivals.
                assert part == guess or trigger["name"] == "arrivals"


def test_queries_ask_for_one_model_and_one_region(objects: Objects) -> None:
    for model in MODELS:
        for trigger in _scaled(objects, model.name)["triggers"]:
            query = trigger["metadata"]["query"]
            assert set(re.findall(r'model="(.*?)"', query)) <= {model.name}
            assert set(re.findall(r'worker="(.*?)"', query)) <= {slug(model.name)}
            assert set(re.findall(r'location="(.*?)"', query)) <= {"europe-west4"}


def test_messages_are_weighed_in_seconds_of_work(objects: Objects) -> None:
    for model in MODELS:
        (trigger,) = (
            one for one in _scaled(objects, model.name)["triggers"] if one["name"] == "messages"
        )
        assert float(trigger["metadata"]["threshold"]) < model.deadline.longest_s
        assert "penstock_worker_inference_seconds_sum" in trigger["metadata"]["query"]


def test_rollout_of_any_number_goes_on_without_a_gpu_more(objects: Objects) -> None:
    for deployment in workers(objects).values():
        update = deployment["spec"]["strategy"]["rollingUpdate"]
        for count in range(1, UP_TO):
            surge, unavailable = _rolling(update, count)
            assert surge == 0
            assert unavailable >= 1
            # A tenth: at a utilization of 0.7, the remaining pods can carry the load.
            assert unavailable <= max(1, count * 0.1)


def test_rollout_has_time_for_a_node_and_the_slowest_start(objects: Objects) -> None:
    for deployment in workers(objects).values():
        probe = pod(deployment)["containers"][0]["startupProbe"]
        start_s = probe["periodSeconds"] * probe["failureThreshold"]
        node_s, grace_s = 300, pod(deployment)["terminationGracePeriodSeconds"]
        assert start_s + node_s + grace_s < deployment["spec"]["progressDeadlineSeconds"]


def test_model_that_starts_slowly_has_more_time(tmp_path: Path) -> None:
    models_file = tmp_path / "models.yaml"
    catalog = yaml.safe_load(Path("models.yaml").read_text(encoding="utf-8"))
    catalog["models"][0]["startup_s"] = 1000
    models_file.write_text(yaml.safe_dump(catalog))
    objects = render(tmp_path / "out", models_file)
    test_rollout_has_time_for_a_node_and_the_slowest_start(objects)
    seconds = {}
    for name, deployment in workers(objects).items():
        probe = pod(deployment)["containers"][0]["startupProbe"]
        seconds[name] = probe["periodSeconds"] * probe["failureThreshold"]
        assert probe["httpGet"] == {"path": "/readyz", "port": "health"}
    assert sorted(seconds.values()) == [1200, 1200 + 1000 - 180]


def test_drained_nodes_take_a_tenth_of_the_workers(objects: Objects) -> None:
    for budget in of_kind(objects, "PodDisruptionBudget").values():
        share = _share(budget["spec"]["maxUnavailable"])
        # Kubernetes rounds it up: never to 0, which would keep every node.
        assert 0 < share <= 0.1


@pytest.mark.parametrize("compute_classes", [False, True])
def test_workers_that_share_gpus_fill_them_up(tmp_path: Path, compute_classes: bool) -> None:
    objects = render(tmp_path, compute_classes=compute_classes)
    for model in MODELS:
        template = workers(objects)[f"worker-{slug(model.name)}"]["spec"]["template"]
        affinity = template["spec"]["affinity"]
        is_shared = model.gpu.share > 1
        assert ("podAffinity" in affinity) == is_shared
        assert ("podAntiAffinity" in affinity) == (not is_shared)
        evictable = template["metadata"]["annotations"][
            "cluster-autoscaler.kubernetes.io/safe-to-evict"
        ]
        assert evictable == str(is_shared).lower()


def _scaled(objects: Objects, model: str) -> dict[str, Any]:
    spec: dict[str, Any] = of_kind(objects, "ScaledObject")[f"worker-{slug(model)}"]["spec"]
    return spec


def _share(value: object) -> float:
    assert isinstance(value, str)
    assert value.endswith("%")
    return float(value[:-1]) / 100


def _rolling(update: dict[str, Any], count: int) -> tuple[int, int]:
    """A Deployment's surge and unavailable pods (k8s.io/kubernetes deployment util,
    ResolveFenceposts).

    A surge percentage is rounded up, an unavailable percentage is rounded down, and at least one of
    the two is above 0.
    """
    surge, unavailable = (
        value if isinstance(value, int) else rounded(_share(value) * count)
        for value, rounded in (
            (update["maxSurge"], math.ceil),
            (update["maxUnavailable"], math.floor),
        )
    )
    return surge, 1 if surge == unavailable == 0 else unavailable
