"""Weights go from a hub to a store, and from there to a worker: complete or not at all, with the
token only in the request.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from tests.limits import START_LIMIT_S
from tests.workers.hub import Hub, served
from workers.models.source import resolve, resolve_file

pytestmark = pytest.mark.slow

TOKEN = "hf_notasecretbutatest"
FILES = {"config.json": b"{}", "1_Pooling/config.json": b"{}", "model.safetensors": b"w" * 70_000}
CATALOG = """models:
  - {name: gated, task: embedding, source: 'hf:org/gated', dimensions: 4, batch: {max_tokens: 8}}
  - {name: shipped, task: embedding, source: 'package:x', dimensions: 4, batch: {max_tokens: 8}}
"""
NOBODY = "the worker went to the hub"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with served(Hub(dict(FILES), TOKEN)) as running:
        yield running


def weights(
    hub: Hub, folder: Path, *words: str, catalog: str = CATALOG
) -> subprocess.CompletedProcess[str]:
    """Runs `penstock weights prefetch` as a user would, with the token in a file."""
    (folder / "token").write_text(TOKEN)
    (folder / "models.yaml").write_text(catalog)
    command = [sys.executable, "-m", "infra.cli.main", "weights", "prefetch"]
    command += ["--to", str(folder / "bucket"), "--models-file", str(folder / "models.yaml")]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    given = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "home"),
        "HF_TOKEN_PATH": str(folder / "token"),
    }
    done = subprocess.run(
        [*command, *words],
        env=plain | given,
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    assert TOKEN not in done.stdout + done.stderr
    return done


def found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path that a worker uses when the store is mounted and the hub is unreachable."""

    def no_hub(repository: str, revision: str) -> Path:
        raise AssertionError(NOBODY)

    monkeypatch.setattr("workers.models.source._from_hub", no_hub)
    return resolve("hf:org/gated", "main", folder / "cache", weights_dir=folder / "bucket")


def test_a_gated_model_gets_to_a_worker_without_token_or_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = weights(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"gated: org/gated@main: copied 3 files, 0 MB, commit {hub.commit}\n"
    folder = found(tmp_path, monkeypatch)
    assert {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    } == FILES


def test_repositories_of_adapters_are_copied_too(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = """models:
  - name: painter
    task: image
    source: package:x
    batch: {max_pixel_steps: 8}
    image:
      adapters:
        ink: {source: 'hf:org/gated/1_Pooling/ink.safetensors'}
        oil: {source: 'hf:org/gated/model.safetensors'}
"""
    done = weights(hub, tmp_path, catalog=catalog)
    assert done.stdout == f"painter: org/gated@main: copied 3 files, 0 MB, commit {hub.commit}\n"
    folder, bucket = found(tmp_path, monkeypatch), tmp_path / "bucket"
    source = "hf:org/gated/model.safetensors"
    file = resolve_file(source, "main", tmp_path / "cache", weights_dir=bucket)
    assert file == folder / "model.safetensors"
    for missing, reason in (
        ("hf:org/gated/1_Pooling/ink.safetensors", "is not a file"),
        ("hf:org/ink.safetensors", "must be hf:ORG/NAME/FILE"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            resolve_file(missing, "main", tmp_path / "cache", weights_dir=bucket)


def test_repositories_of_gguf_files_and_text_adapters_are_copied(hub: Hub, tmp_path: Path) -> None:
    catalog = """models:
  - name: writer
    task: text
    engine: llama.cpp
    source: hf:org/gated/model.gguf
    batch: {max_tokens: 4096}
    generation:
      adapters:
        law: {source: 'hf:org/gated/law.gguf'}
"""
    done = weights(hub, tmp_path, catalog=catalog)
    names = "writer, writer adapter law"
    assert done.stdout == f"{names}: org/gated@main: copied 3 files, 0 MB, commit {hub.commit}\n"


def test_what_is_there_is_not_copied_again(hub: Hub, tmp_path: Path) -> None:
    weights(hub, tmp_path)
    hub.asked.clear()
    assert weights(hub, tmp_path).stdout == "gated: org/gated@main: is there\n"
    assert hub.asked == []


def test_a_branch_that_moved_is_replaced_whole(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights(hub, tmp_path)
    hub.commit = "f" * 40
    hub.files = {"config.json": b"{...}", "model.safetensors": b"new"}
    assert weights(hub, tmp_path, "--again").returncode == 0
    folder = found(tmp_path, monkeypatch)
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == sorted(hub.files)
    assert (folder / "model.safetensors").read_bytes() == b"new"
    assert json.loads((folder.parent / "main.json").read_text())["commit"] == "f" * 40


def test_a_copy_outlives_a_refresh_that_fails(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights(hub, tmp_path)
    hub.token = "another"
    assert weights(hub, tmp_path, "--again").returncode == 1
    assert (found(tmp_path, monkeypatch) / "config.json").read_bytes() == FILES["config.json"]


def test_a_canary_has_a_copy_of_its_own(hub: Hub, tmp_path: Path) -> None:
    catalog = CATALOG.replace("dimensions: 4,", "dimensions: 4, canary: {revision: next},", 1)
    done = weights(hub, tmp_path, catalog=catalog)
    copied = [line.partition(": copied")[0] for line in done.stdout.splitlines()]
    assert copied == ["gated: org/gated@main", "gated.canary: org/gated@next"]


def test_a_control_is_copied_like_its_model(hub: Hub, tmp_path: Path) -> None:
    control = "controls: {edges: {source: 'hf:org/gated', revision: next}}"
    catalog = f"""models:
  - name: drawer
    task: image
    source: package:x
    batch: {{max_pixel_steps: 8}}
    image: {{{control}}}
"""
    done = weights(hub, tmp_path, "--model", "drawer", catalog=catalog)
    assert done.stdout.startswith("drawer edges: org/gated@next: copied 3 files"), done.stderr


@pytest.mark.parametrize("missing", ["main.json", "main/model.safetensors"])
def test_half_a_copy_is_not_taken(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    weights(hub, tmp_path)
    (tmp_path / "bucket/hub/org/gated" / missing).unlink()
    with pytest.raises(AssertionError, match=NOBODY):
        found(tmp_path, monkeypatch)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"commit": 1}', b"\xff"])
def test_a_broken_list_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    listed = tmp_path / "bucket/hub/org/gated/main.json"
    listed.parent.mkdir(parents=True)
    listed.write_bytes(content)
    with pytest.raises(AssertionError, match=NOBODY):
        found(tmp_path, monkeypatch)


def test_a_token_that_may_not_is_said_and_not_shown(hub: Hub, tmp_path: Path) -> None:
    hub.token = "another"
    done = weights(hub, tmp_path)
    assert done.returncode == 1
    assert "hf:org/gated: the repository is gated" in done.stderr
    assert not list((tmp_path / "bucket").rglob("*.json"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--model", "shipped"],
            "shipped: its source package:x is not a model on the Hugging Face Hub",
        ),
        (["--model", "other"], "model 'other' does not exist"),
        (["--to", "s3://bucket"], "--to: must be gs://BUCKET or a folder, got s3://bucket"),
    ],
)
def test_what_can_not_be_copied_is_refused(
    hub: Hub, tmp_path: Path, words: list[str], said: str
) -> None:
    done = weights(hub, tmp_path, *words)
    assert done.returncode == 1
    assert said in done.stderr
