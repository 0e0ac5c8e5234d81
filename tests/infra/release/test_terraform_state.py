"""A deployment's Terraform state, with the providers named by TFOFFLINE.

A home region that is gone for good: the Terraform commands from docs/how-to/lost-region.md, typed
line by line. That page's steps for keys, budgets and rows run in
tests/infra/test_incident_pages.py. A newer release applied to an older release's state: deployed
resources are moved, not recreated.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.infra.deploy.terraform import CHECKER
from tests.infra.release.programs import write_programs
from tests.infra.release.providers import providers, put_answers
from tests.infra.release.replay import PROJECT
from tests.infra.test_incident_pages import lines_of
from tests.limits import TEST_LIMIT_S

pytestmark = pytest.mark.slow(about_s=240)

LOST, R, ROOT = "europe-west4", "europe-west1", "infra/terraform/examples/multi-region"
IMAGE = "europe-docker.pkg.dev/my-project/penstock/api@sha256:0"
PRELUDE = """
set -euo pipefail
gcloud() { echo gcloud "$@" >> "$NOTED"; }
kubectl() { echo kubectl "$@" >> "$NOTED"; }
penstock() { echo penstock "$@" >> "$NOTED"; }
"""
KEPT = {
    "google_artifact_registry_repository",
    "google_bigquery_dataset",
    "google_bigquery_table",
    "google_secret_manager_secret",
    "google_storage_bucket",
}
"""Types of resources that have no region and hold data that can't be recreated."""
DELETED = {
    "google_artifact_registry_repository_iam_member",
    "google_project_iam_member",
    "google_pubsub_subscription",
    "google_pubsub_subscription_iam_member",
    "google_pubsub_topic",
    "google_pubsub_topic_iam_member",
    "google_service_account",
}
"""Deleted by the apply: the inboxes of the region's instances, and the account of its nodes."""
STEPS = ("repositories", "state rm", "-target", "keys init", "apply -var", "budgets restore")
UNSETTLED = {
    'module.platform.google_compute_backend_service.api["api"]': (["update"], {"backend"}),
}
"""Changes that appear in any plan, even an empty one, because the stand-in for the providers never
completes them.
"""


class Operator:
    """A person operating a deployment in two regions, and the commands they type."""

    def __init__(self, folder: Path, attach: Path) -> None:
        self.tree = folder / "tree"
        shutil.copytree(
            "infra",
            self.tree / "infra",
            ignore=shutil.ignore_patterns("__pycache__", ".terraform*"),
        )
        shutil.copy("models.yaml", self.tree)
        put_answers(self.tree)
        root = self.tree / ROOT
        # With a local backend, state.sh leaves the root module alone.
        (root / "backend.tf").write_text('terraform {\n  backend "local" {}\n}\n')
        # Reduces large counts so that each plan takes only seconds.
        main = root / "main.tf"
        text = main.read_text()
        for many, few in (
            ("per_region = 20, slots = 8", "per_region = 2, slots = 2"),
            ("max_instances = 10", "max_instances = 1"),
        ):
            assert many in text
            text = text.replace(many, few)
        main.write_text(text)
        (root / "own.auto.tfvars").write_text('domain = "api.example.com"\n')
        programs = write_programs(folder / "programs", project=PROJECT, attach=attach)
        self._noted = folder / "noted"
        self._noted.touch()
        self.environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "NOTED": str(self._noted),
            "P": PROJECT,
            "R": R,
            "LOST": LOST,
            "ROOT": ROOT,
            "STATE_BUCKET": f"{PROJECT}-penstock-state",
            "TF_VAR_registry_location": "europe",
            "TF_VAR_api_image": IMAGE,
        }

    def types(self, line: str) -> str:
        """Types a line and confirms its prompts with yes. Returns its output."""
        done = subprocess.run(
            ["bash", "-c", PRELUDE + line],
            cwd=self.tree,
            env=self.environment,
            input="yes\n" * 3,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TEST_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}"
        return done.stdout

    def applies(self) -> None:
        self.types('terraform -chdir="$ROOT" apply -var "project_id=$P"')

    def changes(self) -> list[dict[str, Any]]:
        """Changes that a plan would make now."""
        self.types(
            'terraform -chdir="$ROOT" plan -refresh=false -var "project_id=$P" -out "$PWD/p"'
        )
        shown = self.types('terraform -chdir="$ROOT" show -json "$PWD/p"')
        found: list[dict[str, Any]] = json.loads(shown[shown.index("{") :])["resource_changes"]
        return found

    def state(self) -> dict[str, dict[str, Any]]:
        """The resources Terraform knows about, by address."""
        shown = self.types('terraform -chdir="$ROOT" show -json')
        module = json.loads(shown[shown.index("{") :])["values"]["root_module"]
        return {one["address"]: one for one in _resources(module) if one["mode"] == "managed"}

    @property
    def noted(self) -> list[str]:
        return self._noted.read_text().splitlines()


def planned(changes: list[dict[str, Any]]) -> dict[str, tuple[list[str], set[str]]]:
    """Changes that a plan would make, by address: the actions, and the arguments that differ."""
    return {
        one["address"]: (one["change"]["actions"], _different(one["change"]))
        for one in changes
        if one["mode"] == "managed" and one["change"]["actions"] != ["no-op"]
    }


def _different(change: dict[str, Any]) -> set[str]:
    before, after = change["before"] or {}, change["after"] or {}
    unknown = {name for name, is_unknown in change["after_unknown"].items() if is_unknown is True}
    return unknown | {
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    }


def _resources(module: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from module.get("resources", [])
    for child in module.get("child_modules", []):
        yield from _resources(child)


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    missing = [name for name in ("terraform", "jq") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if not CHECKER:
        pytest.skip("TFOFFLINE names no stand-in for Terraform's providers")
    with providers(tmp_path) as attach:
        made = Operator(tmp_path, attach)
        made.types('sh infra/cloudbuild/state.sh "$ROOT" platform')
        yield made


def leave(root: Path) -> None:
    """Edits the root as the page describes: drops the lost region and separates its records."""
    main = root / "main.tf"
    text, count = re.subn(rf'^ +"{LOST}" = .*\n', "", main.read_text(), flags=re.MULTILINE)
    assert count == 1
    main.write_text(text.replace("  regions = {", "  records = { apart = true }\n  regions = {"))


def places(values: dict[str, Any]) -> set[str]:
    """The regions that a resource refers to in its location or in the path in its id."""
    named = [values.get(name) for name in ("location", "region", "zone", "id")]
    return {part for name in named if isinstance(name, str) for part in re.split("[/ ]", name)}


def test_home_is_moved_in_the_order_of_the_page(operator: Operator) -> None:
    operator.applies()
    before = operator.state()
    assert any(LOST in places(one["values"]) for one in before.values())
    leave(operator.tree / ROOT)
    lines = lines_of("lost-region", "The home region does not come back")
    printed = {}
    for line in lines:
        printed[line] = operator.types(line.partition("  # prints ")[0])
        if " state rm " in line:
            forgotten = (operator.tree / "var/lost.txt").read_text().splitlines()
            deleted = {
                one["address"]: one["change"]["before"]
                for one in operator.changes()
                if "delete" in one["change"]["actions"]
            }
            # None of the resources to delete are in the lost region, and none of them hold data.
            assert [name for name, one in deleted.items() if LOST in places(one)] == []
            assert {before[name]["type"] for name in deleted} & KEPT == set()

    # Every forgotten resource was in the lost region, and no other resource was forgotten.
    assert {name for name in forgotten if LOST not in places(before[name]["values"])} == set()
    after = operator.state()
    assert [name for name, one in after.items() if LOST in places(one["values"])] == []
    kept = {name: one["values"]["id"] for name, one in before.items() if one["type"] in KEPT}
    assert kept.items() <= {name: one["values"]["id"] for name, one in after.items()}.items()

    # Every model subscription is unchanged and still has its jobs.
    jobs = {name for name in before if ".module.model[" in name}
    assert jobs
    assert {name: before[name]["values"]["id"] for name in jobs} == {
        name: after[name]["values"]["id"] for name in jobs
    }
    gone = before.keys() - after.keys() - set(forgotten)
    assert {before[name]["type"] for name in gone} == DELETED

    # The API still exists and uses its new records.
    services = [one for one in after.values() if one["type"] == "google_cloud_run_v2_service"]
    apis = [one["values"] for one in services if one["values"]["name"] == "penstock-api"]
    assert [one["location"] for one in apis] == [R]
    (container,) = [c for c in apis[0]["template"][0]["containers"] if c.get("name") == "api"]
    assert container["image"] == IMAGE
    records = after['module.platform.module.records["records"].google_memorystore_instance.default']
    assert records["values"]["location"] == R
    assert planned(operator.changes()) == UNSETTLED

    # The keys exist before anything that reads them is recreated.
    order = [next(at for at, line in enumerate(lines) if step in line) for step in STEPS]
    assert order == sorted(order)
    noted = operator.noted
    assert noted.index("penstock keys init --from keys.json") < noted.index(
        "penstock budgets restore"
    )


def test_an_apply_without_the_image_would_delete_the_api(operator: Operator) -> None:
    """This is why the page asks for the image first."""
    operator.applies()
    operator.environment["TF_VAR_api_image"] = ""
    # An empty environment variable means an empty image, which is rejected, and nothing is deleted.
    with pytest.raises(AssertionError, match=r"api\.image"):
        operator.changes()
    del operator.environment["TF_VAR_api_image"]
    deleted = [one for one in operator.changes() if "delete" in one["change"]["actions"]]
    assert "google_cloud_run_v2_service" in {one["type"] for one in deleted}


MOVED = {
    ("keys", "google_storage_bucket"): "keys",
    ("keys", "google_storage_bucket_iam_member"): "keys",
    ("objects", "google_storage_bucket"): "objects",
    ("objects", "google_storage_bucket_iam_member"): "objects",
    ("reports", "google_storage_bucket"): "reports",
    ("reports", "google_storage_bucket_iam_member"): "reports",
    ("rows", "google_storage_bucket"): "rows",
    ("rows", "google_storage_bucket_iam_member"): "rows_put",
    ("weights", "google_storage_bucket"): "weights",
    ("weights", "google_storage_bucket_iam_member"): "weights",
}
"""The resources' names at the top level, before they were moved into modules."""


def put_back(state: dict[str, Any]) -> int:
    """Restores the resources' previous addresses in a state. Returns the number of resources."""
    count = 0
    for one in state["resources"]:
        module = one.get("module", "")
        name = module.removeprefix("module.platform.module.").partition("[")[0]
        if (old := MOVED.get((name, one["type"]))) is None:
            continue
        one |= {"module": "module.platform", "name": old}
        _, _, key = module.partition('["')
        for instance in one["instances"]:
            if key:
                instance["index_key"] = key.removesuffix('"]')
        count += 1
    return count


def test_older_state_is_moved_and_nothing_is_made_anew(operator: Operator) -> None:
    main = operator.tree / ROOT / "main.tf"
    text = main.read_text()
    image = "{ image = var.api_image }"
    options = f"keys_in_redis = true, max_instances = 1 }}\n  functions = {{ reports = {image} }}"
    assert "max_instances = 1 }" in text
    main.write_text(text.replace("max_instances = 1 }", options, 1))
    operator.applies()
    before = operator.state()
    file = operator.tree / ROOT / "terraform.tfstate"
    state = json.loads(file.read_text())
    assert put_back(state) == len(MOVED)
    file.write_text(json.dumps(state | {"serial": state["serial"] + 1}))
    older = operator.state()
    gone = before.keys() - older.keys()
    assert {before[name]["type"] for name in gone} == {kind for _, kind in MOVED}
    changes = operator.changes()
    assert planned(changes) == UNSETTLED
    moved = {
        one["previous_address"]: one["address"] for one in changes if "previous_address" in one
    }
    assert moved.keys() == older.keys() - before.keys()
    assert set(moved.values()) == gone

    # Each changed argument counts as a separate change.
    buckets = [one for one in state["resources"] if one["type"] == "google_storage_bucket"]
    (rows,) = [one for one in buckets if one["name"] == "rows"]
    rows["instances"][0]["attributes"]["public_access_prevention"] = "inherited"
    file.write_text(json.dumps(state | {"serial": state["serial"] + 2}))
    bucket = "module.platform.module.rows.google_storage_bucket.default"
    assert planned(operator.changes()) == UNSETTLED | {
        bucket: (["update"], {"public_access_prevention"})
    }
