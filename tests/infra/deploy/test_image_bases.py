"""Base images: the build specifies them by digest."""

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
    # `scratch` is an empty base, not an image.
    assert all(stage.base in names | {f"${{{base}}}", "scratch"} for stage in stages(name))
    assert len(stages(name)) > 1
    # Because there is no default, no build uses whatever a tag currently refers to.
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


def no_registry(folder: Path) -> dict[str, str]:
    """An environment where no registry responds."""
    docker = folder / "docker"
    docker.write_text("#!/bin/sh\necho 'no such host' >&2\nexit 1\n")
    docker.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_digest_that_the_bot_proposed_is_what_a_build_stands_on(tmp_path: Path) -> None:
    """Once the bot's pull request is merged, builds use its digest without querying a registry."""
    was, now = (f"sha256:{letter * 64}" for letter in "ab")
    path = "infra/docker/bases.env"
    pinned = pull_request(path, Path(path).read_text(), was)
    merged, out = tmp_path / "merged.env", tmp_path / "release.env"
    merged.write_text(pull_request(path, pinned, now))
    done = run(FOLDER / "pin.sh", out, SOURCE=str(merged), **no_registry(tmp_path))
    assert done.returncode == 0, done.stderr
    assert out.read_text() == merged.read_text()
    built = run(FOLDER / "build.sh", "api", "api:1", BUILDER="echo", BASES=str(out))
    assert f"PYTHON_BASE=docker.io/library/python:3.11-slim-bookworm@{now}" in built.stdout


def test_without_a_registry_nothing_is_pinned_and_nothing_built(tmp_path: Path) -> None:
    out = tmp_path / "release.env"
    done = run(FOLDER / "pin.sh", out, **no_registry(tmp_path))
    assert done.returncode != 0
    assert "no such host" in done.stderr
    assert not out.exists()
    # A release build's base is then missing or has no digest, and both are rejected.
    missing = run(FOLDER / "build.sh", "api", "api:1", BUILDER="echo", BASES=str(out))
    assert missing.returncode != 0
    assert "PYTHON_BASE" not in missing.stdout
    unpinned = run(FOLDER / "build.sh", "api", "api:1", BUILDER="echo")
    assert unpinned.returncode == 2
    assert "without a digest" in unpinned.stderr


def test_answer_of_a_registry_that_is_no_digest_is_refused(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho '<html>sign in</html>'\n")
    docker.chmod(0o755)
    done = run(FOLDER / "pin.sh", tmp_path / "out", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode != 0
    assert "the registry gave no digest" in done.stderr
    assert not (tmp_path / "out").exists()


def test_build_of_a_release_takes_its_bases_from_the_pinned_file() -> None:
    image = Path("infra/cloudbuild/image.sh").read_text()
    assert "BASES=$PWD/release/bases.env" in image
    assert "UNPINNED" not in image + Path("cloudbuild.yaml").read_text()


RENOVATE = json.loads(Path(".github/renovate.json").read_text(encoding="utf-8"))
IMAGE = re.compile(r"(docker\.io|gcr\.io|us-docker\.pkg\.dev/cloud-ops-agents-artifacts)/[^\s\"]+")


def pull_request(path: str, text: str, digest: str) -> str:
    """The file after a pull request in which the bot sets this digest for every image.

    The bot replaces the whole match with the compiled template. Without a template, it replaces
    existing values, so an image without a digest would never get one (renovatebot/renovate,
    lib/workers/repository/update/branch/auto-replace.ts).
    """
    (manager,) = [
        one
        for one in RENOVATE["customManagers"]
        if any(re.search(pattern.strip("/"), path) for pattern in one["managerFilePatterns"])
    ]
    (pattern,) = manager["matchStrings"]

    def compiled(found: re.Match[str]) -> str:
        upgrade = {**found.groupdict(), "newValue": found["currentValue"], "newDigest": digest}
        kept = re.sub(
            r"\{\{#if (\w+)\}\}(.*?)\{\{/if\}\}",
            lambda one: one[2] if upgrade[one[1]] else "",
            manager["autoReplaceStringTemplate"],
        )
        return re.sub(r"\{\{\{(\w+)\}\}\}", lambda one: str(upgrade[one[1]]), kept)

    return re.sub(pattern.replace("(?<", "(?P<"), compiled, text)


def seen_by_the_bot(path: str, text: str) -> set[str]:
    """The images in a file for which the bot proposes digests, without their current digests."""
    images = set()
    for manager in RENOVATE["customManagers"]:
        patterns = (pattern.strip("/") for pattern in manager["managerFilePatterns"])
        if any(re.search(pattern, path) for pattern in patterns):
            for match in manager["matchStrings"]:
                found = re.finditer(match.replace("(?<", "(?P<"), text)
                images |= {f"{one['depName']}:{one['currentValue']}" for one in found}
    return images


WITH_IMAGES = [
    "infra/docker/bases.env",
    "infra/compose/images.env",
    "cloudbuild.yaml",
    "infra/cloudbuild/deploy.yaml",
    "infra/cloudbuild/rollback.yaml",
    "infra/terraform/modules/options/variables.tf",
    "infra/terraform/modules/region/variables.tf",
]


@pytest.mark.parametrize("path", WITH_IMAGES)
def test_pull_requests_of_the_bot_change_digests_and_nothing_else(path: str) -> None:
    text = Path(path).read_text(encoding="utf-8")
    unpinned = re.sub(r"@sha256:[a-f0-9]{64}", "", text)
    first, second = (f"sha256:{letter * 64}" for letter in "ab")
    pinned = pull_request(path, unpinned, first)
    images = [found[0] for found in IMAGE.finditer(unpinned)]
    assert pinned.count(f"@{first}") == len(images) > 0
    assert all(f"{image}@{first}" in pinned for image in images)
    assert pinned.replace(f"@{first}", "") == unpinned
    assert pull_request(path, pinned, second) == pinned.replace(first, second)


@pytest.mark.parametrize("path", WITH_IMAGES)
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
