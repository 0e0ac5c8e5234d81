"""Objects in the bucket outlive the references to them.

Terraform sets an expiration for every folder that the code writes to.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from api.inputs import storage
from shared.models.catalog_file import read_catalog
from shared.settings import ApiSettings
from shared.stores.objects import LINK_VALID_S
from tests.infra.deploy.terraform import Plan, api_settings

DAY_S = 86_400


@pytest.fixture(scope="module")
def kept_s(plan: Plan) -> dict[str, int]:
    """How long the bucket keeps each folder's objects, in seconds."""
    (bucket,) = [
        found for found in plan.of("google_storage_bucket") if found["name"].endswith("-objects")
    ]
    conditions = [condition for rule in bucket["lifecycle_rule"] for condition in rule["condition"]]
    return {
        folder.rstrip("/"): one["age"] * DAY_S
        for one in conditions
        for folder in one["matches_prefix"] or ()
    }


def test_every_folder_that_is_written_has_its_end(kept_s: dict[str, int]) -> None:
    sources = [
        path.read_text("utf-8")
        for top in ("api", "shared", "workers")
        for path in Path(top).rglob("*.py")
    ]
    pattern = r'object_key\("(\w+)"|key = f"(\w+)/|^FOLDER = "(\w+)"|^[A-Z]+ = "(batches|files)/'
    written = {
        name
        for source in sources
        for found in re.findall(pattern, source, re.MULTILINE)
        for name in found
        if name
    }
    assert written == set(kept_s)


def test_results_outlive_cache_and_predictions(kept_s: dict[str, int], plan: Plan) -> None:
    prediction_keep_s = int(api_settings(plan, "europe-west4")["PENSTOCK_PREDICTION_KEEP_S"] or 0)
    for model in read_catalog(Path("models.yaml")).models:
        pointed_to_s = (
            model.cache.ttl_s + model.deadline.longest_s + max(prediction_keep_s, LINK_VALID_S)
        )
        assert kept_s["results"] >= pointed_to_s


def test_answers_and_files_outlive_what_they_promise(kept_s: dict[str, int], plan: Plan) -> None:
    assert kept_s["answers"] > int(
        api_settings(plan, "europe-west4")["PENSTOCK_IDEMPOTENCY_KEEP_S"] or 0
    )
    assert kept_s["files"] >= storage.KEEP_S
    assert kept_s["inputs"] >= storage.KEEP_S


def test_inputs_outlive_dead_letters(kept_s: dict[str, int], plan: Plan) -> None:
    dead = [found for found in plan.of("google_pubsub_subscription") if ".dead." in found["name"]]
    assert dead
    for found in dead:
        assert kept_s["inputs"] > int(found["message_retention_duration"].removesuffix("s"))


def test_terraform_keeps_as_long_as_the_code_by_default(plan: Plan) -> None:
    given, fields = api_settings(plan, "europe-west4"), ApiSettings.model_fields
    for name in ("idempotency_keep_s", "prediction_keep_s"):
        assert float(given[f"PENSTOCK_{name.upper()}"] or 0) == fields[name].default


def test_terraform_knows_the_defaults_of_the_catalog(tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text(
        "models: [{name: tiny, task: embedding, source: 'hf:a/b', dimensions: 4,"
        " batch: {max_tokens: 8}}]"
    )
    (model,) = read_catalog(models).models
    terraform = Path("infra/terraform/platform/models.tf").read_text("utf-8")
    assert f"try(entry.cache.ttl_s, {model.cache.ttl_s})" in terraform
    assert f"try(entry.deadline.longest_s, {model.deadline.longest_s:g})" in terraform
    assert f"try(entry.gpu.count, {model.gpu.count})" in terraform
    assert f"try(entry.gpu.share, {model.gpu.share})" in terraform
    assert f'try(entry.gpu.sharing, "{model.gpu.sharing}")' in terraform
    assert f'try(entry.gpu.type, "{model.gpu.type}")' in terraform
