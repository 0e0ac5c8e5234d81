"""Workers shared by several models: the plan, manifests, chart, Terraform, and autoscaler agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.kubernetes.deployment import read_gpu_types
from infra.kubernetes.placement import GIB, gpu_memory_bytes
from infra.kubernetes.site_chart import write_site_chart
from penstock_planning.deploy import show
from penstock_planning.deploy.plan import DeployPlan, make_plan
from penstock_planning.deploy.platform_variables import Platform
from penstock_planning.deploy.rates import DemandRates, ModelRate
from shared.errors import ConfigurationError
from shared.models.catalog import Catalog
from shared.models.catalog_file import read_catalog
from tests.infra.deploy.helm import templates
from tests.infra.deploy.manifests import (
    Objects,
    of_kind,
    pod,
    render,
    settings_of,
    workers,
)
from tests.infra.deploy.sites import example, kustomized
from tests.infra.deploy.terraform import plan_platform
from tools.planning.tests.deploy.planning import NO_PRICES, rate

pytestmark = pytest.mark.slow(about_s=60)

MODEL: dict[str, Any] = {
    "task": "embedding",
    "dimensions": 384,
    "batch": {"max_tokens": 2048, "max_items": 16},
    "gpu": {"type": "l4", "share": 2},
}
SHARED = ("texts", "words", "pages")


def document(**changes: Any) -> dict[str, Any]:
    """A catalog with three models that share workers, one of which has a canary, and one separate
    model.
    """
    models = [
        MODEL
        | {
            "name": name,
            "source": f"hf:org/{name}",
            "resources": {"gpu_memory_bytes": 3 * GIB},
        }
        for name in SHARED
    ]
    models[0]["canary"] = {"revision": "next"}
    models.append(MODEL | {"name": "others", "source": "hf:org/others"})
    step = {"input": {"text": "$input.text"}}
    flow = {
        "name": "reading",
        "input": {"text": "string"},
        "steps": [
            {"id": "one", "model": "words", **step},
            {"id": "two", "model": "others", **step},
        ],
        "output": "$two",
    }
    group = {"name": "Docs", "models": list(SHARED), "replicas": {"min": 1, "max": 7}}
    return {"models": models, "flows": [flow], "workers": [group]} | changes


@pytest.fixture
def models_file(tmp_path: Path) -> Path:
    return write(tmp_path, document())


def write(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def objects(tmp_path: Path, models_file: Path) -> Objects:
    return render(tmp_path / "out", models_file)


def test_they_are_one_deployment_with_one_of_everything(objects: Objects) -> None:
    names = {"worker-docs", "worker-others", "worker-texts-canary"}
    assert set(workers(objects)) == names
    for kind in ("PodDisruptionBudget", "ScaledObject", "ServiceAccount"):
        assert set(of_kind(objects, kind)) - {"gpu-nodes"} == names
    settings = settings_of(objects, workers(objects)["worker-docs"])
    assert settings["PENSTOCK_MODEL"] == "texts,words,pages"
    assert settings["PENSTOCK_PROCESSES"] == "1"
    spec = of_kind(objects, "ScaledObject")["worker-docs"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 7)


def test_the_autoscaler_adds_up_what_each_model_asks_for(objects: Objects) -> None:
    triggers = of_kind(objects, "ScaledObject")["worker-docs"]["spec"]["triggers"]
    assert [one["name"] for one in triggers] == ["arrivals", "work", "messages"]
    for trigger in triggers:
        query = trigger["metadata"]["query"]
        assert set(re.findall(r'worker="(.*?)"', query)) == {"docs"}
        seconds = r'inference_seconds_sum\{worker="docs",model="(.*?)"\}'
        assert set(re.findall(seconds, query)) == set(SHARED), "the seconds of its own items"
    asked = [
        set(re.findall(r'items_\w+\{model="(.*?)"', one["metadata"]["query"])) for one in triggers
    ]
    assert asked[:2] == [set(SHARED)] * 2
    assert set(re.findall(r"jobs[.](\w+)[.]workers", triggers[2]["metadata"]["query"])) == set(
        SHARED
    )


def test_weights_of_all_models_are_mounted(tmp_path: Path, models_file: Path) -> None:
    objects = render(tmp_path / "weights", models_file, weights_bucket="weights")
    own = pod(workers(objects)["worker-docs"])
    mounted = {
        volume["name"]: volume["csi"]["volumeAttributes"]["mountOptions"]
        for volume in own["volumes"]
        if "csi" in volume
    }
    paths = {one["name"]: one["mountPath"] for one in own["containers"][0]["volumeMounts"]}
    assert len(mounted) == len(SHARED)
    for name, options in mounted.items():
        repository = paths[name].removeprefix("/var/cache/penstock-weights/")
        assert f"only-dir={repository}," in options
    sizes = [int(re.findall(r"max-size-mb:(\d+)", one)[0]) for one in mounted.values()]
    (cache,) = (one for one in own["volumes"] if one["name"] == "gke-gcsfuse-cache")
    assert sum(sizes) <= int(cache["emptyDir"]["sizeLimit"].removesuffix("Mi"))


def test_a_worker_has_the_flows_that_it_carries_on(tmp_path: Path, objects: Objects) -> None:
    read: dict[str, Catalog] = {}
    for name, found in of_kind(objects, "ConfigMap").items():
        if name.startswith("models-"):
            path = tmp_path / f"{name}.yaml"
            path.write_text(found["data"]["models.yaml"])
            read[found["metadata"]["labels"]["penstock.dev/model"]] = read_catalog(path)
    for worker, own in (("docs", set(SHARED)), ("others", {"others"})):
        assert [flow.name for flow in read[worker].flows] == ["reading"]
        assert {one.name for one in read[worker].models} == own | {"words", "others"}
    assert read["texts-canary"].flows == ()
    assert [one.name for one in read["texts-canary"].models] == ["texts"]


def test_chart_makes_what_the_overlay_makes(tmp_path: Path, models_file: Path) -> None:
    catalog = read_catalog(models_file)
    autoscaling = {"prometheus": "http://prometheus:9090"}
    wanted = kustomized(tmp_path / "site", models_file, example(autoscaling=autoscaling))
    write_site_chart(tmp_path / "chart", catalog, models_file, version="1.2.3")
    (made,) = templates(tmp_path / "chart", [example(autoscaling=autoscaling)])
    assert made.refusal == ""
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in made.objects}
    assert by_name == {(one["kind"], one["metadata"]["name"]): one for one in wanted}
    assert ("ScaledObject", "worker-docs") in by_name


def test_rights_are_given_to_the_accounts_of_the_pods(
    tmp_path: Path, models_file: Path, objects: Objects
) -> None:
    plan = plan_platform(tmp_path, models_file=str(models_file.resolve()))
    pulling: dict[str, set[str]] = {}
    for found in plan.of("google_pubsub_subscription_iam_member"):
        if found["member"].startswith("principal://"):
            account = found["member"].rpartition("/")[2]
            pulling.setdefault(account, set()).add(found["subscription"])
    for name, deployment in workers(objects).items():
        account = pod(deployment)["serviceAccountName"]
        models = settings_of(objects, deployment)["PENSTOCK_MODEL"].split(",")
        own = {f"jobs.{model}.{priority}" for model in models for priority in ("workers", "batch")}
        # The other revision's workers take over what a canary leaves behind.
        assert (
            own
            <= pulling.pop(account)
            <= own | {f"jobs.texts.canary.{priority}" for priority in ("workers", "batch")}
        ), name
    assert pulling == {}
    ours = planned(models_file, {name: rate(1) for name in SHARED})
    assert sorted(ours.topics) == sorted(one["name"] for one in plan.of("google_pubsub_topic"))
    pools = {one["name"] for one in plan.of("google_container_node_pool")}
    assert pools == {*ours.pools["europe-west4"], "general"}


def planned(models_file: Path, rates: dict[str, ModelRate], **given: Any) -> DeployPlan:
    asked = DemandRates(models=rates, **given)
    platform = Platform.model_validate(
        {"api": {"max_instances": 1}, "inboxes": {"per_region": 2, "slots": 2}}
    )
    return make_plan(read_catalog(models_file), asked, platform, NO_PRICES, read_gpu_types(), 0)


def test_plan_adds_up_the_loads_and_counts_the_pods_once(tmp_path: Path) -> None:
    content = document()
    del content["models"][0]["canary"]
    together = write(tmp_path, content)
    (tmp_path / "apart").mkdir()
    apart = write(tmp_path / "apart", {"models": content["models"]})
    rates = {name: rate(10.0, measured_share=2) for name in SHARED}
    (site,), (other,) = planned(together, rates).sites, planned(apart, rates).sites
    rows = {one.model.name: one for one in site.workers}
    single = {one.model.name: one for one in other.workers}
    # 30 items/s at 0.01 s each keep 0.3 workers busy: one shared worker is enough, compared with
    # three separate ones.
    assert {rows[name].processes_peak for name in SHARED} == {1}
    assert [one.nodes_peak for one in site.pools] == [1]
    assert sum(single[name].pods_peak for name in SHARED) == len(SHARED)
    assert [one.nodes_peak for one in other.pools] == [2]
    for name in SHARED:
        assert rows[name].computed_peak_per_s == single[name].computed_peak_per_s
        assert rows[name].answer_s >= single[name].answer_s, "they wait for each other"


def test_plan_of_a_load_of_two_workers(tmp_path: Path) -> None:
    content = document()
    content["workers"][0]["replicas"] = {"max": 2}
    rates = {name: rate(60.0, measured_share=2) for name in SHARED}
    plan = planned(write(tmp_path, content), rates)
    (row, *_) = (one for site in plan.sites for one in site.workers if one.model.name == "words")
    assert row.pods_peak >= 180 * 0.01 / 0.7
    (change,) = (
        one for one in plan.changes if one.where == "models.yaml" and "Docs" in one.setting
    )
    assert (change.setting, change.now) == ("workers.Docs: replicas.max", 2)
    assert change.needed == row.pods_most > 2


def test_plan_says_who_shares_workers(models_file: Path) -> None:
    plan = planned(models_file, {name: rate(1) for name in SHARED})
    assert "texts, words, pages: the same processes and pods, workers 'Docs'" in show.text(plan)
    rows = {one["model"]: one["workers"] for one in json.loads(show.plan_as_json(plan))["models"]}
    assert rows == {name: "Docs" for name in SHARED} | {
        "others": "others",
        "texts.canary": "texts.canary",
    }


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        ({"words": 6 * GIB}, "its models need 12.00 GiB of GPU memory"),
        ({"words": None}, "words.resources.gpu_memory_bytes: is required"),
    ],
)
def test_models_that_do_not_fit_are_refused_by_plan_and_manifests(
    tmp_path: Path, memory: dict[str, int | None], reason: str
) -> None:
    content = document()
    for entry in content["models"]:
        if entry["name"] in memory:
            entry["resources"] = {"gpu_memory_bytes": memory[entry["name"]]}
    models_file = write(tmp_path, content)
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        planned(models_file, {"words": rate(1)})
    out = tmp_path / "out"
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        render(out, models_file)
    assert not out.exists()


def test_memory_of_a_worker_leaves_room_for_contexts(models_file: Path) -> None:
    (group, *_) = read_catalog(models_file).worker_groups
    share = gpu_memory_bytes(group.gpu, read_gpu_types())
    assert 9 * GIB < share < read_gpu_types()["l4"].gpu_memory_gib * GIB / 2


def test_a_cluster_outside_has_all_of_them_or_none(tmp_path: Path, models_file: Path) -> None:
    with pytest.raises(ConfigurationError, match="workers 'Docs' also require pages, texts"):
        render(tmp_path / "out", models_file, models=("words", "others"))
    objects = render(tmp_path / "out", models_file, models=("others",))
    assert set(workers(objects)) == {"worker-others"}
