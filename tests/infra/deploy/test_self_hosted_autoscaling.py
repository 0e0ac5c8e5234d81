"""Worker scaling outside Google, as Kustomize renders it, and the metrics that it needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.kubernetes.self_hosted import SCRAPE_FILE
from shared.models.catalog_file import read_catalog
from shared.models.kubernetes_names import slug
from tests.infra.deploy.manifests import Objects, of_kind, workers
from tests.infra.deploy.sites import GIVEN, MODELS, RABBITMQ, fits, rendered

pytestmark = pytest.mark.slow(about_s=6)

CATALOG = read_catalog(MODELS)
AUTOSCALING = {"prometheus": "http://prometheus.monitoring:9090"}
OF_BROKER: dict[str, dict[str, Any]] = {
    "embedded": {},
    "google": GIVEN,
    "rabbitmq": {"broker": RABBITMQ},
}
PRIORITIES = ("workers", "batch")
EXPORTED_BY = {"penstock_worker": "worker-", "penstock_api": "api", "penstock_queue": "functions"}
"""Metric exporters: prefixes of metric names, and of Deployment names."""

Rendered = tuple[Objects, dict[str, Any]]


@pytest.fixture(scope="module", params=list(OF_BROKER))
def scaled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """A site with each broker: its objects and Prometheus's configuration."""
    return site(tmp_path_factory.mktemp("scaled") / "site", **OF_BROKER[request.param])


def site(out: Path, **changes: object) -> Rendered:
    objects = rendered(out, **{"autoscaling": AUTOSCALING} | changes)
    return objects, yaml.safe_load((out / SCRAPE_FILE).read_text(encoding="utf-8"))


def triggers(objects: Objects) -> dict[str, list[dict[str, Any]]]:
    found = of_kind(objects, "ScaledObject")
    return {name: one["spec"]["triggers"] for name, one in found.items()}


def selectors(objects: Objects) -> list[tuple[str, dict[str, str]]]:
    """Each selector in a trigger's query: its metric and its labels."""
    return [
        (name, dict(re.findall(r'(\w+)="(.*?)"', matchers)))
        for of_worker in triggers(objects).values()
        for trigger in of_worker
        for name, matchers in re.findall(r"(\w+){(.*?)}", trigger["metadata"]["query"])
    ]


def test_every_worker_is_scaled_within_the_bounds_of_its_model(scaled: Rendered) -> None:
    objects, _ = scaled
    for model in CATALOG.deployed:
        name = f"worker-{slug(model.name)}"
        spec = of_kind(objects, "ScaledObject")[name]["spec"]
        assert spec["scaleTargetRef"] == {"name": name}
        bounds = (spec["minReplicaCount"], spec["maxReplicaCount"])
        assert bounds == (model.replicas.min, model.replicas.max)
        assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
    assert set(of_kind(objects, "ScaledObject")) == set(workers(objects))


def test_no_apply_takes_the_autoscalers_count_back(scaled: Rendered) -> None:
    objects, _ = scaled
    for deployment in workers(objects).values():
        assert "replicas" not in deployment["spec"]


def test_triggers_ask_the_prometheus_of_the_site_without_credentials(scaled: Rendered) -> None:
    objects, _ = scaled
    for of_worker in triggers(objects).values():
        for trigger in of_worker:
            assert trigger["metadata"]["serverAddress"] == AUTOSCALING["prometheus"]
            assert trigger["metadata"]["ignoreNullValues"] == "false"
            assert "authenticationRef" not in trigger
    assert of_kind(objects, "TriggerAuthentication") == {}


def test_messages_count_only_where_something_counts_them(tmp_path: Path) -> None:
    for broker, changes in OF_BROKER.items():
        objects, _ = site(tmp_path / broker, **changes)
        counted = ["arrivals", "work", *(["messages"] if broker == "rabbitmq" else [])]
        for of_worker in triggers(objects).values():
            assert [one["name"] for one in of_worker] == counted
        queues = {one["subscription"] for name, one in selectors(objects) if "queue" in name}
        priorities = {
            f"jobs.{one.name}.{priority}" for one in CATALOG.deployed for priority in PRIORITIES
        }
        assert queues == (priorities if broker == "rabbitmq" else set())


def test_queries_are_those_of_google_but_for_labels_and_messages(
    scaled: Rendered, objects: Objects
) -> None:
    theirs = triggers(objects)
    for name, of_worker in triggers(scaled[0]).items():
        for ours, google in zip(of_worker[:2], theirs[name], strict=False):
            assert ours["name"] == google["name"]
            assert _bare(ours) == _bare(google)
        if len(of_worker) > 2:
            item_s = _bare(of_worker[2]).partition(" * ")[2]
            assert item_s == _bare(theirs[name][2]).partition(" * ")[2]
            assert of_worker[2]["metadata"]["threshold"] == theirs[name][2]["metadata"]["threshold"]


def _bare(trigger: dict[str, Any]) -> str:
    return re.sub(r',(location|namespace)="[^"]*"', "", trigger["metadata"]["query"])


def test_site_says_by_which_labels_its_series_are_told_from_others(tmp_path: Path) -> None:
    labels = {"cluster": "berlin-1", "stage": "live"}
    objects, scraping = site(tmp_path / "two", autoscaling=AUTOSCALING | {"labels": labels})
    for _, asked in selectors(objects):
        assert asked.items() >= labels.items()
        assert asked.keys() & {"namespace", "location"} == set()
    for target in targets(objects, scraping).values():
        assert target.items() >= labels.items()
    alone, _ = site(tmp_path / "alone", autoscaling=AUTOSCALING | {"labels": {}})
    own = {"model", "worker", "lane", "subscription"}
    assert {label for _, asked in selectors(alone) for label in asked} <= own


def test_scraped_series_are_those_that_queries_select(scaled: Rendered) -> None:
    objects, scraping = scaled
    found = targets(objects, scraping)
    for name, asked in selectors(objects):
        chosen = [
            process
            for (process, _), target in found.items()
            if all(target.get(label, value) == value for label, value in asked.items())
        ]
        wanted = {
            "penstock_worker": "worker-",
            "penstock_api": "api",
            "penstock_queue": "functions",
        }
        (process,) = (one for start, one in wanted.items() if name.startswith(start))
        assert any(one.startswith(process) for one in chosen), (name, asked)
        assert asked["namespace"] == "penstock"
        if "worker" in asked:
            assert [one for one in chosen if one.startswith("worker-")] == [
                f"worker-{asked['worker']}"
            ]


def test_policies_let_prometheus_reach_every_target(scaled: Rendered) -> None:
    objects, scraping = scaled
    source = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    found = targets(objects, scraping)
    assert {("api", "metrics"), ("batches", "metrics")} < found.keys()
    for process, port in found:
        labels = of_kind(objects, "Deployment")[process]["spec"]["template"]["metadata"]["labels"]
        assert any(
            fits(policy["spec"]["podSelector"], labels)
            and source in rule["from"]
            and port in [one["port"] for one in rule["ports"]]
            for policy in of_kind(objects, "NetworkPolicy").values()
            for rule in policy["spec"].get("ingress", [])
        ), process


def test_samples_are_close_enough_for_the_queries(scaled: Rendered) -> None:
    (job,) = scaled[1]["scrape_configs"]
    shortest_s = min(
        int(number) * {"s": 1, "m": 60}[unit]
        for of_worker in triggers(scaled[0]).values()
        for trigger in of_worker
        for number, unit in re.findall(r"\[([0-9]+)([sm])\]", trigger["metadata"]["query"])
    )
    # A rate needs two samples, so leave room for losing one.
    assert int(job["scrape_interval"].removesuffix("s")) * 4 <= shortest_s


def targets(objects: Objects, scraping: dict[str, Any]) -> dict[tuple[str, str], dict[str, str]]:
    """The labels that Prometheus attaches to its targets, by Deployment and port.

    Prometheus discovers each port of each pod: prometheus.io, kubernetes_sd_config, role `pod`.
    """
    (job,) = scraping["scrape_configs"]
    (discovery,) = job["kubernetes_sd_configs"]
    assert discovery["role"] == "pod"
    found = {}
    for name, made in of_kind(objects, "Deployment").items():
        assert discovery["namespaces"]["names"] == [made["metadata"]["namespace"]]
        pod = made["spec"]["template"]
        of_pod = {
            f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', key)}": value
            for key, value in pod["metadata"]["labels"].items()
        } | {"__meta_kubernetes_pod_name": f"{name}-0"}
        for port in pod["spec"]["containers"][0]["ports"]:
            labels = of_pod | {"__meta_kubernetes_pod_container_port_name": port["name"]}
            if relabeled := _relabeled(labels, job["relabel_configs"]):
                found[name, port["name"]] = relabeled
    return found


def _relabeled(labels: dict[str, str], rules: list[dict[str, Any]]) -> dict[str, str]:
    """The labels that a target keeps. Empty if the target is dropped."""
    for rule in rules:
        value = ";".join(labels.get(name, "") for name in rule.get("source_labels", []))
        if rule.get("action") == "keep":
            if not re.fullmatch(rule["regex"], value):
                return {}
        else:
            assert rule.keys() <= {"source_labels", "target_label", "replacement"}
            labels = labels | {rule["target_label"]: rule.get("replacement", value)}
    return {name: value for name, value in labels.items() if value and not name.startswith("__")}
