"""Deployments mount only the catalog, so it must contain the interface files that it refers to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.kubernetes.overlay import write_overlay
from infra.kubernetes.self_hosted import write_self_hosted
from infra.kubernetes.site import SelfHostedSite
from shared.errors import ConfigurationError
from shared.models.catalog import Catalog
from shared.models.catalog_file import read_catalog
from tests.infra.deploy.manifests import DEPLOYMENT
from tests.infra.deploy.sites import example

CLASS = {
    "inputs": {"properties": {}, "type": "object"},
    "output": {"type": "string"},
    "cog_version": "0.23.1",
    "sources_sha256": "0" * 64,
}
PIPELINE = {
    "pipeline": "FluxKontextPipeline",
    "tasks": ["text", "image"],
    "fields": ["guidance_scale"],
    "schedulers": ["default", "euler"],
    "defaults": {
        **{"width": 1024, "height": 1024, "steps": 28, "multiple": 16},
        **{"guidance_scale": 3.5, "scheduler": "default"},
    },
}
CATALOG = """\
models:
  - {name: caller, task: custom, source: "gs://bucket/caller", interface: caller.json}
  - name: editor
    task: image
    source: gs://bucket/editor
    batch: {max_pixel_steps: 2000000, max_items: 8}
    image: {steps: 4, interface: editor.json}
"""


@pytest.fixture
def models_file(tmp_path: Path) -> Path:
    folder = tmp_path / "catalog"
    folder.mkdir()
    (folder / "caller.json").write_text(json.dumps(CLASS))
    (folder / "editor.json").write_text(json.dumps(PIPELINE))
    (folder / "models.yaml").write_text(CATALOG)
    return folder / "models.yaml"


def test_each_worker_has_the_interface_of_its_model(models_file: Path, tmp_path: Path) -> None:
    catalog = read_catalog(models_file)
    write_overlay(tmp_path / "out", catalog, models_file, DEPLOYMENT)
    for model in catalog.models:
        mounted = tmp_path / "out" / f"worker-{model.name}" / "models.yaml"
        assert read_catalog(mounted).models == (model,)


def write_self_hosted_example(out: Path, catalog: Catalog, models_file: Path) -> None:
    write_self_hosted(out, SelfHostedSite.model_validate(example()), catalog, models_file)


def write_for_google(out: Path, catalog: Catalog, models_file: Path) -> None:
    write_overlay(out, catalog, models_file, DEPLOYMENT)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("write", [write_for_google, write_self_hosted_example])
def test_a_failing_run_leaves_the_earlier_overlay(
    models_file: Path, tmp_path: Path, write: Callable[[Path, Catalog, Path], None]
) -> None:
    catalog, out = read_catalog(models_file), tmp_path / "parent/out"
    write(out, catalog, models_file)
    earlier, interface = contents(out.parent), (models_file.parent / "caller.json").read_text()
    (models_file.parent / "caller.json").unlink()
    with pytest.raises(ConfigurationError, match=r"caller\.json"):
        write(out, catalog, models_file)
    assert contents(out.parent) == earlier
    (models_file.parent / "caller.json").write_text(interface)
    (out / "old.yaml").touch()
    write(out, catalog, models_file)
    assert contents(out.parent) == earlier


def test_self_hosted_clients_have_all_interfaces(models_file: Path, tmp_path: Path) -> None:
    catalog = read_catalog(models_file)
    site = SelfHostedSite.model_validate(example())
    write_self_hosted(tmp_path / "out", site, catalog, models_file)
    assert read_catalog(tmp_path / "out/clients/models.yaml").models == catalog.models


@pytest.mark.parametrize("name", ["caller", "editor"])
def test_a_catalog_that_is_mounted_alone_is_refused_with_the_remedy(
    models_file: Path, name: str
) -> None:
    (models_file.parent / f"{name}.json").unlink()
    with pytest.raises(ConfigurationError, match=f"{name}.json: No such file") as caught:
        read_catalog(models_file)
    assert "replace the path with the file's content" in caught.value.message
