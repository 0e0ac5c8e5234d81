"""The bases of the images: the build gives them, by digest."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.infra.deploy.dockerfiles import FOLDER, IMAGES, run, stages


@pytest.mark.parametrize("name", IMAGES)
def test_every_base_is_given_by_the_build(name: str) -> None:
    text = (FOLDER / f"{name}.Dockerfile").read_text(encoding="utf-8")
    base = "CUDA_BASE" if name == "worker" else "PYTHON_BASE"
    names = {stage.name for stage in stages(name)}
    # `scratch` is empty, and no image.
    assert all(stage.base in names | {f"${{{base}}}", "scratch"} for stage in stages(name))
    assert len(stages(name)) > 1
    # Without a default: nobody builds on what a tag happens to be.
    assert f"\nARG {base}\n" in text
    assert f"ARG {base}=" not in text


def test_base_without_digest_is_refused(tmp_path: Path) -> None:
    bases, digest = tmp_path / "bases.env", f"sha256:{'a' * 64}"
    bases.write_text("PYTHON_BASE=docker.io/library/python:3.11\n")
    refused = run(FOLDER / "build.sh", "api", "api:1", BUILDER="echo", BASES=str(bases))
    assert refused.returncode == 2
    assert "pin.sh" in refused.stderr
    bases.write_text(f"PYTHON_BASE=docker.io/library/python:3.11@{digest}\n")
    built = run(
        FOLDER / "build.sh",
        "api",
        "api:1",
        "--push",
        BUILDER="echo",
        BASES=str(bases),
        REVISION="abc",
    )
    words = built.stdout.split()
    assert f"PYTHON_BASE=docker.io/library/python:3.11@{digest}" in words
    assert "REVISION=abc" in words
    assert "VERSION=0.1.0" in words
    assert words[-2:] == ["--push", "."]


def test_worker_is_not_built_on_a_base_without_digest() -> None:
    assert (
        run(
            FOLDER / "build.sh", "worker", "worker:1", BUILDER="echo", CUDA_BASE="r/cuda:1"
        ).returncode
        == 2
    )
    base = f"r/cuda@sha256:{'b' * 64}"
    assert (
        f"CUDA_BASE={base}"
        in run(FOLDER / "build.sh", "worker", "w:1", BUILDER="echo", CUDA_BASE=base).stdout
    )


def test_pinning_puts_todays_digest_behind_the_tag(tmp_path: Path) -> None:
    digest = f"sha256:{'c' * 64}"
    docker = tmp_path / "docker"
    docker.write_text(
        '#!/bin/sh\n[ "$3" = inspect ] && [ "$4" = "docker.io/library/python:3.11-slim-bookworm" ]'
        f" && echo {digest}\n"
    )
    docker.chmod(0o755)
    out = tmp_path / "bases.env"
    done = run(FOLDER / "pin.sh", out, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert re.search(
        rf"^PYTHON_BASE=docker.io/library/python:3\.11-slim-bookworm@{digest}$",
        out.read_text(),
        re.M,
    )


RENOVATE = json.loads(Path(".github/renovate.json").read_text(encoding="utf-8"))
IMAGE = re.compile(r"(docker\.io|gcr\.io|us-docker\.pkg\.dev/cloud-ops-agents-artifacts)/[^\s\"]+")


def seen_by_the_bot(path: str, text: str) -> set[str]:
    """The images in a file for which the bot proposes digests, without those that they have."""
    images = set()
    for manager in RENOVATE["customManagers"]:
        patterns = (pattern.strip("/") for pattern in manager["managerFilePatterns"])
        if any(re.search(pattern, path) for pattern in patterns):
            for match in manager["matchStrings"]:
                found = re.finditer(match.replace("(?<", "(?P<"), text)
                images |= {f"{one['depName']}:{one['currentValue']}" for one in found}
    return images


@pytest.mark.parametrize(
    "path",
    [
        "infra/docker/bases.env",
        "infra/compose/images.env",
        "cloudbuild.yaml",
        "infra/cloudbuild/deploy.yaml",
        "infra/cloudbuild/rollback.yaml",
        "infra/terraform/modules/options/variables.tf",
        "infra/terraform/modules/region/variables.tf",
    ],
)
def test_bot_renews_every_image_by_digest(path: str) -> None:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    images = {found[0] for found in IMAGE.finditer(text)}
    assert images
    named = {one if ":" in one.rpartition("/")[2] else f"{one}:None" for one in images}
    assert seen_by_the_bot(path, text) == named
    pinned = IMAGE.sub(lambda found: f"{found[0]}@sha256:{'a' * 64}", text)
    assert seen_by_the_bot(path, pinned) == named


def test_bot_proposes_digests() -> None:
    (rule,) = [one for one in RENOVATE["packageRules"] if one.get("pinDigests")]
    assert rule["matchDatasources"] == ["docker"]
    assert {one["datasourceTemplate"] for one in RENOVATE["customManagers"]} == {"docker"}
