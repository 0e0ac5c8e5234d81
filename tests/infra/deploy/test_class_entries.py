"""Manifests and the chart for catalog entries with custom classes: secrets, processes, startup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.kubernetes.placement import processes_of
from infra.kubernetes.site_chart import write_site_chart
from shared.models.catalog_file import read_catalog
from shared.models.class_variables import SecretReference
from tests.infra.deploy.manifests import Objects, pod, render, settings_of, workers

INTERFACE = {
    "inputs": {"properties": {}, "type": "object"},
    "output": {"type": "string"},
    "cog_version": "0.23.1",
    "sources_sha256": "0" * 64,
}
REFERENCE = "kubernetes:hub-tokens/read"
CLASSES: dict[str, dict[str, Any]] = {
    "caller": {
        "environment": {"MODE": "1"},
        "secrets": {
            "TOKEN": REFERENCE,
            "AGAIN": REFERENCE,
            "OTHER": "google:projects/p/secrets/s/versions/1",
        },
        "startup_s": 1180,
        "processes": 1,
    },
    "plain": {},
    "on-gpu": {"gpu": {"type": "l4"}},
}


@pytest.fixture(scope="module")
def models_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classes")
    (folder / "schema.json").write_text(json.dumps(INTERFACE))
    entries = [
        {
            **{"name": name, "task": "custom", "source": f"gs://bucket/{name}"},
            **{"interface": "schema.json"},
            **more,
        }
        for name, more in CLASSES.items()
    ]
    (folder / "models.yaml").write_text(json.dumps({"models": entries}))
    return folder / "models.yaml"


@pytest.fixture(scope="module")
def objects(models_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return render(tmp_path_factory.mktemp("manifests") / "out", models_file)


def worker_of(objects: Objects, name: str) -> dict[str, Any]:
    return workers(objects)[f"worker-{name}"]


def container_of(objects: Objects, name: str) -> dict[str, Any]:
    (container,) = (
        one for one in pod(worker_of(objects, name))["containers"] if one["name"] == "worker"
    )
    return dict(container)


def test_the_worker_of_a_class_gets_its_secrets_and_no_other_does(objects: Objects) -> None:
    found = {name: container_of(objects, name).get("env", []) for name in CLASSES}
    variable = SecretReference.parse(REFERENCE).variable
    wanted = {"secretKeyRef": {"name": "hub-tokens", "key": "read"}}
    assert found == {
        "caller": [{"name": variable, "valueFrom": wanted}],
        "plain": [],
        "on-gpu": [],
    }


def test_the_worker_of_a_class_has_as_many_processes_as_its_entry_says(
    objects: Objects, models_file: Path
) -> None:
    found = {
        name: settings_of(objects, worker_of(objects, name)).get("PENSTOCK_PROCESSES")
        for name in CLASSES
    }
    assert found == {"caller": "1", "plain": "2", "on-gpu": "1"}
    for model in read_catalog(models_file).models:
        assert str(processes_of([model])) == found[model.name]


def test_a_worker_of_several_models_has_the_smallest_number(models_file: Path) -> None:
    one, *others = read_catalog(models_file).models
    for numbers, smallest in (((3, 2), 2), ((2, 3), 2), ((None, 3), 3)):
        both = [
            model.model_copy(update={"processes": number})
            for model, number in zip((one, others[0]), numbers, strict=True)
        ]
        assert processes_of(both) == smallest


def test_probes_leave_a_class_the_time_of_its_entry(objects: Objects) -> None:
    def limit_s(name: str) -> int:
        probe = container_of(objects, name)["startupProbe"]
        return int(probe["periodSeconds"] * probe["failureThreshold"])

    assert limit_s("caller") >= limit_s("plain") + 1000
    for name in CLASSES:
        assert worker_of(objects, name)["spec"]["progressDeadlineSeconds"] > limit_s(name)
        assert container_of(objects, name)["livenessProbe"]["httpGet"]["path"] == "/livez"


@pytest.mark.slow(about_s=20)
def test_the_chart_gives_the_secrets_as_well(models_file: Path, tmp_path: Path) -> None:
    write_site_chart(tmp_path / "chart", read_catalog(models_file), models_file, version="1.2.3")
    variable = SecretReference.parse(REFERENCE).variable
    texts = [path.read_text() for path in (tmp_path / "chart").rglob("*.yaml")]
    (text,) = [text for text in texts if variable in text]
    assert text.count("hub-tokens") == 1
