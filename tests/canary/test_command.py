"""`penstock canary`, as operators run it."""

import asyncio
import json
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from infra.cli.main import app
from shared.canary.store import CanaryStore
from shared.canary.verdict import CanaryCounts, RevisionCounts
from shared.models.catalog_file import read_catalog
from shared.models.interface import ModelInterface

ENTRIES = """\
# The models.
models:
  - name: texts
    task: embedding
    source: hf:a/texts  # from the hub
    revision: "1"
    dimensions: 4
{canary}
    # What one batch holds.
    batch: {{max_tokens: 64}}
  - name: others
    task: embedding
    source: hf:a/others
    dimensions: 4
    batch: {{max_tokens: 64}}
"""
IN_A_LINE = '    canary: {revision: "2", share: 0.25}'
IN_A_BLOCK = """\
    canary:
      revision: "2"
      source: local:weights
      replicas:
        min: 2
        max: 3  # for now"""


@pytest.fixture
def models_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str, request: pytest.FixtureRequest
) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(ENTRIES.format(canary=IN_A_LINE))
    monkeypatch.setenv("PENSTOCK_MODELS_FILE", str(path))
    monkeypatch.setenv("PENSTOCK_REDIS_URL", redis_url)
    return path


def types(*words: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["canary", *words])
    assert done.exit_code == status, done.output
    return done.stdout if status == 0 else done.stderr


def happen(redis_url: str, models_file: Path, *, failed: int = 0) -> None:
    """A live canary worker with ten items processed; the stable revision processed a hundred."""

    async def run() -> None:
        canary = read_catalog(models_file).canaries["texts"]
        stable, ours = RevisionCounts(), RevisionCounts()
        for _ in range(100):
            stable.add(0.1)
        for _ in range(10 - failed):
            ours.add(0.1)
        ours.add_failed(failed)
        async with CanaryStore(redis_url) as canary_store:
            await canary_store.say_alive(canary)
            await canary_store.count(canary, CanaryCounts(stable, ours, compared=4, outside=1))

    asyncio.run(run())


def status() -> dict[str, object]:
    (one,) = json.loads(types("status", "--json"))
    assert isinstance(one, dict)
    return one


def test_status_says_what_both_revisions_did(models_file: Path, redis_url: str) -> None:
    assert (status()["alive"], status()["share"]) == (False, 0.0)
    happen(redis_url, models_file)
    found = status()
    told = {name: found[name] for name in ("model", "revision", "share", "items", "compared")}
    assert told == {"model": "texts", "revision": "2", "share": 0.25, "items": 10, "compared": 4}
    assert found["p95_s"] == pytest.approx(0.1, rel=0.1)
    assert "texts" in types("status")


def test_operator_takes_back_and_resumes(models_file: Path, redis_url: str) -> None:
    happen(redis_url, models_file)
    assert "taken back" in types("take-back", "texts")
    assert "already" in types("take-back", "texts")
    assert (status()["share"], str(status()["taken_back"])[:7]) == (0.0, "by user")
    types("resume", "texts")
    assert (status()["taken_back"], status()["items"]) == ("", 0)


@pytest.mark.parametrize("canary", [IN_A_LINE, IN_A_BLOCK])
def test_promoted_canary_is_the_revision(models_file: Path, redis_url: str, canary: str) -> None:
    models_file.write_text(ENTRIES.format(canary=canary))
    happen(redis_url, models_file)
    before = models_file.read_text()
    types("promote", "texts")
    model = read_catalog(models_file).find("texts")
    source = "local:weights" if "local" in canary else "hf:a/texts"
    assert (model.revision, model.source, model.canary) == ("2", source, None)
    kept = [line for line in before.replace(canary + "\n", "").splitlines() if "1" not in line]
    after = models_file.read_text()
    assert all(line.replace("hf:a/texts", source) in after for line in kept)
    models_file.write_text(before)
    assert status()["taken_back"] == "promoted"


CUSTOM_ENTRY = """\
  - name: mine
    task: custom
    source: gs://bucket/mine
    interface: penstock.schema.json
"""


def test_canary_beside_a_custom_model_is_promoted_by_its_alias(
    models_file: Path, redis_url: str
) -> None:
    interface = ModelInterface(
        inputs={"type": "object", "properties": {"text": {"type": "string"}}},
        output={"type": "string"},
        cog_version="0.23.1",
        sources_sha256="0" * 64,
    )
    (models_file.parent / "penstock.schema.json").write_text(interface.as_json)
    entries = ENTRIES.format(canary=IN_A_LINE + "\n    aliases: [words]") + CUSTOM_ENTRY
    models_file.write_text(entries)
    happen(redis_url, models_file)
    types("promote", "words")
    assert read_catalog(models_file).find("texts").revision == "2"
    assert sorted(path.name for path in models_file.parent.iterdir()) == [
        "models.yaml",
        "penstock.schema.json",
    ]


def test_bad_canary_is_promoted_only_by_force(models_file: Path, redis_url: str) -> None:
    before = models_file.read_text()
    assert "no results yet" in types("promote", "texts", status=1)
    happen(redis_url, models_file, failed=10)
    types("take-back", "texts")
    assert "it was taken back" in types("promote", "texts", status=1)
    assert "was taken back" in types("promote", "--help")
    assert models_file.read_text() == before
    types("promote", "texts", "--force")
    assert read_catalog(models_file).find("texts").revision == "2"


def test_errors_name_the_field(models_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no canary" in types("take-back", "others", status=1)
    assert "'none' does not exist" in types("resume", "none", status=1)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://127.0.0.1:1/0")
    assert "PENSTOCK_REDIS_URL" in types("status", status=1)


def test_counts_of_a_newer_release_are_skipped(models_file: Path, redis_url: str) -> None:
    happen(redis_url, models_file)
    before = status()
    with redis.Redis.from_url(redis_url) as client:
        (key,) = client.keys("*:counts:*")
        for field in ("shadowed", "stable:retries", "third:items", "canary:bins:3"):
            client.hset(key, field, "1.5")
    assert status() == before
